"""Explains why prompts miss the prefix cache.

A log passes through four packages: ``read`` (log → prompts), ``find`` (where prompts stop being the same), ``price``
(what mending each break would save) and ``show`` (report, page, repaired log). ``live`` examines a running server.
"""

from __future__ import annotations

from anaphora.tools.doctor.options import DoctorOptions, ExplainOptions

__all__ = ["DoctorOptions", "ExplainOptions", "explain", "run"]


def run(options: DoctorOptions) -> int:
    """Examines a log or a running server; returns the exit code. Raises ConfigError if it cannot be read."""
    from anaphora.tools.doctor import command

    return command.main(options)


def explain(options: ExplainOptions) -> int:
    """Prints where and why the second request body stops reusing the first; returns the exit code."""
    from anaphora.tools.doctor import command

    return command.explain(options)

"""Why prompts miss: where the prefixes of a log break, what it costs, and the order that would be reused."""

from __future__ import annotations

from anaphora.tools.doctor.options import DoctorOptions, ExplainOptions

__all__ = ["DoctorOptions", "ExplainOptions", "explain", "run"]


def run(options: DoctorOptions) -> int:
    """Examine a log or a running server; the exit code. Raises ConfigError for what cannot be read."""
    from anaphora.tools.doctor import command

    return command.main(options)


def explain(options: ExplainOptions) -> int:
    """Say where and why the second request body stops reusing the first; the exit code."""
    from anaphora.tools.doctor import command

    return command.explain(options)

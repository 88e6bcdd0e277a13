"""Checks a chat template or a server's command line for what breaks prefix reuse or does not fit the memory."""

from __future__ import annotations

from anaphora.tools.lint.options import LintOptions, MovedDoctorFlags

__all__ = ["LintOptions", "MovedDoctorFlags", "run", "run_doctor_flags"]


def run(options: LintOptions) -> int:
    """Checks the target and prints what was found. Returns the exit code: 1 if something is wrong, else 0.

    Raises ConfigError if the target is neither a template nor a command line, or cannot be read.
    """
    from anaphora.tools.lint import command

    return command.main(options)


def run_doctor_flags(moved: MovedDoctorFlags, options: LintOptions) -> int:
    """Does what ``doctor --serve-flags`` and ``doctor --template`` did; ``options`` holds the doctor's other flags."""
    from anaphora.tools.lint import command

    return command.run_doctor_flags(moved, options)

"""A pass-through in front of any server that writes the log which the doctor reads."""

from __future__ import annotations

from anaphora.tools.record.options import RecordOptions

__all__ = ["RecordOptions", "run"]


def run(options: RecordOptions) -> int:
    """Pass requests on and record them until SIGINT or SIGTERM; the exit code. ConfigError for what cannot work."""
    from anaphora.tools.record import command

    return command.main(options)

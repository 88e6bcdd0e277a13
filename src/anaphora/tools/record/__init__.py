"""A pass-through in front of any server; it writes the log that the doctor reads."""

from __future__ import annotations

from anaphora.tools.record.options import RecordOptions

__all__ = ["RecordOptions", "run"]


def run(options: RecordOptions) -> int:
    """Passes requests on and records them until SIGINT or SIGTERM. Returns the exit code; raises ConfigError."""
    from anaphora.tools.record import command

    return command.main(options)

"""``anaphora bench``: the same requests with the prefix cache off and on, over HTTP."""

from __future__ import annotations

from anaphora.tools.bench.options import BenchOptions

__all__ = ["BenchOptions", "run"]


def run(options: BenchOptions) -> int:
    """Measures and reports. Returns the exit code: 1 if a request failed. Raises ConfigError."""
    from anaphora.tools.bench import command

    return command.main(options)

"""The A/B over HTTP: the same requests with the prefix cache off and on, and what the difference is worth."""

from __future__ import annotations

from anaphora.tools.bench.options import BenchOptions

__all__ = ["BenchOptions", "run"]


def run(options: BenchOptions) -> int:
    """Measure and report; the exit code (1 where a request failed). Raises ConfigError for what cannot be run."""
    from anaphora.tools.bench import command

    return command.main(options)

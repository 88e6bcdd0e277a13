"""Options of ``anaphora doctor`` and ``anaphora explain``; each field is a flag, as in ``anaphora.config``."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.config import option, parse_count
from anaphora.errors import ConfigError
from anaphora.tools.shared.output_file import refuse_standard_output


@dataclass(frozen=True)
class DoctorOptions:
    """What ``anaphora doctor`` examines and writes. Raises ConfigError for values that do not go together."""

    log: str | None = option(
        None,
        "log of requests (JSONL, a trace, gzip too), - for standard input, or the address of a running server "
        "(http://HOST:8000)",
        positional=True,
    )
    model: str | None = option(None, "model folder whose tokenizer and template read the log", metavar="FOLDER")
    chat_template: str | None = option(None, "file with the chat template to use", metavar="FILE")
    block_size: int = option(
        1, "tokens per block; only whole blocks are reused (vLLM: 16; Anaphora: 1, exact to the token)"
    )
    cache_tokens: int | None = option(
        None, "also run the log through a cache of this many tokens", parse=parse_count, metavar="N"
    )
    baseline: str | None = option(
        None, "earlier log to compare with; exit with 1 if the hit rate has fallen", metavar="LOG"
    )
    heads: bool = option(False, "only show the first 200 characters of the prompts, with what changes marked")
    fix: str | None = option(None, "write the log with the repairs to this file", metavar="OUT")
    prices: str | None = option(None, "JSON with prices per million tokens: in, cached, out", metavar="FILE")
    per_day: int | None = option(None, "requests per day; adds what a break costs per day", metavar="N")
    gpu_hour_price: float | None = option(None, "price of one machine per hour", metavar="PRICE")
    prefill_rate: float | None = option(
        None,
        "prompt tokens that the machine computes per second (default: measured from the log's records)",
        metavar="N",
    )
    json: str | None = option(None, "write the diagnosis to this file", metavar="FILE")
    html: str | None = option(None, "write an HTML page to this file", metavar="FILE")
    min_hit_rate: float | None = option(None, "exit with 1 if the hit rate is lower", metavar="0..1")

    sample: float = option(30.0, "with a server: seconds to watch it", metavar="SECONDS")
    api_key: str | None = option(None, "with a server: bearer token", metavar="KEY")

    @property
    def is_server(self) -> bool:
        """Whether ``log`` is the address of a running server."""
        return self.log is not None and self.log.startswith(("http://", "https://"))

    def __post_init__(self) -> None:
        refuse_standard_output(self, "json", "html", "fix")
        if self.log == self.baseline == "-":
            raise ConfigError("the log and --baseline cannot both be standard input: give one of them as a file")
        if self.is_server:
            self._check_server()
        if self.log is None:
            raise ConfigError("name a log (- for standard input) or the address of a running server")
        if self.block_size < 1:
            raise ConfigError(f"--block-size must be at least 1, got {self.block_size}")
        for name in ("per_day", "gpu_hour_price", "prefill_rate", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be a number above 0, got {value}")
        if self.min_hit_rate is not None and not 0 <= self.min_hit_rate <= 1:
            raise ConfigError(f"--min-hit-rate must be between 0 and 1, got {self.min_hit_rate}")

    def _check_server(self) -> None:
        for_logs = (
            *("model", "chat_template", "cache_tokens", "heads", "fix", "prices", "per_day"),
            "html",
        )
        for name in for_logs:
            if getattr(self, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} needs a log, and {self.log} is a server: record one with anaphora record")
        if not 0 <= self.sample <= 86400:
            raise ConfigError(f"--sample must be 0 to 86400 seconds, got {self.sample}")


@dataclass(frozen=True)
class ExplainOptions:
    """The two request bodies that ``anaphora explain`` compares. Raises ConfigError if one is missing."""

    first: str | None = option(None, "file with the first request body", positional=True)
    second: str | None = option(None, "file with the second request body", positional=True)
    model: str | None = option(None, "model folder whose tokenizer and template read the bodies", metavar="FOLDER")
    chat_template: str | None = option(None, "file with the chat template to use", metavar="FILE")

    def __post_init__(self) -> None:
        if self.first is None or self.second is None:
            raise ConfigError("name two files with request bodies")

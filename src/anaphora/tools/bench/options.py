"""The flags of ``anaphora bench``: one field each, as in ``anaphora.config``."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.config import option
from anaphora.errors import ConfigError
from anaphora.tools.shared.output_file import refuse_standard_output

WORKLOADS = (
    "customer-service",
    "support-chat",
    "code-generation",
    "knowledge-base",
    "knowledge-base-raw",
    "agent",
)


def parse_counts(text: str) -> tuple[int, ...]:
    """Parses ``10,20,30`` as whole numbers of at least 1. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{text!r} is not a list of counts: write whole numbers with commas, such as 10,20,30")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark. Raises ConfigError if they contradict each other."""

    model: str | None = option(
        None, "model to serve (as for serve), or the name to ask for at a URL", metavar="MODEL|NAME"
    )
    workload: str | None = option(
        None, "requests to send (default: customer-service, unless --log or sizes are given)", choices=WORKLOADS
    )
    shared: int | None = option(None, "tokens of the prefix that the prompts share", metavar="TOKENS")
    own: int | None = option(None, "tokens of a prompt (or turn) that are its own", metavar="TOKENS")
    out: int | None = option(None, "tokens of an answer", metavar="TOKENS")
    turns: int | None = option(None, "turns of a conversation", metavar="N")
    tenants: int | None = option(None, "number of different shared prefixes", metavar="N")
    log: str | None = option(
        None, "replay a JSONL file of request bodies, or of records written with --record-prompts", metavar="FILE"
    )
    timing: bool = option(False, "with --log: send each request at its logged arrival time")
    data: str | None = option(None, "folder with the airline log, which the agent workload needs", metavar="FOLDER")
    requests: int | None = option(
        None, "requests per round and side (default: 16; with --log the whole log)", metavar="N"
    )
    concurrency: int = option(8, "requests (or conversations) in flight at once", metavar="N")
    rate: float | None = option(
        None, "requests per second, at random times (open loop), instead of --concurrency", metavar="REQ/S"
    )
    rounds: int = option(2, "rounds; each has new prompts, and the order of off and on alternates", metavar="N")
    time_limit: float | None = option(
        None, "start no round that would end later than this many seconds after the start", metavar="SECONDS"
    )
    per_day: int = option(100_000, "requests per day, for the hours and the price", metavar="N")
    seed: int | None = option(
        None, "seed of texts and arrivals (default: 0 for own servers; a new one for a URL, whose cache may be warm)"
    )
    gpu_hour_price: float | None = option(None, "price of one machine per hour", metavar="PRICE")
    json: str | None = option(None, "write the figures to this file", metavar="FILE")
    html: str | None = option(None, "write a page with charts to this file", metavar="FILE")
    sweep: tuple[int, ...] = option(
        (), "also measure prefill at each of these concurrencies, such as 10,20,30", parse=parse_counts, metavar="N,N"
    )
    url: str | None = option(None, "measure only this server, as it is", metavar="URL")
    off_url: str | None = option(None, "a running server without prefix caching", metavar="URL")
    on_url: str | None = option(None, "the same server with prefix caching", metavar="URL")
    api_key: str | None = option(None, "bearer token for the server", metavar="KEY")
    server_args: tuple[str, ...] = option((), "after --: flags for the servers that bench starts", remainder=True)

    def __post_init__(self) -> None:
        refuse_standard_output(self, "json", "html")
        self._check_numbers()
        if (self.off_url is None) != (self.on_url is None):
            raise ConfigError("--off-url and --on-url belong together: give both, or one --url")
        if self.url is not None and self.off_url is not None:
            raise ConfigError("--url measures one server; leave it out with --off-url and --on-url")
        if self.server_args and self.remote:
            raise ConfigError(
                f"{' '.join(self.server_args)!r} after -- is for own servers; with a URL nothing is started"
            )
        if self.log is not None and self.workload is not None:
            raise ConfigError(f"--log replaces the workload; leave out --workload {self.workload}")
        if self.timing and self.log is None:
            raise ConfigError("--timing needs --log FILE with the arrival times")
        if self.timing and self.rate is not None:
            raise ConfigError("--timing takes the arrival times from the log; leave out --rate")
        if self.replay and any(value is not None for value in (self.shared, self.own, self.turns, self.tenants)):
            raise ConfigError("--shared, --own, --turns and --tenants are for generated prompts, not for a log")

    def _check_numbers(self) -> None:
        least = {"shared": 0, "own": 1, "out": 1, "turns": 1, "tenants": 1}
        least |= {"requests": 1, "concurrency": 1, "rounds": 1, "per_day": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
        for name in ("rate", "gpu_hour_price", "time_limit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be a number above 0, got {value}")

    @property
    def remote(self) -> bool:
        """Whether the servers are given by URL."""
        return self.url is not None or self.off_url is not None

    @property
    def names(self) -> dict[str, str]:
        """Names of the sides. Whether a server behind a URL caches is not known, so it is named after its flag."""
        if self.url is not None:
            return {"on": "server"}
        return {"off": "off URL", "on": "on URL"} if self.remote else {"off": "cache off", "on": "cache on"}

    @property
    def replay(self) -> bool:
        """Whether the prompts come from a log."""
        return self.log is not None or self.workload == "agent"

    @property
    def workload_name(self) -> str:
        """``custom`` if only sizes are given, ``log`` for a log."""
        if self.log is not None:
            return "log"
        sizes = (self.shared, self.own, self.out, self.turns, self.tenants)
        return self.workload or ("custom" if any(size is not None for size in sizes) else "customer-service")

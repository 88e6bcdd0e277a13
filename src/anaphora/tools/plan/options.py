"""The flags of ``anaphora plan``: one field each, as in ``anaphora.config``."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.config import option, parse_count
from anaphora.errors import ConfigError
from anaphora.tools.plan.estimate import SECONDS_A_DAY
from anaphora.tools.shared.output_file import refuse_standard_output

_RANGES = (
    ("shared", 0, 10**9),
    ("own", 1, 10**9),
    ("out", 1, 10**9),
    ("per_day", 1, 10**12),
    ("gpu_hour_price", 0, 10**6),
    ("peak_factor", 1, SECONDS_A_DAY),
)


@dataclass(frozen=True)
class PlanOptions:
    shared: int = option(2300, "tokens of the prefix that all prompts share", parse=parse_count, metavar="TOKENS")
    own: int = option(120, "tokens of a prompt that are its own", parse=parse_count, metavar="TOKENS")
    out: int = option(200, "tokens of an answer", parse=parse_count, metavar="TOKENS")
    per_day: int = option(100_000, "requests per day", parse=parse_count, metavar="N")
    card: str = option("h200", "GPU: h200, or 24g, the same GPU limited to 24 GiB", choices=("h200", "24g"))
    gpu_hour_price: float | None = option(None, "price of one GPU per hour", metavar="PRICE")
    peak_factor: float = option(3.0, "peak rate of the day as a multiple of its mean rate", metavar="F")
    json: str | None = option(None, "write the figures to this file", metavar="FILE")

    def __post_init__(self) -> None:
        refuse_standard_output(self, "json")
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:  # not-a-number is never between
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be from {least:,} to {most:,}, got {value}", param=name)

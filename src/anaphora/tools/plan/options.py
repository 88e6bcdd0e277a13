"""What plan is asked. A field is a flag, as in ``anaphora.config``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anaphora.config import option, parse_count
from anaphora.errors import ConfigError


@dataclass(frozen=True)
class PlanOptions:
    shared: int = option(2300, "tokens at the beginning that all prompts share", parse=parse_count, metavar="TOKENS")
    own: int = option(120, "tokens of a prompt of its own", parse=parse_count, metavar="TOKENS")
    out: int = option(200, "tokens of an answer", parse=parse_count, metavar="TOKENS")
    per_day: int = option(100_000, "requests a day", parse=parse_count, metavar="N")
    card: str = option("h200", "which GPU: h200, or 24g, which is the same held to 24 GiB", choices=("h200", "24g"))
    gpu_hour_price: float | None = option(None, "price of one GPU for an hour", metavar="PRICE")
    peak_factor: float = option(3.0, "how many times the mean rate the busiest time of the day has", metavar="F")
    json: str | None = option(None, "write the figures to this file", metavar="FILE")

    def __post_init__(self) -> None:
        for name, least in (("shared", 0), ("own", 1), ("out", 1), ("per_day", 1)):
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least {least}, got {getattr(self, name)}", param=name)
        if not (math.isfinite(self.peak_factor) and self.peak_factor >= 1):
            raise ConfigError(f"--peak-factor must be at least 1, got {self.peak_factor:g}", param="peak_factor")
        if self.gpu_hour_price is not None and not (math.isfinite(self.gpu_hour_price) and self.gpu_hour_price >= 0):
            raise ConfigError(
                f"--gpu-hour-price must be a number of at least 0, got {self.gpu_hour_price:g}", param="gpu_hour_price"
            )

"""Money and machine hours: vendors' prices per million tokens, and the rent of machines by the hour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from anaphora.errors import ConfigError
from anaphora.tools.shared.usage import Usage

DAYS_A_MONTH = 30
SECONDS_AN_HOUR = 3600


@dataclass(frozen=True)
class TokenPrices:
    """Prices per million tokens. ``write`` is for tokens written to a vendor's cache; None: the same as ``input``."""

    input: float
    cached: float
    output: float = 0.0
    write: float | None = None

    def price(self, usage: Usage) -> float:
        """Returns the price of one request."""
        cached = usage.cached or 0
        fresh = usage.prompt - cached - usage.written
        write = self.input if self.write is None else self.write
        cost = fresh * self.input + cached * self.cached + usage.written * write + usage.output * self.output
        return cost / 1e6


def machine_hours(requests: float, requests_per_s: float) -> float:
    """Returns the hours that one machine needs for ``requests`` at ``requests_per_s``, without a pause."""
    return requests / requests_per_s / SECONDS_AN_HOUR


def rent(hours: float, hour_price: float | None) -> float | None:
    """Returns the price of ``hours`` of a machine; None if its price per hour is unknown."""
    return None if hour_price is None else hours * hour_price


def monthly(per_day: float | None) -> float | None:
    """Returns the price of a month of DAYS_A_MONTH days from the price of a day."""
    return None if per_day is None else per_day * DAYS_A_MONTH


def read_token_prices(path: str) -> dict[str, TokenPrices]:
    """Reads price lists by model name from a JSON file; the name ``*`` stands for all other models.

    A flat object counts as the list of ``*``. ``in`` (or ``input``), ``cached``, ``out`` and ``write`` are prices per
    million tokens. Raises ConfigError.
    """
    try:
        raw = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--prices cannot read {path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"--prices: {path} must hold an object")
    if any(isinstance(value, (int, float)) for value in raw.values()):
        raw = {"*": raw}
    return {str(model): _prices(model, entry, path) for model, entry in raw.items()}


def _prices(model: str, entry: Any, path: str) -> TokenPrices:
    def value(*names: str) -> float | None:
        found = next((entry[name] for name in names if name in entry), None)
        if found is not None and (isinstance(found, bool) or not isinstance(found, (int, float)) or found < 0):
            raise ConfigError(f"--prices: {path} has {found!r} for {names[0]} of {model}; write money a million tokens")
        return None if found is None else float(found)

    if not isinstance(entry, dict) or (full := value("in", "input")) is None:
        raise ConfigError(f"--prices: {path} needs at least 'in' for {model}, money a million tokens")
    cached = value("cached", "cache_read", "cached_in")
    return TokenPrices(
        full, full if cached is None else cached, value("out", "output") or 0.0, value("write", "cache_write")
    )

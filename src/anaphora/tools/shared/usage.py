"""What the log itself says of tokens and money, each vendor's convention kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from anaphora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. ``prompt`` counts all of the prompt, what was cached or written to a cache included."""

    prompt: int
    cached: int | None
    written: int = 0
    output: int = 0


def usage_of(*places: Any) -> Usage | None:
    """The usage in the first of ``places`` that has one: a record, a response, or a usage object itself."""
    for place in places:
        if not isinstance(place, dict):
            continue
        for candidate in (place.get("usage"), place.get("usageMetadata"), place.get("body"), place):
            if isinstance(candidate, dict):
                inner = candidate.get("usage")
                if (usage := _usage(inner if isinstance(inner, dict) else candidate)) is not None:
                    return usage
    return None


def _usage(raw: dict[str, Any]) -> Usage | None:
    """Anthropic and Bedrock count cached tokens beside the input tokens, all others inside the prompt tokens."""
    beside = ("cache_read_input_tokens", "cache_creation_input_tokens", "cacheReadInputTokens", "cacheWriteInputTokens")
    prompt = _count(raw, "prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount")
    output = _count(raw, "completion_tokens", "output_tokens", "outputTokens", "candidatesTokenCount") or 0
    if prompt is None:
        return None
    if any(name in raw for name in beside) and "prompt_tokens" not in raw:
        read = _count(raw, "cache_read_input_tokens", "cacheReadInputTokens") or 0
        written = _count(raw, "cache_creation_input_tokens", "cacheWriteInputTokens") or 0
        return Usage(prompt + read + written, read, written, output)
    details = raw.get("prompt_tokens_details") or raw.get("input_tokens_details") or {}
    cached = _count(details if isinstance(details, dict) else {}, "cached_tokens")
    if cached is None:
        names = ("cached_tokens", "prompt_cache_hit_tokens", "cachedContentTokenCount", "cache_read.input_tokens")
        cached = _count(raw, *names, "cache_read_input_tokens")
    return Usage(prompt, None if cached is None else min(cached, prompt), 0, output)


def _count(raw: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = raw.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15:
            return int(value)
    return None


@dataclass(frozen=True)
class Prices:
    """Money a million tokens. ``write`` is for tokens written to a vendor's cache; absent, they cost as input."""

    input: float
    cached: float
    output: float = 0.0
    write: float | None = None

    def price(self, usage: Usage) -> float:
        cached = usage.cached or 0
        fresh = usage.prompt - cached - usage.written
        write = self.input if self.write is None else self.write
        cost = fresh * self.input + cached * self.cached + usage.written * write + usage.output * self.output
        return cost / 1e6


def read_prices(path: str) -> dict[str, Prices]:
    """Price lists by model name; the name ``*`` stands for all others. A flat object is such a one.

    ``in`` (or ``input``), ``cached``, ``out`` and ``write`` are money a million tokens. Raises ConfigError.
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


def _prices(model: str, entry: Any, path: str) -> Prices:
    def value(*names: str) -> float | None:
        found = next((entry[name] for name in names if name in entry), None)
        if found is not None and (isinstance(found, bool) or not isinstance(found, (int, float)) or found < 0):
            raise ConfigError(f"--prices: {path} has {found!r} for {names[0]} of {model}; write money a million tokens")
        return None if found is None else float(found)

    if not isinstance(entry, dict) or (full := value("in", "input")) is None:
        raise ConfigError(f"--prices: {path} needs at least 'in' for {model}, money a million tokens")
    cached = value("cached", "cache_read", "cached_in")
    return Prices(
        full, full if cached is None else cached, value("out", "output") or 0.0, value("write", "cache_write")
    )

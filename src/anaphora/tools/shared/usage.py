"""Token usage as servers and vendors report it: OpenAI's, Anthropic's, Bedrock's, Gemini's and SGLang's fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. ``prompt`` is the whole prompt, including ``cached`` and ``written`` tokens.

    ``cached`` were read from a cache (None: not reported), ``written`` were stored into a vendor's cache.
    """

    prompt: int
    cached: int | None
    written: int = 0
    output: int = 0


def usage_of(*places: Any) -> Usage | None:
    """Returns the first usage found in ``places``: each a record, a response, or a usage object itself."""
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
    """Anthropic and Bedrock exclude cached tokens from the input tokens; all others include them."""
    apart = (
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        "cacheReadInputTokens",
        "cacheWriteInputTokens",
    )
    prompt = _count(raw, "prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount")
    output = _count(raw, "completion_tokens", "output_tokens", "outputTokens", "candidatesTokenCount") or 0
    if prompt is None:
        return None
    if any(name in raw for name in apart) and "prompt_tokens" not in raw:
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

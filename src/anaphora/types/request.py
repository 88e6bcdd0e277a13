"""A request to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.types.sampling import SamplingParams

MAX_SALT_LENGTH = 256
"""Longest ``cache_salt`` in characters."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its sampling parameters. ``arrival`` is time.monotonic().

    ``eos_token_ids`` end a choice unless ``sampling.ignore_eos``. Prompts with another ``cache_salt`` share no blocks.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None

"""A request as the engine takes it."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.types.sampling import SamplingParams

MAX_SALT_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as the engine takes it. ``arrival`` is time.monotonic(); ``sampling.max_tokens`` is a number here.

    ``eos_token_ids`` end a choice unless ``sampling.ignore_eos``.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None

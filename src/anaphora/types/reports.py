"""What the cache reports: lookups and their reasons, pins, lists of prefixes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

HIT_TOKENS = 16
"""Reused tokens from which on a request counts as a hit. A chat template alone puts fewer before every prompt."""


class Reason(enum.StrEnum):
    """Why a lookup matched no more tokens than it did; docs/cache.md explains each one to users."""

    HIT = "hit"
    """Everything cached under this prefix was reused; no cached sequence continues it."""
    SHORT = "short"
    """All prompt tokens except the last one, which is always computed."""
    COLD = "cold"
    DIVERGED = "diverged"
    """A cached prompt continues with other tokens."""
    EVICTED = "evicted"
    IN_FLIGHT = "in_flight"
    """Another running sequence is computing the next block."""
    BYPASSED = "bypassed"
    """The cache was not read: it is off, or the request needs every position computed."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An earlier request under the same salt that begins like this one and continues with other tokens.

    It came ``seconds_ago``; ``token_ids`` are some of its tokens from the first different one on.
    """

    request_id: str
    seconds_ago: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Eviction:
    """The eviction that cut a match short.

    ``by`` is the id of the request that needed the block, or empty if it has another salt. ``lost_tokens`` more tokens
    of the prompt would have matched in a cache larger by ``more_tokens`` tokens (0: not known).
    """

    seconds_ago: float
    by: str
    lost_tokens: int
    more_tokens: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What one lookup found, and why the match ended there. Fixed when the request is first scheduled.

    - ``detail``: the reason in words, without anything about other tenants
    - ``position``: the first token that was not reused
    - ``waited``: whether the request waited while another one computed the same prefix
    - ``neighbour``: set for DIVERGED; ``eviction``: set for EVICTED, except if only a block for a copy was missing
    - ``feature``: the request field or flag that bypassed the cache
    """

    prompt_tokens: int
    cached_tokens: int
    reason: Reason
    detail: str = ""
    position: int = 0
    waited: bool = False
    neighbour: Neighbour | None = None
    eviction: Eviction | None = None
    feature: str = ""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix to pin or unpin."""

    token_ids: tuple[int, ...]
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class PinReport:
    """A pinned prefix of ``tokens`` tokens; the first ``kept_tokens`` are computed and kept.

    ``new`` is False if it was pinned before. ``start`` and ``end``, only in lists, are its first and last token ids;
    a short prefix is all in ``start``.
    """

    id: str
    tokens: int
    kept_tokens: int
    new: bool = False
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of ``tokens`` tokens (full blocks) that prompts have reused, and what that saved.

    ``tokens_saved`` does not include what the next shorter prefix in the list saved, so the rows of a list add up.
    ``idle_s`` is the time since its last use. ``start`` and ``end`` are as in PinReport.
    """

    tokens: int
    hits: int
    tokens_saved: int
    idle_s: float
    pinned: bool
    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixList:
    """The shared and pinned prefixes under one salt. ``shared`` lists those that save most, of ``total``.

    ``pinned_blocks`` (of all salts) can be at most ``max_pinned_blocks``.
    """

    shared: tuple[SharedPrefix, ...]
    total: int
    pins: tuple[PinReport, ...]
    pinned_blocks: int
    max_pinned_blocks: int


def is_hit(prompt_tokens: int | None, cached_tokens: int) -> bool:
    """Return whether a request counts as a hit: HIT_TOKENS reused, or all but the last token of a shorter prompt."""
    enough = HIT_TOKENS if prompt_tokens is None else max(1, min(HIT_TOKENS, prompt_tokens - 1))
    return cached_tokens >= enough

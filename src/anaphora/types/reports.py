"""What the cache reports: lookups and their reasons, pins, shared prefixes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

HIT_TOKENS = 16
"""From so many reused tokens on a request counts as a hit: fewer are what a chat template puts before every prompt."""


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
    """An earlier request of the same salt that begins like this one and then has other tokens.

    ``request_id`` is that of the request that computed them, ``seconds_ago`` when it came, ``token_ids`` some of what
    it has from the first other token on.
    """

    request_id: str
    seconds_ago: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Eviction:
    """Tokens that were cached once and had to go.

    ``by`` is the request that needed their block, empty where it has another salt. Of the prompt ``lost_tokens`` more
    would have hit in a cache that holds ``more_tokens`` more than this one; 0 where that is not known.
    """

    seconds_ago: float
    by: str
    lost_tokens: int
    more_tokens: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What one lookup found, and why not more. Fixed when the request is first scheduled.

    ``detail`` says it in words that hold nothing of another tenant.
    ``position`` is the first token that was not reused; ``waited`` says that the request waited for another's
    computation of the same prefix. ``neighbour`` is there where it diverged, ``eviction`` where it was evicted (but
    for a block that had no room for a copy), ``feature`` names the field or flag that bypassed the cache.
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
    """A beginning of prompts, as the commands on pins name it."""

    token_ids: tuple[int, ...]
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class PinReport:
    """A pinned beginning of ``tokens`` tokens, of which the first ``kept_tokens`` are computed and kept.

    ``new`` is False where it was pinned before. ``start`` and ``end``, in lists, are its first and last token ids,
    ``start`` all of them if few.
    """

    id: str
    tokens: int
    kept_tokens: int
    new: bool = False
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A beginning that prompts reused: its ``tokens`` (whole blocks), and what that saved since it was computed.

    ``tokens_saved`` leaves out what the next shorter one in the list saved, so those of a list add up. ``idle_s`` is
    how long ago it was used. ``start`` and ``end`` are as in PinReport.
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
    """What one salt shares and has pinned. ``total`` counts the shared ones, of which those listed save most.

    ``pinned_blocks`` (of all salts) can be at most ``max_pinned_blocks``.
    """

    shared: tuple[SharedPrefix, ...]
    total: int
    pins: tuple[PinReport, ...]
    pinned_blocks: int
    max_pinned_blocks: int


def is_hit(prompt_tokens: int | None, cached_tokens: int) -> bool:
    """Whether a request counts as a hit: HIT_TOKENS reused, or, of a shorter prompt, all but its last token."""
    enough = HIT_TOKENS if prompt_tokens is None else max(1, min(HIT_TOKENS, prompt_tokens - 1))
    return cached_tokens >= enough

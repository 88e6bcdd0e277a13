"""Pinned prefixes and the prefixes that prompts share, by cache salt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from anaphora.cache.hashing import root_hash, unpack
from anaphora.cache.manager import CacheManager
from anaphora.cache.pins import Pin
from anaphora.cache.prefix_hits import ReusedPrefix
from anaphora.errors import InvalidRequest, NotFound
from anaphora.types.reports import PinReport, Prefix, PrefixList, SharedPrefix

EDGE_TOKENS = 64
"""Tokens at the start and at the end of a prefix that a list shows."""


class Prefixes:
    """Pins, unpins and lists the prefixes of one cache.

    Pins leave room for a request of ``max_model_len`` tokens, so that no request waits forever for blocks.
    """

    def __init__(
        self,
        cache: CacheManager,
        identity: str,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._identity = identity
        self._max_model_len = max_model_len
        self._clock = clock

    def pin(self, prefixes: Sequence[Prefix]) -> tuple[PinReport, ...]:
        """Pin these prefixes, computed or not. Raises InvalidRequest, and pins none, if one cannot be pinned."""
        if not self._cache.enabled:
            raise InvalidRequest("nothing can be pinned: prefix caching is off (--enable-prefix-caching turns it on)")
        pins = [self._pin_of(prefix) for prefix in prefixes]
        fresh = self._cache.pins.keep(pins, self._max_blocks)
        return tuple(self._report(pin, new) for pin, new in zip(pins, fresh, strict=True))

    def unpin(self, prefixes: Sequence[Prefix], ids: Sequence[str]) -> tuple[PinReport, ...]:
        """Unpin prefixes, named by tokens or id; returns what was kept of each.

        Raises NotFound, and unpins none, if one of them is not pinned.
        """
        known = self._cache.pins.by_id
        wanted = list(dict.fromkeys([*(self._pin_of(prefix).id for prefix in prefixes), *ids]))
        if missing := [id for id in wanted if id not in known]:
            raise NotFound(
                f"{missing[0]!r:.80} is not pinned; GET /v1/cache/prefixes lists what is pinned under a salt",
                param="id",
            )
        pins = [known[id] for id in wanted]
        reports = tuple(map(self._report, pins))
        for pin in pins:
            self._cache.pins.remove(pin)
        return reports

    def list(self, cache_salt: str | None, limit: int) -> PrefixList:
        """Return the ``limit`` shared prefixes under a salt that save most, and all pins under it."""
        root = root_hash(self._identity, cache_salt)
        shared = self._cache.prefix_hits.reused(root)
        pins = [self._report(pin, edges=True) for pin in self._cache.pins.by_id.values() if pin.root == root]
        return PrefixList(
            tuple(map(self._shared, shared[:limit])),
            len(shared),
            tuple(pins),
            self._cache.pins.blocks_with(()),
            self._max_blocks,
        )

    @property
    def _max_blocks(self) -> int:
        """The most blocks that pins may hold, so that a request of full length still fits."""
        return max(self._cache.pool.total - self._cache.blocks_for(self._max_model_len), 0)

    def _pin_of(self, prefix: Prefix) -> Pin:
        tokens = len(prefix.token_ids)
        if not 0 < tokens < self._max_model_len:
            raise InvalidRequest(
                f"a prefix must have at least 1 token and at most {self._max_model_len - 1}, so that a request can "
                f"begin with it; this one has {tokens}",
                param="prompt",
            )
        root = root_hash(self._identity, prefix.cache_salt)
        return self._cache.pins.make(self._cache.table("pin", prefix.token_ids, root))

    def _report(self, pin: Pin, new: bool = False, *, edges: bool = False) -> PinReport:
        start, end = _edges(pin.packed) if edges else ((), ())
        return PinReport(pin.id, pin.tokens, self._cache.pins.kept_tokens(pin), new, start, end)

    def _shared(self, prefix: ReusedPrefix) -> SharedPrefix:
        size = self._cache.block_size
        return SharedPrefix(
            prefix.depth * size,
            prefix.hits,
            prefix.saved * size,
            max(self._clock() - prefix.last_hit, 0.0),
            self._cache.pins.holds(prefix.block),
            *_edges(self._cache.prefix_hits.prefix_tokens(prefix.block)),
        )


def _edges(packed: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first and last EDGE_TOKENS token ids, or all of them and none."""
    ids = unpack(packed)
    return (tuple(ids), ()) if len(ids) <= 2 * EDGE_TOKENS else (tuple(ids[:EDGE_TOKENS]), tuple(ids[-EDGE_TOKENS:]))

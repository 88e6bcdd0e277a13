"""Explains lookups: why a match ended where it did, and how long it would be in a smaller or larger cache. Read-only.

A prompt sees only its own root (model and salt): blocks and ghosts under another root have other hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anaphora.cache.block import Block
from anaphora.cache.ghosts import Evicted, Ghosts
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash, unpack
from anaphora.cache.index import Match, PrefixIndex
from anaphora.cache.policy import EvictionPolicy
from anaphora.cache.table import BlockTable
from anaphora.types.reports import CacheReport, Eviction, Neighbour, Reason

NEIGHBOUR_TOKENS = 32
"""Tokens of an earlier prompt that a report shows, from the first different one on."""


@dataclass(frozen=True, slots=True)
class AtSizes:
    """Tokens that one lookup would match in a cache of half, twice and four times the blocks, with the same recency."""

    half: int
    twice: int
    four_times: int


class Explainer:
    """Explains lookups in one index. ``clock`` must be the clock that set the times of blocks and ghosts."""

    def __init__(self, index: PrefixIndex, ghosts: Ghosts, clock: Callable[[], float]) -> None:
        self._index = index
        self._ghosts = ghosts
        self._size = index.block_size
        self._clock = clock

    def report(self, table: BlockTable, match: Match, num_prompt: int, taken: Match | None = None) -> CacheReport:
        """Return why ``match`` ended before the end of a prompt of ``num_prompt`` tokens.

        ``taken`` is the part of the match for which there was room; all of it if None.
        """
        taken = taken or match
        cached = min(taken.tokens, num_prompt - 1)
        if match.pending is not None:
            detail = "another request is computing what comes next"
            return CacheReport(num_prompt, cached, Reason.IN_FLIGHT, detail, match.tokens)
        if taken.tokens >= num_prompt - 1:
            return CacheReport(num_prompt, cached, Reason.SHORT, "all but the last token", taken.tokens)
        if taken.tokens < match.tokens:
            detail = f"there was no room for a copy of the block that holds {match.tokens - taken.tokens} more tokens"
            return CacheReport(num_prompt, cached, Reason.EVICTED, detail, taken.tokens)
        if (eviction := self._find_eviction(table, match, num_prompt)) is not None:
            detail = _describe(eviction)
            return CacheReport(num_prompt, cached, Reason.EVICTED, detail, match.tokens, eviction=eviction)
        if not match.tokens:
            return CacheReport(num_prompt, 0, Reason.COLD, "no earlier prompt begins like this one")
        if (neighbour := self._find_neighbour(table, match)) is not None:
            detail = (
                f"request {neighbour.request_id} of {neighbour.seconds_ago:.1f} s ago continues differently "
                f"from token {match.tokens} on"
            )
            return CacheReport(num_prompt, cached, Reason.DIVERGED, detail, match.tokens, neighbour=neighbour)
        return CacheReport(num_prompt, cached, Reason.HIT, "", match.tokens)

    # --- evicted ---------------------------------------------------------------------------------------------------

    def _find_eviction(self, table: BlockTable, match: Match, num_prompt: int) -> Eviction | None:
        """Return the eviction that cut the match short: of full blocks, found by hash, or else of an unfilled tail.

        Unfilled tails are evicted before all full blocks, so the cache size that would have kept one is not known.
        """
        at = match.tokens // self._size
        if lost := list(self._lost(table.hashes, at)):
            tokens = min((at + len(lost)) * self._size, num_prompt - 1) - match.tokens
            oldest = min(serial for serial in lost if serial >= 0)
            distance = self._ghosts.distance(oldest)
            return self._eviction_report(self._ghosts.eviction(lost[0]), table.root, tokens, distance)
        tail = self._ghosts.find_tail(table.parent(at), self._block_tokens(table, at))
        if tail is None or (tokens := tail[0] - match.tokens % self._size) <= 0:
            return None
        return self._eviction_report(tail[1], table.root, tokens, 0)

    def _lost(self, hashes: list[BlockHash], at: int) -> Iterator[int]:
        """Yield the eviction's serial number (-1 if cached) of each block from ``at`` on, as long as they are known.

        Yields nothing unless block ``at`` was evicted.
        """
        if at >= len(hashes) or self._ghosts.find(hashes[at]) is None:
            return
        for digest in hashes[at:]:
            serial = self._ghosts.find(digest)
            if serial is None and digest not in self._index.full:
                return
            yield -1 if serial is None else serial

    def _eviction_report(self, evicted: Evicted, root: BlockHash, lost_tokens: int, more_blocks: int) -> Eviction:
        ago = self._clock() - evicted.time
        by = evicted.by if evicted.root == root else ""
        return Eviction(ago, by, lost_tokens, more_blocks * self._size)

    # --- diverged --------------------------------------------------------------------------------------------------

    def _find_neighbour(self, table: BlockTable, match: Match) -> Neighbour | None:
        at, shared = divmod(match.tokens, self._size)
        block = self._index.neighbour(table.parent(at), self._block_tokens(table, at), shared)
        if block is None:
            return None
        tokens = unpack(b"".join(self._following(block)))[shared : shared + NEIGHBOUR_TOKENS]
        return Neighbour(block.computed_by, self._clock() - block.arrival, tuple(tokens))

    def _following(self, block: Block | None) -> Iterator[bytes]:
        """Yield the tokens of a block and its successors, enough for a report."""
        wanted = NEIGHBOUR_TOKENS + self._size
        while block is not None and wanted > 0:
            yield block.tokens
            wanted -= block.filled
            block = self._index.next_block(block)

    def _block_tokens(self, table: BlockTable, at: int) -> bytes:
        """Return the known packed tokens of block ``at``."""
        size = self._size * TOKEN_BYTES
        return bytes(table.packed[at * size : (at + 1) * size])

    # --- other sizes -----------------------------------------------------------------------------------------------

    def at_sizes(
        self, table: BlockTable, match: Match, num_prompt: int, policy: EvictionPolicy, num_blocks: int
    ) -> AtSizes:
        """Return what the lookup would match at other sizes than the present ``num_blocks`` blocks.

        Called before ``match`` is taken, and after ``policy.keep_recent`` with the idle blocks of a cache of half the
        size.
        """
        kept = len(match.blocks)
        if kept and not _kept_by_half(match.blocks[-1], policy):
            # A block was last used no later than its parent, so the blocks that half the cache keeps come first.
            kept = next(i for i, block in enumerate(match.blocks) if not _kept_by_half(block, policy))
        half = match.tokens if kept == len(match.blocks) else kept * self._size
        at = match.tokens // self._size
        lost = list(self._lost(table.hashes, at))
        twice = four_times = match.tokens
        if lost:
            twice, four_times = (
                max(match.tokens, (at + self._num_kept(lost, more)) * self._size)
                for more in (num_blocks, 3 * num_blocks)
            )
        last = num_prompt - 1
        return AtSizes(min(half, last), min(twice, last), min(four_times, last))

    def _num_kept(self, lost: list[int], more_blocks: int) -> int:
        """Return how many of these evicted blocks, from the first on, ``more_blocks`` more blocks would have kept."""
        first = self._ghosts.kept_by(more_blocks)
        return next((i for i, serial in enumerate(lost) if 0 <= serial < first), len(lost))


def _kept_by_half(block: Block, policy: EvictionPolicy) -> bool:
    return block.ref_count > 0 or policy.is_recent(block)


def _describe(eviction: Eviction) -> str:
    by = f"request {eviction.by} needed its block" if eviction.by else "other traffic needed its block"
    larger = f"a cache larger by {eviction.more_tokens} tokens" if eviction.more_tokens else "a larger cache"
    when = f"evicted {eviction.seconds_ago:.1f} s ago when {by}"
    return f"{when}; {larger} would have kept {eviction.lost_tokens} more tokens of this prompt"

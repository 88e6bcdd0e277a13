"""Why a lookup found no more, and what it would have found in a smaller or larger cache. Nothing here changes anything.

A prompt sees its own root alone (salt, model, adapter): blocks and ghosts of another root have other hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.cache.block import Block
from anaphora.cache.events import Reason
from anaphora.cache.ghosts import Evicted, Ghosts
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash, unpack
from anaphora.cache.index import Match, PrefixIndex
from anaphora.cache.policy import EvictionPolicy
from anaphora.types.reports import CacheReport, Eviction, Neighbour

if TYPE_CHECKING:
    from anaphora.cache.table import BlockTable

NEIGHBOUR_TOKENS = 32
"""How much of an earlier prompt a report shows from the first other token on."""


@dataclass(frozen=True, slots=True)
class AtSizes:
    """Tokens that one lookup finds in a cache of half, twice and four times the blocks, recency being the same."""

    half: int
    twice: int
    four_times: int


class Explainer:
    """Answers for lookups in one index. ``clock`` is that of the blocks' and ghosts' times."""

    def __init__(self, index: PrefixIndex, ghosts: Ghosts, clock: Callable[[], float]) -> None:
        self._index = index
        self._ghosts = ghosts
        self._size = index.block_size
        self._clock = clock

    def report(self, table: BlockTable, match: Match, num_prompt: int, taken: Match | None = None) -> CacheReport:
        """Why ``match`` found no more of a prompt of ``num_prompt`` tokens; ``taken`` is what there was room for."""
        taken = taken or match
        cached = min(taken.tokens, num_prompt - 1)
        if match.wait is not None:
            detail = "another request is computing what comes next"
            return CacheReport(num_prompt, cached, Reason.IN_FLIGHT, detail, match.tokens)
        if taken.tokens >= num_prompt - 1:
            return CacheReport(num_prompt, cached, Reason.SHORT, "all but the last token", taken.tokens)
        if taken.tokens < match.tokens:
            detail = f"there was no room for a copy of the block that holds {match.tokens - taken.tokens} more tokens"
            return CacheReport(num_prompt, cached, Reason.EVICTED, detail, taken.tokens)
        if (eviction := self._eviction(table, match, num_prompt)) is not None:
            return CacheReport(num_prompt, cached, Reason.EVICTED, _evicted(eviction), match.tokens, eviction=eviction)
        if not match.tokens:
            return CacheReport(num_prompt, 0, Reason.COLD, "nothing like it was seen")
        if (neighbour := self._neighbour(table, match)) is not None:
            detail = (
                f"request {neighbour.request_id} of {neighbour.seconds_ago:.1f} s ago goes on differently "
                f"from token {match.tokens} on"
            )
            return CacheReport(num_prompt, cached, Reason.DIVERGED, detail, match.tokens, neighbour=neighbour)
        return CacheReport(num_prompt, cached, Reason.HIT, "", match.tokens)

    # --- evicted ---------------------------------------------------------------------------------------------------

    def _eviction(self, table: BlockTable, match: Match, num_prompt: int) -> Eviction | None:
        """What the prompt lost behind its match: full blocks known by their hashes, or else an unfilled one.

        Unfilled blocks go before all full ones, so how much larger the cache would have to be is not known for them.
        """
        at = match.tokens // self._size
        if lost := list(self._lost(table.hashes, at)):
            tokens = min((at + len(lost)) * self._size, num_prompt - 1) - match.tokens
            oldest = min(serial for serial in lost if serial >= 0)
            return self._told(self._ghosts.eviction(lost[0]), table.root, tokens, self._ghosts.distance(oldest))
        if table.packed is None:
            return None
        tail = self._ghosts.find_tail(_parent(table, at), self._rest(table, at))
        if tail is None or (tokens := tail[0] - match.tokens % self._size) <= 0:
            return None
        return self._told(tail[1], table.root, tokens, 0)

    def _lost(self, hashes: list[BlockHash], at: int) -> Iterator[int]:
        """For the blocks from ``at`` on, while they are known, the serial numbers of their evictions; -1: cached."""
        if at >= len(hashes) or self._ghosts.find(hashes[at]) is None:
            return
        for digest in hashes[at:]:
            serial = self._ghosts.find(digest)
            if serial is None and digest not in self._index.full:
                return
            yield -1 if serial is None else serial

    def _told(self, by: Evicted, root: BlockHash, lost: int, more_blocks: int) -> Eviction:
        ago = self._clock() - by.time
        return Eviction(ago, by.by if by.root == root else "", lost, more_blocks * self._size)

    # --- diverged --------------------------------------------------------------------------------------------------

    def _neighbour(self, table: BlockTable, match: Match) -> Neighbour | None:
        if table.packed is None:
            return None
        at, shared = divmod(match.tokens, self._size)
        block = self._index.neighbour(_parent(table, at), self._rest(table, at), shared)
        if block is None:
            return None
        tokens = unpack(b"".join(self._following(block)))[shared : shared + NEIGHBOUR_TOKENS]
        return Neighbour(block.made_by, self._clock() - block.made, tuple(tokens))

    def _following(self, block: Block | None) -> Iterator[bytes]:
        """The tokens of a block and of what follows it, as far as a report may show them."""
        wanted = NEIGHBOUR_TOKENS + self._size
        while block is not None and wanted > 0:
            yield block.tokens
            wanted -= block.filled
            block = self._index.continuation(block)

    def _rest(self, table: BlockTable, at: int) -> bytes:
        """The packed tokens of block ``at``, as far as they are known."""
        assert table.packed is not None
        size = self._size * TOKEN_BYTES
        return bytes(table.packed[at * size : (at + 1) * size])

    # --- other sizes -----------------------------------------------------------------------------------------------

    def at_sizes(
        self, table: BlockTable, match: Match, num_prompt: int, policy: EvictionPolicy, blocks: int
    ) -> AtSizes:
        """What the lookup finds at other sizes; to be asked before ``match`` is taken. ``blocks`` is the size now.

        ``policy`` has been told how many idle blocks half the cache would hold.
        """
        kept = len(match.blocks)
        if kept and not _stays(match.blocks[-1], policy):
            # A block was used no later than what it continues, so those that stay are at the front.
            kept = next(i for i, block in enumerate(match.blocks) if not _stays(block, policy))
        half = match.tokens if kept == len(match.blocks) else kept * self._size
        at = match.tokens // self._size
        lost = list(self._lost(table.hashes, at))
        twice = four_times = match.tokens
        if lost:
            twice, four_times = (
                max(match.tokens, (at + self._kept(lost, more)) * self._size) for more in (blocks, 3 * blocks)
            )
        last = num_prompt - 1
        return AtSizes(min(half, last), min(twice, last), min(four_times, last))

    def _kept(self, lost: list[int], more_blocks: int) -> int:
        """How many of these evicted blocks so many more blocks would have kept, from the first on."""
        first = self._ghosts.kept_by(more_blocks)
        return next((i for i, serial in enumerate(lost) if 0 <= serial < first), len(lost))


def _stays(block: Block, policy: EvictionPolicy) -> bool:
    return block.ref_count > 0 or policy.is_recent(block)


def _parent(table: BlockTable, at: int) -> BlockHash:
    return table.hashes[at - 1] if at else table.root


def _evicted(eviction: Eviction) -> str:
    by = f"request {eviction.by} needed its block" if eviction.by else "other traffic needed its block"
    larger = f"a cache larger by {eviction.more_tokens}" if eviction.more_tokens else "a larger cache"
    when = f"evicted {eviction.seconds_ago:.1f} s ago when {by}"
    return f"{when}; {larger} would have kept {eviction.lost_tokens} more tokens of this prompt"

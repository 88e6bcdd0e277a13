"""The cache as the scheduler sees it: match, admit, reserve, commit, release, pin, reset, check.

The life of a block table, with blocks of four slots and a prompt of eleven tokens, six of them cached::

    match      [S S S S][s s . .]           one block by reference; the second one matches for two tokens
    reserve    [S S S S][c c n n][n n n]    the second one is copied (c), since it will be written; a third one is new
    commit     full blocks are indexed under their hashes, which were announced as pending at admission
    release    the unfilled last block is indexed by its tokens; all references are dropped, the deepest block first
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from anaphora.cache.block import Block
from anaphora.cache.explain import AtSizes, Explainer
from anaphora.cache.first_blocks import FirstBlocks
from anaphora.cache.ghosts import Evicted, Ghosts
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash, pack
from anaphora.cache.index import Match, PrefixIndex, common_tokens
from anaphora.cache.pins import Pins
from anaphora.cache.policy import LRU, EvictionPolicy
from anaphora.cache.pool import BlockPool
from anaphora.cache.prefix_hits import PrefixHits
from anaphora.cache.table import BlockTable
from anaphora.errors import CacheInvariantError
from anaphora.types.batch import BlockCopy
from anaphora.types.reports import CacheReport, Reason

NO_MATCH = Match()


class Reservation:
    """Blocks reserved for a chunk: ``table_changes`` as (index, block id), and ``copies`` to make before writing."""

    __slots__ = ("copies", "table_changes")

    def __init__(self) -> None:
        self.table_changes: list[tuple[int, int]] = []
        self.copies: list[BlockCopy] = []


NO_CHANGE = Reservation()


class CacheManager:
    """All blocks of one model's KV pool. Not thread-safe; the only clock is the one given to it.

    ``num_blocks`` includes the null block. ``enabled`` False keeps the pool and turns prefix caching off.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enabled: bool = True,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.index = PrefixIndex(block_size)
        self.policy = policy or LRU()
        self.pool = BlockPool(num_blocks, self.policy, self._evict)
        self.pins = Pins(self.index, self.pool)
        self.prefix_hits = PrefixHits(self.index)
        self.evicted_blocks = 0
        self._clock = clock
        self._ghosts = Ghosts(num_blocks)
        self._explainer = Explainer(self.index, self._ghosts, clock)
        self._first_blocks = FirstBlocks(self.index, num_blocks)
        self._growing: BlockTable | None = None
        self._last_table: BlockTable | None = None
        self._eviction: Evicted | None = None
        # By step: the blocks that it fills, and the blocks that it copies from.
        self._scheduled: dict[int, list[tuple[Block, BlockHash]]] = {}
        self._copying: dict[int, list[Block]] = {}

    # --- one sequence ----------------------------------------------------------------------------------------------

    def table(self, request_id: str, token_ids: Iterable[int], root: BlockHash, *, bypass: str = "") -> BlockTable:
        """Return the table of a new sequence: its tokens packed and hashed, no block held yet.

        Hashes of the tokens that it shares with the table made before are copied from there.
        """
        packed = bytearray(pack(token_ids))
        table = BlockTable(request_id, root, packed, bypass=bypass, arrival=self._clock())
        last = self._last_table
        if last is not None and last.root == root:
            table.hashes = last.hashes[: common_tokens(last.packed, packed) // self.block_size]
        table.append((), self.block_size)
        self._last_table = table
        return table

    def match(self, table: BlockTable) -> Match:
        """Return the longest cached prefix of the table's known tokens. Changes nothing."""
        if not self.enabled or table.bypass:
            return NO_MATCH
        return self.index.match(table.root, table.hashes, bytes(table.packed))

    def is_pending(self, digest: BlockHash) -> bool:
        """Return whether a running sequence is about to compute the block of this hash."""
        return digest in self.index.pending

    def admit(self, table: BlockTable, match: Match, num_tokens: int, headroom: int = 0) -> Match | None:
        """Take the blocks of ``match`` if there is room for ``num_tokens`` tokens and ``headroom`` more blocks.

        Returns the match as taken: without its tail if there is no room for the tail and its copy. Returns None if
        there is no room at all; then only recency has changed. The table's missing full blocks become pending.
        """
        taken = self._take(match, num_tokens, headroom)
        if taken is None and match.tail is not None:
            taken = self._take(Match(match.blocks, None, len(match.blocks) * self.block_size), num_tokens, headroom)
        if taken is None:
            return None
        table.blocks = [*taken.blocks, *([taken.tail] if taken.tail else [])]
        table.private_from = len(table.blocks)
        table.index_from = len(taken.blocks)
        if self.enabled and not table.bypass:
            for digest in table.hashes[table.index_from :]:
                if digest not in self.index.full and digest not in self.index.pending:
                    self.index.pending[digest] = table
                    table.pending.append(digest)
        return taken

    def _take(self, match: Match, num_tokens: int, headroom: int) -> Match | None:
        held = [*match.blocks, *([match.tail] if match.tail else [])]
        for block in held:
            self.pool.reference(block)
        if self.blocks_for(num_tokens) - len(match.blocks) + headroom <= self.pool.available:
            return match
        for block in reversed(held):
            self.pool.release(block)
        return None

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def reserve(self, table: BlockTable, write_from: int, end: int, step: int) -> Reservation | None:
        """Reserve slots for positions ``write_from`` to ``end - 1``, to be written in ``step``.

        Returns None, and changes nothing, if there are not enough blocks. Blocks that the step will fill can be
        referenced by other sequences from now on.
        """
        if write_from >= end:
            return NO_CHANGE
        first = write_from // self.block_size
        copies = first < table.private_from
        missing = self.blocks_for(end) - len(table.blocks)
        if not (copies or missing):
            if end // self.block_size > table.index_from:
                self._index_full(table, end // self.block_size, step)
            return NO_CHANGE
        if missing + copies > self.pool.available:
            return None
        reservation = Reservation()
        self._growing = table
        if copies:
            source, target = table.blocks[first], self.pool.allocate()
            table.blocks[first] = target
            table.private_from = first
            self._copying.setdefault(step, []).append(source)
            reservation.copies.append(BlockCopy(source.id, target.id, write_from % self.block_size))
            reservation.table_changes.append((first, target.id))
        for _ in range(missing):
            block = self.pool.allocate()
            reservation.table_changes.append((len(table.blocks), block.id))
            table.blocks.append(block)
        self._growing = self._eviction = None
        self._index_full(table, end // self.block_size, step)
        return reservation

    def _index_full(self, table: BlockTable, end: int, step: int | None) -> None:
        """Index the table's blocks before ``end``, computed in ``step``, or computed already (None).

        A block whose hash is indexed already stays private.
        """
        if not self.enabled:
            return
        end = min(end, len(table.hashes))
        size = self.block_size * TOKEN_BYTES
        for i in range(table.index_from, end):
            digest, block = table.hashes[i], table.blocks[i]
            self.index.pending.pop(digest, None)
            if digest in self.index.full:
                if block.indexed:  # its first tokens were indexed as a tail; the other block contains them too
                    self._remove_from_index(block)
                continue
            tokens = bytes(table.packed[i * size : (i + 1) * size])
            self.index.add_full(block, digest, table.parent(i), tokens)
            block.computed_by, block.arrival = table.request_id, table.arrival
            self._ghosts.discard(digest)
            if not i:
                self._first_blocks.add(digest, tokens)
            if step is None:
                self._set_ready(block)
            else:
                block.step = step
                self._scheduled.setdefault(step, []).append((block, digest))
        table.index_from = max(table.index_from, end)

    def commit(self, table: BlockTable, num_computed: int, *, tail: bool = False) -> None:
        """Index the full blocks of the first ``num_computed`` tokens, and with ``tail`` the unfilled last block too.

        Their keys and values have been computed.
        """
        at, filled = divmod(num_computed, self.block_size)
        if at > table.index_from:
            self._index_full(table, at, None)
        if not (tail and filled and self.enabled) or at < table.private_from:
            return
        start = at * self.block_size * TOKEN_BYTES
        tokens = bytes(table.packed[start : start + filled * TOKEN_BYTES])
        redundant = self.index.add_tail(table.blocks[at], table.parent(at), tokens)
        if redundant is not None:
            table.blocks[at].computed_by, table.blocks[at].arrival = table.request_id, table.arrival
            self._free_redundant(redundant)
            self.pins.offer(table.blocks[at])

    def _set_ready(self, block: Block) -> None:
        self._free_redundant(self.index.set_ready(block))
        self.pins.offer(block)

    def _remove_from_index(self, block: Block) -> None:
        self.index.remove(block)
        self.pins.lost(block)

    def _free_redundant(self, tails: Iterable[Block]) -> None:
        """Free the tails among these that nothing references; another block begins with their tokens."""
        for block in tails:
            if block.ref_count == 0:
                self.pool.discard(block)
                self.index.remove(block)

    def release(self, table: BlockTable, num_computed: int) -> None:
        """Release a sequence that ended or is preempted. Its first ``num_computed`` tokens stay cached."""
        if table.blocks:
            self.commit(table, num_computed, tail=True)
        self._drop_pending(table)
        for block in reversed(table.blocks):
            if block.ref_count == 1 and block.indexed and not block.ready:
                self.index.remove(block)  # its step is in flight or has failed: no other sequence may match it
            self.pool.release(block)
        table.blocks = []
        table.private_from = table.index_from = 0

    def invalidate(self, table: BlockTable) -> None:
        """Remove from the cache all blocks that the sequence of a released table computed, in any step.

        For sequences whose logits are not finite. The keys and values of earlier tokens may be damaged too: attention
        multiplies masked values by zero, and zero times NaN is NaN.
        """
        for block in self.index.computed_by(table.request_id, (table.root, *table.hashes)):
            if block.ref_count == 0:
                self.pool.discard(block)
            self._remove_from_index(block)

    def _drop_pending(self, table: BlockTable) -> None:
        for digest in table.pending:
            if self.index.pending.get(digest) is table:
                del self.index.pending[digest]
        table.pending = []

    # --- one step --------------------------------------------------------------------------------------------------

    def finish_step(self, step: int) -> None:
        """Make the blocks of a step that has succeeded ready, and release the sources of its copies."""
        for block, digest in self._scheduled.pop(step, ()):
            if block.hash == digest and block.step == step:
                self._set_ready(block)
        self._end_copies(step)

    def fail_step(self, step: int) -> None:
        """Remove from the index what a failed step was to compute. The caller releases its sequences next."""
        for block, digest in self._scheduled.pop(step, ()):
            if block.hash == digest and block.step == step:
                self._remove_from_index(block)
        self._end_copies(step)

    def _end_copies(self, step: int) -> None:
        for block in self._copying.pop(step, ()):
            self.pool.release(block)

    # --- the whole pool --------------------------------------------------------------------------------------------

    def _evict(self, block: Block) -> None:
        if self._eviction is None:
            by = self._growing
            self._eviction = Evicted(self._clock(), by.request_id if by else "", by.root if by else None)
        if block.hash is not None:
            self._ghosts.add(block.hash, self._eviction)
        else:
            assert block.parent is not None
            self._ghosts.add_tail(block.parent, block.tokens, self._eviction)
        self.prefix_hits.evicted(block)
        self.evicted_blocks += 1
        self.index.remove(block)

    @property
    def pinned_blocks(self) -> int:
        """Number of blocks that pins hold."""
        return self.pins.num_blocks

    @property
    def referenced_blocks(self) -> int:
        """Number of blocks that sequences, copies and pins hold."""
        return self.pool.total - self.pool.available

    def reset(self) -> bool:
        """Empty the cache. Returns False, and does nothing, while sequences use blocks.

        Pinned blocks are emptied too; the pins stay, and hold blocks again once somebody computes them.
        """
        held = self.pins.references()
        if self.referenced_blocks > len(held) or any(self.pool.blocks[id].ref_count > n for id, n in held.items()):
            return False
        self.pins.release_all()
        while len(self.policy):
            block = self.policy.victim()
            self.pool.discard(block)
            self.index.remove(block)
        self._ghosts.clear()
        return True

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise CacheInvariantError unless every block and reference is accounted for.

        ``tables`` are the block tables of all live sequences.
        """
        references = Counter(block.id for table in tables for block in table.blocks)
        references.update(block.id for blocks in self._copying.values() for block in blocks)
        references.update(self.pins.references())
        faults = self.pool.faults(references) + self.index.faults() + self.pins.faults()
        faults += self._ghosts.faults(self.index.full)
        if faults:
            raise CacheInvariantError("; ".join(faults[:5]))

    # --- explanations ----------------------------------------------------------------------------------------------

    def explain(self, table: BlockTable, match: Match, num_prompt: int, taken: Match | None = None) -> CacheReport:
        """Return why ``match`` (or the part of it that was ``taken``) ended before the end of the prompt."""
        if not self.enabled:
            why, feature = "prefix caching is off", "--no-enable-prefix-caching"
        elif table.bypass:
            why, feature = f"{table.bypass} needs every position computed", table.bypass
        else:
            return self._explainer.report(table, match, num_prompt, taken)
        return CacheReport(num_prompt, 0, Reason.BYPASSED, why, feature=feature)

    def at_sizes(self, table: BlockTable, match: Match, num_prompt: int) -> AtSizes | None:
        """Return what the lookup would match in caches of other sizes, None if the cache is bypassed.

        Called before ``match`` is taken.
        """
        if not self.enabled or table.bypass:
            return None
        self.policy.keep_recent(max(0, self.pool.total // 2 - self.referenced_blocks))
        return self._explainer.at_sizes(table, match, num_prompt, self.policy, self.pool.total)

    def is_isolated(self, table: BlockTable) -> bool:
        """Return whether the prompt's first full block is probably cached, under another root than its own."""
        if not table.hashes:
            return False
        first = bytes(table.packed[: self.block_size * TOKEN_BYTES])
        return self._first_blocks.cached_under_other_root(table.hashes[0], first)

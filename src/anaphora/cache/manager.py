"""The cache as the scheduler sees it: match, admit, reserve, commit, release, pin, reset, check.

The life of a block table, with blocks of four slots, a prompt of eleven tokens, of which six are known::

    match      [S S S S][s s . .]           one block by reference; the second matches for two slots
    reserve    [S S S S][c c n n][n n n]    the second is copied (c) since it will be written, a third is fresh
    commit     full blocks are indexed, each under its hash; they were entered as pending when the sequence was admitted
    release    the unfilled last block is indexed by its tokens; all references go, the deepest block first
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from anaphora.cache.block import NULL_BLOCK, Block
from anaphora.cache.events import Reason
from anaphora.cache.explain import AtSizes, Explainer
from anaphora.cache.first_blocks import Heads
from anaphora.cache.ghosts import Evicted, Ghosts
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash, pack
from anaphora.cache.index import Match, PrefixIndex, common_tokens
from anaphora.cache.pins import Pins
from anaphora.cache.policy import LRU, EvictionPolicy
from anaphora.cache.pool import BlockPool
from anaphora.cache.table import BlockTable
from anaphora.cache.usage import Usage
from anaphora.errors import CacheInvariantError
from anaphora.types.batch import BlockCopy
from anaphora.types.reports import CacheReport

NO_MATCH = Match()


class Reservation:
    """Blocks taken for a chunk: table entries that changed, and the copies to make before it is written."""

    __slots__ = ("changes", "copies")

    def __init__(self) -> None:
        self.changes: list[tuple[int, int]] = []
        self.copies: list[BlockCopy] = []


NOTHING = Reservation()


class CacheManager:
    """All blocks of one model's KV pool. One thread; knows nothing of time but the clock given to it."""

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
        self.usage = Usage(self.index)
        self.evicted_blocks = 0
        self._clock = clock
        self._ghosts = Ghosts(num_blocks)
        self._explainer = Explainer(self.index, self._ghosts, clock)
        self._heads = Heads(self.index, num_blocks)
        self._grower: BlockTable | None = None
        self._last_table: BlockTable | None = None
        self._eviction: Evicted | None = None
        self._scheduled: dict[int, list[tuple[Block, BlockHash]]] = {}
        self._copying: dict[int, list[Block]] = {}

    # --- one sequence ----------------------------------------------------------------------------------------------

    def table(self, key: str, token_ids: Iterable[int], root: BlockHash, *, bypass: str = "") -> BlockTable:
        """The table of a new sequence: tokens packed and hashed once, nothing held yet.

        A beginning in common with the table made before has its hashes already.
        """
        packed = bytearray(pack(token_ids))
        table = BlockTable(key, root, packed, bypass=bypass, made=self._clock())
        last = self._last_table
        if last is not None and last.packed is not None and last.root == root:
            table.hashes = last.hashes[: common_tokens(last.packed, packed) // self.block_size]
        table.append((), self.block_size)
        self._last_table = table
        return table

    def match(self, table: BlockTable) -> Match:
        """The longest beginning of the table's known tokens that need not be computed. Changes nothing."""
        if not self.enabled or table.bypass:
            return NO_MATCH
        return self.index.match(table.root, table.hashes, None if table.packed is None else bytes(table.packed))

    def is_pending(self, digest: BlockHash) -> bool:
        return digest in self.index.pending

    def admit(self, table: BlockTable, match: Match, goal: int, headroom: int = 0) -> Match | None:
        """Take what ``match`` found, if ``goal`` tokens can be held and ``headroom`` blocks are left then.

        Returns the match as taken; None if there is no room (nothing changed then but recency). The tail, which
        must be there beside its copy, is given up if there is only room without it. What is missing is entered as
        pending, this table being the owner.
        """
        taken = self._take(match, goal, headroom)
        if taken is None and match.tail is not None:
            taken = self._take(Match(match.blocks, None, len(match.blocks) * self.block_size), goal, headroom)
        if taken is None:
            return None
        table.blocks = [*taken.blocks, *([taken.tail] if taken.tail else [])]
        table.private_from = len(table.blocks)
        table.settled = len(taken.blocks)
        if self.enabled and not table.bypass:
            for digest in table.hashes[table.settled :]:
                if digest not in self.index.full and digest not in self.index.pending:
                    self.index.pending[digest] = table
                    table.owned.append(digest)
        return taken

    def _take(self, match: Match, goal: int, headroom: int) -> Match | None:
        held = [*match.blocks, *([match.tail] if match.tail else [])]
        for block in held:
            self.pool.reference(block)
        if self.blocks_for(goal) - len(match.blocks) + headroom <= self.pool.available:
            return match
        for block in reversed(held):
            self.pool.release(block)
        return None

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def reserve(self, table: BlockTable, write_from: int, end: int, step: int) -> Reservation | None:
        """Make the table hold slots for positions ``write_from`` to ``end - 1``, to be written in ``step``.

        None, and nothing changed, if blocks are lacking. Full blocks that the step will fill can be referenced by
        others from now on.
        """
        if write_from >= end:
            return NOTHING
        first = write_from // self.block_size
        copies = first < table.private_from
        missing = self.blocks_for(end) - len(table.blocks)
        if not (copies or missing):
            if end // self.block_size > table.settled:
                self._index_full(table, end // self.block_size, step)
            return NOTHING
        if missing + copies > self.pool.available:
            return None
        reservation = Reservation()
        self._grower = table
        if copies:
            source, target = table.blocks[first], self.pool.allocate()
            table.blocks[first] = target
            table.private_from = first
            self._copying.setdefault(step, []).append(source)
            reservation.copies.append(BlockCopy(source.id, target.id, write_from % self.block_size))
            reservation.changes.append((first, target.id))
        for _ in range(missing):
            block = self.pool.allocate()
            reservation.changes.append((len(table.blocks), block.id))
            table.blocks.append(block)
        self._grower = self._eviction = None
        self._index_full(table, end // self.block_size, step)
        return reservation

    def _index_full(self, table: BlockTable, end: int, step: int | None) -> None:
        """Index the table's blocks before ``end``: computed in ``step``, or computed already (None).

        A block whose hash is indexed already stays private.
        """
        if not self.enabled:
            return
        end = min(end, len(table.hashes))
        size = self.block_size * TOKEN_BYTES
        for i in range(table.settled, end):
            digest, block = table.hashes[i], table.blocks[i]
            self.index.pending.pop(digest, None)
            if digest in self.index.full:
                if block.indexed:  # its beginning was indexed as a tail; the other block holds that too
                    self._forget(block)
                continue
            parent = table.hashes[i - 1] if i else table.root
            tokens = b"" if table.packed is None else bytes(table.packed[i * size : (i + 1) * size])
            self.index.add_full(block, digest, parent, tokens)
            block.made_by, block.made = table.key, table.made
            self._ghosts.discard(digest)
            if not i and tokens:
                self._heads.note(digest, tokens)
            if step is None:
                self._computed(block)
            else:
                block.step = step
                self._scheduled.setdefault(step, []).append((block, digest))
        table.settled = max(table.settled, end)

    def commit(self, table: BlockTable, computed: int, *, tail: bool = False) -> None:
        """Slots before ``computed`` hold their keys and values: index what is full, and with ``tail`` the rest too."""
        at, filled = divmod(computed, self.block_size)
        if at > table.settled:
            self._index_full(table, at, None)
        if not (tail and filled and self.enabled and table.packed is not None) or at < table.private_from:
            return
        parent = table.hashes[at - 1] if at else table.root
        start = at * self.block_size * TOKEN_BYTES
        tokens = bytes(table.packed[start : start + filled * TOKEN_BYTES])
        redundant = self.index.add_tail(table.blocks[at], parent, tokens)
        if redundant is not None:
            table.blocks[at].made_by, table.blocks[at].made = table.key, table.made
            self._drop(redundant)
            self.pins.offer(table.blocks[at])

    def _computed(self, block: Block) -> None:
        self._drop(self.index.set_ready(block))
        self.pins.offer(block)

    def _forget(self, block: Block) -> None:
        self.index.remove(block)
        self.pins.lost(block)

    def _drop(self, redundant: Iterable[Block]) -> None:
        """Give up tails whose tokens another block holds as its beginning, unless somebody refers to one."""
        for block in redundant:
            if block.ref_count == 0:
                self.pool.discard(block)
                self.index.remove(block)

    def release(self, table: BlockTable, computed: int) -> None:
        """The sequence ends or is preempted, with ``computed`` slots computed. What is computed stays to be found."""
        if table.blocks:
            self.commit(table, computed, tail=True)
        self._disown(table)
        for block in reversed(table.blocks):
            if block.ref_count == 1 and block.indexed and not block.ready:
                self.index.remove(block)  # its step is still on its way, or failed: nobody may find it
            self.pool.release(block)
        table.blocks = []
        table.private_from = table.settled = 0

    def distrust(self, table: BlockTable) -> None:
        """The sequence of a released table cannot be computed: nobody is to find what it computed, in whichever step.

        What made its logits no numbers may be in the keys and values of tokens that came before, too: attention
        multiplies what a row does not see by zero, which leaves no zero where there is no number.
        """
        for block in self.index.made_by(table.key, (table.root, *table.hashes)):
            if block.ref_count == 0:
                self.pool.discard(block)
            self._forget(block)

    def _disown(self, table: BlockTable) -> None:
        for digest in table.owned:
            if self.index.pending.get(digest) is table:
                del self.index.pending[digest]
        table.owned = []

    # --- one step --------------------------------------------------------------------------------------------------

    def finish_step(self, step: int) -> None:
        """The step has succeeded: its blocks are ready, its copies are made."""
        for block, digest in self._scheduled.pop(step, ()):
            if block.hash == digest and block.step == step:
                self._computed(block)
        self._end_copies(step)

    def fail_step(self, step: int) -> None:
        """The step has failed: nothing stays indexed that it was to compute. Its users must be released next."""
        for block, digest in self._scheduled.pop(step, ()):
            if block.hash == digest and block.step == step:
                self._forget(block)
        self._end_copies(step)

    def _end_copies(self, step: int) -> None:
        for block in self._copying.pop(step, ()):
            self.pool.release(block)

    # --- the whole -------------------------------------------------------------------------------------------------

    def _evict(self, block: Block) -> None:
        if self._eviction is None:
            by = self._grower
            self._eviction = Evicted(self._clock(), by.key if by else "", by.root if by else None)
        if block.hash is not None:
            self._ghosts.add(block.hash, self._eviction)
        else:
            assert block.parent is not None
            self._ghosts.add_tail(block.parent, block.tokens, self._eviction)
        self.usage.evicted(block)
        self.evicted_blocks += 1
        self.index.remove(block)

    @property
    def pinned_blocks(self) -> int:
        return self.pins.blocks

    @property
    def referenced_blocks(self) -> int:
        return self.pool.total - self.pool.available

    def reset(self) -> bool:
        """Forget everything that is cached. False, and nothing done, while sequences use blocks.

        What pinned beginnings hold is forgotten too; they stay pinned, so it is kept again once it is computed again.
        """
        held = self.pins.references()
        if self.referenced_blocks > len(held) or any(self.pool.blocks[id].ref_count > n for id, n in held.items()):
            return False
        self.pins.drop()
        while len(self.policy):
            block = self.policy.victim()
            self.pool.discard(block)
            self.index.remove(block)
        self._ghosts.clear()
        return True

    # --- why, and what if ------------------------------------------------------------------------------------------

    def explain(self, table: BlockTable, match: Match, num_prompt: int, taken: Match | None = None) -> CacheReport:
        """Why ``match`` found no more of the prompt, or what was ``taken`` of it. Says nothing of other roots."""
        if not self.enabled:
            why, feature = "prefix caching is off", "--no-enable-prefix-caching"
        elif table.bypass:
            why, feature = f"{table.bypass} needs every position computed", table.bypass
        else:
            return self._explainer.report(table, match, num_prompt, taken)
        return CacheReport(num_prompt, 0, Reason.BYPASSED, why, feature=feature)

    def at_sizes(self, table: BlockTable, match: Match, num_prompt: int) -> AtSizes | None:
        """What the lookup finds in a cache of other size; asked before ``match`` is taken; None: bypassed."""
        if not self.enabled or table.bypass:
            return None
        self.policy.keep_recent(max(0, self.pool.total // 2 - self.referenced_blocks))
        return self._explainer.at_sizes(table, match, num_prompt, self.policy, self.pool.total)

    def is_isolated(self, table: BlockTable) -> bool:
        """Whether the prompt's first full block is cached, as far as is known, under another root than its own."""
        if not table.hashes or table.packed is None:
            return False
        return self._heads.elsewhere(table.hashes[0], bytes(table.packed[: self.block_size * TOKEN_BYTES]))

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise CacheInvariantError unless the books balance with these, the block tables of all live sequences."""
        expected = Counter(block.id for table in tables for block in table.blocks)
        expected.update(block.id for blocks in self._copying.values() for block in blocks)
        expected.update(self.pins.references())
        free = {block.id for block in self.pool.free}
        faults = []
        if len(free) != len(self.pool.free):
            faults.append("a block is in the free list twice")
        for block in self.pool.blocks:
            wanted = expected.get(block.id, 0)
            if block.ref_count != wanted:
                faults.append(f"{block} has {block.ref_count} references, its users make {wanted}")
            states = (block.id in free) + (block in self.policy) + (block.ref_count > 0)
            if states != (block.id != NULL_BLOCK):
                faults.append(f"{block} is in {states} of the states free, idle and referenced")
            if block.ref_count == 0 and block.id != NULL_BLOCK and block.indexed != (block in self.policy):
                faults.append(f"{block} is indexed or idle, not both")
        faults += self._index_faults() + self.pins.faults() + self._ghosts.faults(self.index.full)
        if faults:
            raise CacheInvariantError("; ".join(faults[:5]))

    def _index_faults(self) -> list[str]:
        faults = [f"hash {h.hex()[:8]} leads to {b}" for h, b in self.index.full.items() if b.hash != h]
        faults += [f"{b} is idle but not computed" for b in self.index.full.values() if not b.ready and not b.ref_count]
        faults += [f"pending {h.hex()[:8]} has a block" for h in self.index.pending if h in self.index.full]
        return faults

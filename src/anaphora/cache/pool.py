"""The fixed set of KV blocks: reference counts, allocation and eviction."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anaphora.cache.block import NULL_BLOCK, Block
from anaphora.cache.policy import EvictionPolicy
from anaphora.errors import CacheInvariantError


class BlockPool:
    """All ``num_blocks`` blocks. ``free`` lists those without content, ``policy`` holds the idle ones.

    ``on_evict`` is called with each evicted block, while its content is still set.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy, on_evict: Callable[[Block], None]) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free = self.blocks[:NULL_BLOCK:-1]
        self.policy = policy
        self._on_evict = on_evict

    @property
    def total(self) -> int:
        """Number of blocks without the null block."""
        return len(self.blocks) - 1

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated now, evictions included."""
        return len(self.free) + len(self.policy)

    def allocate(self) -> Block:
        """Return a block with one reference and no content, evicting one if none is free.

        The caller checks ``available`` first.
        """
        if self.free:
            block = self.free.pop()
        else:
            block = self.policy.victim()
            self.policy.remove(block)
            self._on_evict(block)
        block.ref_count = 1
        return block

    def reference(self, block: Block) -> None:
        """Add a reference. An idle block leaves the eviction order."""
        if block.ref_count == 0:
            self.policy.remove(block)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Drop a reference. Without any left, an indexed block becomes idle (most recently used), another one free.

        Raises CacheInvariantError if the block has no reference.
        """
        if block.ref_count <= 0:
            raise CacheInvariantError(f"block {block.id} is released more often than it was referenced")
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.indexed:
                self.policy.add(block)
            else:
                self.free.append(block)

    def discard(self, block: Block) -> None:
        """Free an idle block that is being removed from the index."""
        self.policy.remove(block)
        self.free.append(block)

    def faults(self, references: Mapping[int, int]) -> list[str]:
        """Return violated invariants; ``references`` maps block ids to the references that users really hold."""
        free = {block.id for block in self.free}
        faults = ["a block is in the free list twice"] if len(free) != len(self.free) else []
        for block in self.blocks:
            expected = references.get(block.id, 0)
            if block.ref_count != expected:
                faults.append(f"{block} has {block.ref_count} references, expected {expected}")
            states = (block.id in free) + (block in self.policy) + (block.ref_count > 0)
            if states != (block.id != NULL_BLOCK):
                faults.append(f"{block} is in {states} of the states free, idle and referenced")
            if block.ref_count == 0 and block.id != NULL_BLOCK and block.indexed != (block in self.policy):
                faults.append(f"{block} is indexed or idle, but not both")
        return faults

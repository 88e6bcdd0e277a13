"""The fixed set of KV blocks: reference counts, and which block to hand out next."""

from __future__ import annotations

from collections.abc import Callable

from anaphora.cache.block import NULL_BLOCK, Block
from anaphora.cache.policy import EvictionPolicy
from anaphora.errors import CacheInvariantError


class BlockPool:
    """``num_blocks`` blocks, of which block 0 is never handed out: padding writes to it."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy, on_evict: Callable[[Block], None]) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free = self.blocks[:NULL_BLOCK:-1]
        self.policy = policy
        self._on_evict = on_evict

    @property
    def total(self) -> int:
        """Blocks that can be handed out."""
        return len(self.blocks) - 1

    @property
    def available(self) -> int:
        """Blocks that can be handed out now, by eviction where need be."""
        return len(self.free) + len(self.policy)

    def allocate(self) -> Block:
        """A block with one reference and no content. The caller has looked at ``available`` first."""
        if self.free:
            block = self.free.pop()
        else:
            block = self.policy.victim()
            self.policy.remove(block)
            self._on_evict(block)
        block.ref_count = 1
        return block

    def reference(self, block: Block) -> None:
        """One more user; an idle block leaves the eviction order."""
        if block.ref_count == 0:
            self.policy.remove(block)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One user less. The last one leaves it idle (newest in the eviction order) if it is indexed, else free."""
        if block.ref_count <= 0:
            raise CacheInvariantError(f"block {block.id} is released more often than it was taken")
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.indexed:
                self.policy.add(block)
            else:
                self.free.append(block)

    def discard(self, block: Block) -> None:
        """An idle block has lost its place in the index: it is free now."""
        self.policy.remove(block)
        self.free.append(block)

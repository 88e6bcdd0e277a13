"""The fixed set of KV blocks: reference counts, and which block to hand out next."""

from __future__ import annotations

from collections.abc import Callable

from anaphora.cache.hashing import BlockHash
from anaphora.cache.policy import EvictionPolicy
from anaphora.errors import CacheInvariantError

NULL_BLOCK = 0


class Block:
    """One KV block. It is in exactly one state:

    - free: no reference, holds nothing that anyone could find
    - idle: no reference, indexed; waits in the eviction order
    - referenced: in the block table of a sequence, held for a copy, or pinned; indexed or private

    ``parent`` is the hash of what precedes it and ``tokens`` the packed tokens of its first ``filled`` slots, both
    set while it is indexed. ``hash`` is set only where it is full. ``step`` is the step that computes it, and
    ``ready`` says that this step has succeeded. ``children`` counts the indexed blocks that continue it. ``hits``
    matches ended here, ``depth`` blocks from the beginning, the last of them at ``last_hit``. The sequence ``made_by``
    (its key), which came at ``made``, computed it. Times are in clock seconds.
    """

    __slots__ = (
        "children",
        "depth",
        "filled",
        "hash",
        "hits",
        "id",
        "last_hit",
        "made",
        "made_by",
        "parent",
        "ready",
        "ref_count",
        "step",
        "tokens",
    )

    def __init__(self, id: int) -> None:
        self.id = id
        self.ref_count = 0
        self.children = 0
        self.forget()

    def forget(self) -> None:
        """Drop all that the index knows of it."""
        self.hash: BlockHash | None = None
        self.parent: BlockHash | None = None
        self.tokens = b""
        self.filled = 0
        self.ready = False
        self.step = -1
        self.hits = 0
        self.depth = 0
        self.last_hit = 0.0
        self.made_by = ""
        self.made = 0.0

    @property
    def indexed(self) -> bool:
        return self.parent is not None

    def __repr__(self) -> str:
        name = self.hash.hex()[:8] if self.hash else "tail" if self.indexed else "private"
        return f"Block({self.id}, {name}, refs={self.ref_count}, filled={self.filled})"


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

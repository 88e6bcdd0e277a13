"""One KV block: its state, its content and its place in the prefix index."""

from __future__ import annotations

from anaphora.cache.hashing import BlockHash

NULL_BLOCK = 0
"""Id of the block that padding rows write to. It is never handed out."""


class Block:
    """One KV block. It is in exactly one state:

    - free: no reference and not indexed
    - idle: no reference, indexed; waits in the eviction order
    - referenced: in a sequence's block table, held for a copy, or pinned; indexed or private

    While a block is indexed, ``parent`` is the hash of the block before it (or the root) and ``tokens`` the packed
    tokens of its first ``filled`` slots; ``hash`` is set only if it is full. ``step`` is the step that computes it,
    ``ready`` is set once that step has succeeded. ``children`` counts the indexed blocks that continue it.
    ``computed_by`` is the id of the request that computed it and ``arrival`` when that request came. ``hits`` counts
    the matches that ended here, ``depth`` blocks from the root, the latest at ``last_hit``. Times are clock seconds.
    """

    __slots__ = (
        "arrival",
        "children",
        "computed_by",
        "depth",
        "filled",
        "hash",
        "hits",
        "id",
        "last_hit",
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
        self.clear()

    def clear(self) -> None:
        """Reset everything that the index and the hit counts know about the block."""
        self.hash: BlockHash | None = None
        self.parent: BlockHash | None = None
        self.tokens = b""
        self.filled = 0
        self.ready = False
        self.step = -1
        self.computed_by = ""
        self.arrival = 0.0
        self.hits = 0
        self.depth = 0
        self.last_hit = 0.0

    @property
    def indexed(self) -> bool:
        """Whether the prefix index contains the block, as a full block or as an unfilled tail."""
        return self.parent is not None

    def __repr__(self) -> str:
        name = self.hash.hex()[:8] if self.hash else "tail" if self.indexed else "private"
        return f"Block({self.id}, {name}, refs={self.ref_count}, filled={self.filled})"

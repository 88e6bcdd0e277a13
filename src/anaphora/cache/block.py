"""One KV block: its state, its content and its place in the prefix index."""

from __future__ import annotations

from anaphora.cache.hashing import BlockHash

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

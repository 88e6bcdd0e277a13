"""The block table of one sequence: the tokens it knows and the blocks it holds."""

from __future__ import annotations

from collections.abc import Iterable

from anaphora.cache.block import Block
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash, extend_chain, pack


class BlockTable:
    """What one sequence knows of its tokens and holds of the cache.

    ``hashes`` has one entry a full block of known tokens; ``packed`` holds the tokens, 4 bytes each, or is None where
    only block keys are known. Blocks from ``private_from`` on were taken fresh and are written by this sequence
    alone; those before are shared, and a shared one that must be written is copied first. The first ``settled``
    blocks are indexed, or never will be. ``bypass`` names the feature for which
    its prompt is computed whole, whatever is known of it. ``made`` is when it was made (clock seconds).
    """

    __slots__ = ("blocks", "bypass", "hashes", "key", "made", "owned", "packed", "private_from", "root", "settled")

    def __init__(
        self, key: str, root: BlockHash, packed: bytearray | None, *, bypass: str = "", made: float = 0.0
    ) -> None:
        self.key = key
        self.made = made
        self.root = root
        self.packed = packed
        self.bypass = bypass
        self.hashes: list[BlockHash] = []
        self.blocks: list[Block] = []
        self.owned: list[BlockHash] = []
        self.private_from = 0
        self.settled = 0

    def append(self, token_ids: Iterable[int], block_size: int) -> None:
        """More tokens are known: hash the blocks that they fill."""
        assert self.packed is not None
        self.packed += pack(token_ids)
        if len(self.packed) >= (len(self.hashes) + 1) * block_size * TOKEN_BYTES:
            extend_chain(self.hashes, self.root, self.packed, block_size)

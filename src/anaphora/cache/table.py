"""The block table of one sequence: the tokens it knows and the blocks it holds."""

from __future__ import annotations

from collections.abc import Iterable

from anaphora.cache.block import Block
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash, extend_chain, pack


class BlockTable:
    """The known tokens of one sequence, their block hashes, and the blocks that it holds.

    - ``packed``: the known tokens, 4 bytes each; ``hashes``: one hash for each full block of them
    - ``blocks``: the blocks held, in order. Those from ``private_from`` on were allocated for this sequence and only
      it writes them; those before are shared, and a shared block is copied before the sequence writes into it
    - ``index_from``: the first block that ``commit`` may still have to index
    - ``pending``: hashes that this sequence has announced to compute
    - ``bypass``: the request field that bypasses the cache for this prompt, or ""
    - ``request_id`` and ``arrival`` (clock seconds) go into reports about blocks that this sequence computes
    """

    __slots__ = (
        "arrival",
        "blocks",
        "bypass",
        "hashes",
        "index_from",
        "packed",
        "pending",
        "private_from",
        "request_id",
        "root",
    )

    def __init__(
        self, request_id: str, root: BlockHash, packed: bytearray, *, bypass: str = "", arrival: float = 0.0
    ) -> None:
        self.request_id = request_id
        self.root = root
        self.packed = packed
        self.bypass = bypass
        self.arrival = arrival
        self.hashes: list[BlockHash] = []
        self.blocks: list[Block] = []
        self.pending: list[BlockHash] = []
        self.private_from = 0
        self.index_from = 0

    def append(self, token_ids: Iterable[int], block_size: int) -> None:
        """Add known tokens, and hash the blocks of ``block_size`` tokens that they fill."""
        self.packed += pack(token_ids)
        if len(self.packed) >= (len(self.hashes) + 1) * block_size * TOKEN_BYTES:
            extend_chain(self.hashes, self.root, self.packed, block_size)

    def parent(self, at: int) -> BlockHash:
        """Return the hash of the block before block ``at``, or the root."""
        return self.hashes[at - 1] if at else self.root

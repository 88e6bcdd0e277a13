"""Finds first blocks by their tokens alone, under any salt, for the operator's count of isolated prompts."""

from __future__ import annotations

from anaphora.cache.hashing import BlockHash
from anaphora.cache.index import PrefixIndex


class FirstBlocks:
    """Maps Python's hash of a first block's tokens to the block hash under which they were last indexed.

    Two token strings with the same Python hash share an entry, so answers are estimates; they are only counted.
    Keeps at most ``2 * num_blocks`` entries, plus one.
    """

    def __init__(self, index: PrefixIndex, num_blocks: int) -> None:
        self._index = index
        self._capacity = 2 * num_blocks
        self._block_hashes: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_hashes)

    def add(self, digest: BlockHash, tokens: bytes) -> None:
        """Record that a first block with these packed tokens has been indexed as ``digest``."""
        if len(self._block_hashes) > self._capacity:
            self._block_hashes = {key: block for key, block in self._block_hashes.items() if block in self._index.full}
        self._block_hashes[hash(tokens)] = digest

    def cached_under_other_root(self, digest: BlockHash, tokens: bytes) -> bool:
        """Return whether these packed tokens are cached as another block hash than ``digest``."""
        other = self._block_hashes.get(hash(tokens))
        return other is not None and other != digest and other in self._index.full

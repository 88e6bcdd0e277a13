"""First blocks by their tokens alone: how many prompts another salt would have served, for the operator's counts."""

from __future__ import annotations

from anaphora.cache.hashing import BlockHash
from anaphora.cache.index import PrefixIndex


class Heads:
    """Under which root the first block of a prompt was computed last; of its tokens only a number is kept."""

    def __init__(self, index: PrefixIndex, blocks: int) -> None:
        self._index = index
        self._most = 2 * blocks
        self._heads: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def note(self, digest: BlockHash, tokens: bytes) -> None:
        """A first block has been indexed."""
        if len(self._heads) > self._most:
            self._heads = {number: head for number, head in self._heads.items() if head in self._index.full}
        self._heads[hash(tokens)] = digest

    def elsewhere(self, digest: BlockHash, tokens: bytes) -> bool:
        """Whether a prompt's first block is cached, as far as is known, under another root than its own."""
        head = self._heads.get(hash(tokens))
        return head is not None and head != digest and head in self._index.full

"""What a prefix cache would have reused of a log: the production index and manager, driven without a model."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.cache.block import Block
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash, extend_chain, root_hash
from anaphora.cache.index import PrefixIndex
from anaphora.cache.manager import CacheManager
from anaphora.cache.table import BlockTable

UNLIMITED_BLOCK = 128
"""Matches are exact to the token, so an unlimited cache may use large blocks: only the speed depends on it."""
LIMITED_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens of a prompt that were cached, and the earlier request that has them (its number in the log)."""

    tokens: int
    owner: int


class UnlimitedCache:
    """A cache that never evicts. ``look`` answers for one prompt and then keeps it."""

    def __init__(self) -> None:
        self._index = PrefixIndex(UNLIMITED_BLOCK)
        self._owners: list[int] = []

    def look(self, packed: bytes, number: int, salt: str | None = None, answer: bytes = b"") -> Found:
        """What of the prompt is cached. The packed tokens of the ``answer`` are kept behind it, as the engine does."""
        hashes: list[BlockHash] = []
        root = root_hash("doctor", salt)
        extend_chain(hashes, root, packed, UNLIMITED_BLOCK)
        match = self._index.match(root, hashes, packed)
        last = match.tail or (match.blocks[-1] if match.blocks else None)
        if answer:
            packed += answer
            hashes = hashes[: len(match.blocks)]
            extend_chain(hashes, root, packed, UNLIMITED_BLOCK)
        self._store(root, hashes, packed, len(match.blocks), number)
        return Found(match.tokens, self._owners[last.id] if last else -1)

    def _store(self, root: BlockHash, hashes: list[BlockHash], packed: bytes, known: int, number: int) -> None:
        size = UNLIMITED_BLOCK * TOKEN_BYTES
        for i in range(known, len(hashes)):
            block = self._block(number)
            parent = hashes[i - 1] if i else root
            self._index.add_full(block, hashes[i], parent, packed[i * size : (i + 1) * size])
            self._index.set_ready(block)
        if tail := packed[len(hashes) * size :]:
            self._index.add_tail(self._block(number), hashes[-1] if hashes else root, tail)

    def _block(self, number: int) -> Block:
        self._owners.append(number)
        return Block(len(self._owners) - 1)


class LimitedCache:
    """A cache of ``capacity`` tokens with the engine's own eviction; prompts come one after the other."""

    def __init__(self, capacity: int, block_size: int = LIMITED_BLOCK) -> None:
        self._blocks = max(2, capacity // block_size + 1)
        self._manager = CacheManager(self._blocks, block_size)
        self._step = 0

    def look(self, packed: bytes, number: int, salt: str | None = None) -> int:
        """Cached tokens of the prompt. One that is longer than the whole cache reuses nothing and stores nothing."""
        manager, length = self._manager, len(packed) // TOKEN_BYTES
        table = BlockTable(str(number), root_hash("doctor", salt), bytearray(packed))
        extend_chain(table.hashes, table.root, packed, manager.block_size)
        match = manager.admit(table, manager.match(table), length)
        if match is None:
            return 0
        cached = min(match.tokens, length - 1)
        self._step += 1
        manager.reserve(table, min(match.tokens, length), length, self._step)
        manager.finish_step(self._step)
        manager.release(table, length)
        return cached

"""Simulates a prefix cache over a list of prompts: the production index and manager, driven without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.cache.block import Block
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash, extend_chain, pack, root_hash
from anaphora.cache.index import PrefixIndex
from anaphora.cache.manager import CacheManager
from anaphora.cache.table import BlockTable

UNLIMITED_BLOCK = 128
"""Tokens per block of an unlimited cache. Matches are exact to the token, so it only changes the speed."""
LIMITED_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Found:
    """``tokens`` of a prompt were cached; ``owner`` is the number of an earlier request that has them, or -1."""

    tokens: int
    owner: int


class UnlimitedCache:
    """A cache that never evicts."""

    def __init__(self) -> None:
        self._index = PrefixIndex(UNLIMITED_BLOCK)
        self._owners: list[int] = []

    def look(self, packed: bytes, number: int, salt: str | None = None, answer: bytes = b"") -> Found:
        """Returns the longest cached prefix of a prompt of packed tokens, then stores the prompt and its answer.

        ``number`` is reported as the owner of what is stored. Only prompts of the same ``salt`` match.
        """
        hashes: list[BlockHash] = []
        root = root_hash("simulation", salt)
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
    """A cache of ``capacity`` tokens with the engine's own eviction; one prompt runs at a time."""

    def __init__(self, capacity: int, block_size: int = LIMITED_BLOCK) -> None:
        self._blocks = max(2, capacity // block_size + 1)
        self._manager = CacheManager(self._blocks, block_size)
        self._step = 0

    def look(self, packed: bytes, number: int, salt: str | None = None) -> int:
        """Returns the cached tokens of a prompt of packed tokens, then stores it.

        A prompt longer than the whole cache reuses nothing and stores nothing.
        """
        manager, length = self._manager, len(packed) // TOKEN_BYTES
        table = BlockTable(str(number), root_hash("simulation", salt), bytearray(packed))
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


def full_block_hits(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Returns the cached tokens of each prompt if an unlimited cache of full blocks gets them in this order.

    Prompts are token ids. Answers are not cached. The last token of a prompt is always computed.
    """
    cache = UnlimitedCache()
    hits = []
    for number, prompt in enumerate(prompts):
        usable = min(cache.look(pack(prompt), number).tokens, max(0, len(prompt) - 1))
        hits.append(usable - usable % block_size)
    return hits


def longest_shared_prefixes(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each prompt the longest prefix in tokens that any other prompt has too: the most a cache can hold."""
    earlier, later = UnlimitedCache(), UnlimitedCache()
    packed = [pack(prompt) for prompt in prompts]
    before = [earlier.look(prompt, number).tokens for number, prompt in enumerate(packed)]
    after = [later.look(prompt, number).tokens for number, prompt in enumerate(reversed(packed))]
    return [max(pair) for pair in zip(before, reversed(after), strict=True)]

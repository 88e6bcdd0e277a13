"""Pins: prefixes that stay in the cache. A pin names tokens, not blocks, so it survives whatever happens to a block.

::

    pin     [S S S S][S S . .]      two pieces: a full block by its hash, the tail by its parent and tokens

A piece whose block is computed holds one reference to it, so the block is never evicted. A piece that is not computed
yet, or has lost its block (a failed step, a reset), takes one as soon as any request computes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from anaphora.cache.block import Block
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash
from anaphora.cache.index import PrefixIndex
from anaphora.cache.pool import BlockPool
from anaphora.cache.table import BlockTable
from anaphora.errors import InvalidRequest


class Piece(NamedTuple):
    """A full block: its hash, and ``tail`` empty. An unfilled tail: its parent's hash, and its packed tokens."""

    digest: BlockHash
    tail: bytes


@dataclass(frozen=True, slots=True)
class Pin:
    """The prefix with these packed tokens under ``root``, as pieces from the first to the last."""

    id: str
    root: BlockHash
    packed: bytes
    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        """Length of the prefix in tokens."""
        return len(self.packed) // TOKEN_BYTES


class Pins:
    """All pins of one cache, by id in ``by_id``. Pieces that several pins have in common hold one reference."""

    def __init__(self, index: PrefixIndex, pool: BlockPool) -> None:
        self._index = index
        self._pool = pool
        self.by_id: dict[str, Pin] = {}
        self._users: Counter[Piece] = Counter()
        self._tails: dict[BlockHash, set[Piece]] = {}
        self._held: dict[Piece, Block] = {}
        self._holders: dict[int, set[Piece]] = {}

    # --- which prefixes are pinned ---------------------------------------------------------------------------------

    def make(self, table: BlockTable) -> Pin:
        """Return the pin of a table's known tokens. Nothing is kept before ``keep``."""
        packed = bytes(table.packed)
        full = len(table.hashes) * self._index.block_size * TOKEN_BYTES
        pieces = [Piece(digest, b"") for digest in table.hashes]
        if full < len(packed):
            pieces.append(Piece(table.parent(len(table.hashes)), packed[full:]))
        name = f"pin-{sha256(table.root + packed).hexdigest()[:24]}"
        return Pin(name, table.root, packed, tuple(pieces))

    def blocks_with(self, pins: Iterable[Pin]) -> int:
        """Return the most blocks that could be held if ``pins`` were added."""
        return len(self._users.keys() | {piece for pin in pins for piece in pin.pieces})

    def keep(self, pins: Sequence[Pin], limit: int) -> list[bool]:
        """Keep these prefixes until they are removed: the blocks computed so far, and the others once they are.

        Returns for each whether it is new. Raises InvalidRequest, and keeps none, if all pins together could hold more
        than ``limit`` blocks.
        """
        if (wanted := self.blocks_with(pins)) > limit:
            now, total = self.blocks_with(()), self._pool.total
            raise InvalidRequest(
                f"too much to pin: {now} of the cache's {total} blocks of {self._index.block_size} tokens are pinned, "
                f"this needs {wanted - now} more, and {total - limit} must stay for a request of full length, so at "
                f"most {limit} may be pinned; unpin others, lower --max-model-len or raise --kv-cache-memory-bytes"
            )
        return [self._add(pin) for pin in pins]

    def _add(self, pin: Pin) -> bool:
        """Return False if it is kept already."""
        if pin.id in self.by_id:
            return False
        self.by_id[pin.id] = pin
        for piece in pin.pieces:
            self._users[piece] += 1
            if piece.tail:
                self._tails.setdefault(piece.digest, set()).add(piece)
            if piece not in self._held:
                self._hold_if_computed(piece)
        return True

    def remove(self, pin: Pin) -> None:
        """Stop keeping a pin. Blocks that nothing else uses can be evicted again, the deepest first."""
        del self.by_id[pin.id]
        for piece in reversed(pin.pieces):
            self._users[piece] -= 1
            if self._users[piece]:
                continue
            del self._users[piece]
            if piece.tail:
                self._tails[piece.digest].remove(piece)
                if not self._tails[piece.digest]:
                    del self._tails[piece.digest]
            if piece in self._held:
                self._release(piece)

    def kept_tokens(self, pin: Pin) -> int:
        """Return how many of its first tokens are computed and held."""
        size = self._index.block_size
        for i, piece in enumerate(pin.pieces):
            if piece not in self._held:
                return i * size
        return pin.tokens

    # --- which blocks are held -------------------------------------------------------------------------------------

    def offer(self, block: Block) -> None:
        """Hold a block that was just computed, if it is pinned and its piece holds none yet."""
        if not self._users:
            return
        assert block.parent is not None
        if block.hash is not None and (piece := Piece(block.hash, b"")) in self._users and piece not in self._held:
            self._hold(piece, block)
        for piece in self._tails.get(block.parent, ()):
            if piece not in self._held and block.tokens.startswith(piece.tail):
                self._hold(piece, block)

    def lost(self, block: Block) -> None:
        """Release a block that was removed from the index; hold another one with its tokens if there is one."""
        for piece in list(self._holders.get(block.id, ())):
            self._release(piece)
            self._hold_if_computed(piece)

    def release_all(self) -> None:
        """Release all blocks. The pins stay, and hold blocks again as they are computed."""
        for piece in reversed(list(self._held)):
            self._release(piece)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that pins hold now."""
        return len(self._holders)

    def references(self) -> Counter[int]:
        """Return the number of references that pins hold, by block id."""
        return Counter({block: len(pieces) for block, pieces in self._holders.items()})

    def holds(self, block: Block) -> bool:
        """Return whether a pin holds the block."""
        return block.id in self._holders

    def _find(self, piece: Piece) -> Block | None:
        if piece.tail:
            return self._index.find_continuation(piece.digest, piece.tail)
        block = self._index.full.get(piece.digest)
        return block if block is not None and block.ready else None

    def _hold_if_computed(self, piece: Piece) -> None:
        if (block := self._find(piece)) is not None:
            self._hold(piece, block)

    def _hold(self, piece: Piece, block: Block) -> None:
        self._pool.reference(block)
        self._held[piece] = block
        self._holders.setdefault(block.id, set()).add(piece)

    def _release(self, piece: Piece) -> None:
        block = self._held.pop(piece)
        holders = self._holders[block.id]
        holders.remove(piece)
        if not holders:
            del self._holders[block.id]
        self._pool.release(block)

    def faults(self) -> list[str]:
        """Return violated invariants: pieces that are computed but not held, and held blocks with other tokens."""
        faults = [
            f"pinned piece {piece.digest.hex()[:8]} is computed and not held"
            for piece in self._users
            if piece not in self._held and self._find(piece) is not None
        ]
        for piece, block in self._held.items():
            full = block.hash == piece.digest
            tail = block.parent == piece.digest and block.tokens.startswith(piece.tail)
            if not (tail if piece.tail else full):
                faults.append(f"{block} is held for {piece.digest.hex()[:8]}, which it does not contain")
        return faults

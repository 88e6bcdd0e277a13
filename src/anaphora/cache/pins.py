"""Beginnings that are kept. A pin is a promise by content, so it outlives whatever happens to a block.

::

    pin     [S S S S][S S . .]      two pieces: a full block by its hash, the rest by its parent and tokens

A piece whose block is computed holds one reference to it, so the block is never evicted. A piece that is not there yet
takes its block as soon as anybody computes it; one that loses its block (a failed step, a reset) waits for the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from anaphora.cache.block import Block
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash
from anaphora.cache.index import PrefixIndex
from anaphora.cache.pool import BlockPool
from anaphora.errors import InvalidRequest

if TYPE_CHECKING:
    from anaphora.cache.table import BlockTable


class Piece(NamedTuple):
    """A full block: its hash, and no tokens. The unfilled rest: the hash of what precedes it, and its packed tokens."""

    digest: BlockHash
    rest: bytes


@dataclass(frozen=True, slots=True)
class Pin:
    """The beginning with these packed tokens under ``root``, in pieces from the first to the last."""

    id: str
    root: BlockHash
    packed: bytes
    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES


class Pins:
    """All pins of one cache. Pieces that pins have in common are held once."""

    def __init__(self, index: PrefixIndex, pool: BlockPool) -> None:
        self._index = index
        self._pool = pool
        self.by_id: dict[str, Pin] = {}
        self._users: Counter[Piece] = Counter()
        self._rests: dict[BlockHash, set[Piece]] = {}
        self._held: dict[Piece, Block] = {}
        self._holders: dict[int, set[Piece]] = {}

    # --- what is promised -------------------------------------------------------------------------------------------

    def make(self, table: BlockTable) -> Pin:
        """The pin of a table's known tokens; nothing is kept yet."""
        assert table.packed is not None
        packed = bytes(table.packed)
        full = len(table.hashes) * self._index.block_size * TOKEN_BYTES
        pieces = [Piece(digest, b"") for digest in table.hashes]
        if full < len(packed):
            pieces.append(Piece(table.hashes[-1] if table.hashes else table.root, packed[full:]))
        name = f"pin-{sha256(table.root + packed).hexdigest()[:24]}"
        return Pin(name, table.root, packed, tuple(pieces))

    def blocks_with(self, pins: Iterable[Pin]) -> int:
        """The most blocks that would be held if ``pins`` were added."""
        return len(self._users.keys() | {piece for pin in pins for piece in pin.pieces})

    def keep(self, pins: Sequence[Pin], limit: int) -> list[bool]:
        """Keep these beginnings until they are removed: what is computed of them, and what will be.

        Says of each whether it is new. InvalidRequest, and nothing is kept, if that could take more than ``limit``
        blocks in all.
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
        """False if it is kept already."""
        if pin.id in self.by_id:
            return False
        self.by_id[pin.id] = pin
        for piece in pin.pieces:
            self._users[piece] += 1
            if piece.rest:
                self._rests.setdefault(piece.digest, set()).add(piece)
            if piece not in self._held:
                self._take(piece)
        return True

    def remove(self, pin: Pin) -> None:
        """Keep it no longer; its blocks may be evicted, the deepest first, unless other pins or sequences use them."""
        del self.by_id[pin.id]
        for piece in reversed(pin.pieces):
            self._users[piece] -= 1
            if self._users[piece]:
                continue
            del self._users[piece]
            if piece.rest:
                self._rests[piece.digest].remove(piece)
                if not self._rests[piece.digest]:
                    del self._rests[piece.digest]
            if piece in self._held:
                self._let_go(piece)

    def kept(self, pin: Pin) -> int:
        """Tokens of its beginning that are computed and held."""
        size = self._index.block_size
        for i, piece in enumerate(pin.pieces):
            if piece not in self._held:
                return i * size
        return pin.tokens

    # --- what is held -----------------------------------------------------------------------------------------------

    def offer(self, block: Block) -> None:
        """The block was computed: take it where it was promised."""
        if not self._users:
            return
        assert block.parent is not None
        if block.hash is not None and (piece := Piece(block.hash, b"")) in self._users and piece not in self._held:
            self._hold(piece, block)
        for piece in self._rests.get(block.parent, ()):
            if piece not in self._held and block.tokens.startswith(piece.rest):
                self._hold(piece, block)

    def lost(self, block: Block) -> None:
        """The index has forgotten the block, so it is of no use here either; another may hold the same."""
        for piece in list(self._holders.get(block.id, ())):
            self._let_go(piece)
            self._take(piece)

    def drop(self) -> None:
        """Give up all blocks; the promises stay."""
        for piece in reversed(list(self._held)):
            self._let_go(piece)

    @property
    def blocks(self) -> int:
        """Blocks that are held."""
        return len(self._holders)

    def references(self) -> Counter[int]:
        """Block id to the references that pins hold."""
        return Counter({block: len(pieces) for block, pieces in self._holders.items()})

    def holds(self, block: Block) -> bool:
        return block.id in self._holders

    def _find(self, piece: Piece) -> Block | None:
        if piece.rest:
            return self._index.holder(piece.digest, piece.rest)
        block = self._index.full.get(piece.digest)
        return block if block is not None and block.ready else None

    def _take(self, piece: Piece) -> None:
        if (block := self._find(piece)) is not None:
            self._hold(piece, block)

    def _hold(self, piece: Piece, block: Block) -> None:
        self._pool.reference(block)
        self._held[piece] = block
        self._holders.setdefault(block.id, set()).add(piece)

    def _let_go(self, piece: Piece) -> None:
        block = self._held.pop(piece)
        holders = self._holders[block.id]
        holders.remove(piece)
        if not holders:
            del self._holders[block.id]
        self._pool.release(block)

    def faults(self) -> list[str]:
        """What is wrong with the books: a promise that could be held and is not, a held block without its tokens."""
        faults = [
            f"pinned piece {piece.digest.hex()[:8]} is computed and not held"
            for piece in self._users
            if piece not in self._held and self._find(piece) is not None
        ]
        for piece, block in self._held.items():
            whole = block.hash == piece.digest
            part = block.parent == piece.digest and block.tokens.startswith(piece.rest)
            if not (part if piece.rest else whole):
                faults.append(f"{block} is held for {piece.digest.hex()[:8]}, which it does not contain")
        return faults

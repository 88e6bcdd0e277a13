"""Content hashes of KV blocks.

A block's hash is SHA-256 over its parent's hash and its own tokens, so it stands for the tokens *and all before them*.
Whatever else changes keys and values (weights, KV dtype, adapter, tenant salt) goes into the root alone::

    root = H(identity, salt, adapter)      h0 = H(root, tokens[0:16])      h1 = H(h0, tokens[16:32])      ...
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import sha256
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

TOKEN_BYTES = 4


def pack(token_ids: Iterable[int]) -> bytes:
    """Token ids as 4 bytes each: what is hashed, stored with a block and compared on a hit."""
    return array("I", token_ids).tobytes()


def unpack(packed: bytes) -> list[int]:
    """The reverse of ``pack``."""
    return array("I", packed).tolist()


def root_hash(identity: str, salt: str | None = None, adapter: str | None = None) -> BlockHash:
    """Root of a chain. Fields are framed by their lengths: ("ab", "c") and ("a", "bc") differ, None and "" too."""
    digest = sha256(b"anaphora-kv-1")
    for field in (identity, salt, adapter):
        data = b"" if field is None else field.encode()
        digest.update(b"-" if field is None else len(data).to_bytes(8, "little"))
        digest.update(data)
    return BlockHash(digest.digest())


def extend_chain(hashes: list[BlockHash], root: BlockHash, packed: bytes | bytearray, block_size: int) -> None:
    """Append to ``hashes`` the hash of every full block of ``packed`` that it does not have yet."""
    size = block_size * TOKEN_BYTES
    parent = hashes[-1] if hashes else root
    view = memoryview(packed)
    for start in range(len(hashes) * size, len(packed) - size + 1, size):
        parent = BlockHash(sha256(parent + view[start : start + size]).digest())
        hashes.append(parent)
    view.release()

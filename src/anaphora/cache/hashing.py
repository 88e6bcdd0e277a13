"""Content hashes of KV blocks.

A block's hash is SHA-256 over its parent's hash and its own tokens, so it covers these tokens *and all before them*.
Everything else that changes keys and values (weights, KV dtype, the tenant's salt) enters the root hash only::

    root = H(identity, salt)      h0 = H(root, tokens[0:16])      h1 = H(h0, tokens[16:32])      ...
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import sha256
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

TOKEN_BYTES = 4
"""Bytes of one token id in a packed token string."""


def pack(token_ids: Iterable[int]) -> bytes:
    """Return token ids as 4 bytes each: the form in which they are hashed, stored with a block and compared."""
    return array("I", token_ids).tobytes()


def unpack(packed: bytes) -> list[int]:
    """Return the token ids of a packed token string (the reverse of ``pack``)."""
    return array("I", packed).tolist()


def root_hash(identity: str, salt: str | None = None) -> BlockHash:
    """Return the root of the hash chain for a model identity (weights and KV dtype) and a tenant's salt.

    Fields are framed by their lengths, so ("ab", "c") and ("a", "bc") differ, as do None and "".
    """
    digest = sha256(b"anaphora-kv-1")
    for field in (identity, salt):
        data = b"" if field is None else field.encode()
        digest.update(b"-" if field is None else len(data).to_bytes(8, "little"))
        digest.update(data)
    return BlockHash(digest.digest())


def extend_chain(hashes: list[BlockHash], root: BlockHash, packed: bytes | bytearray, block_size: int) -> None:
    """Append to ``hashes`` the hashes of the full blocks of ``packed`` that it does not contain yet."""
    size = block_size * TOKEN_BYTES
    parent = hashes[-1] if hashes else root
    view = memoryview(packed)
    for start in range(len(hashes) * size, len(packed) - size + 1, size):
        parent = BlockHash(sha256(parent + view[start : start + size]).digest())
        hashes.append(parent)
    view.release()

"""Packed tokens and chained block hashes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anaphora.cache.hashing import extend_chain, pack, root_hash, unpack

tokens = st.lists(st.integers(0, 2**31), max_size=40)


@given(tokens)
def test_packing_is_reversible(ids: list[int]) -> None:
    assert unpack(pack(ids)) == ids
    assert len(pack(ids)) == 4 * len(ids)


@given(tokens, st.integers(1, 8), st.integers(0, 40))
def test_a_chain_is_the_same_however_it_grows(ids: list[int], block: int, cut: int) -> None:
    root = root_hash("m")
    at_once: list = []
    extend_chain(at_once, root, pack(ids), block)
    grown: list = []
    extend_chain(grown, root, pack(ids[:cut]), block)
    extend_chain(grown, root, pack(ids), block)
    assert grown == at_once
    assert len(at_once) == len(ids) // block


@given(tokens.filter(lambda ids: len(ids) >= 4), tokens.filter(lambda ids: len(ids) >= 4))
def test_hashes_are_equal_exactly_where_all_tokens_so_far_are(a: list[int], b: list[int]) -> None:
    root = root_hash("m")
    left: list = []
    right: list = []
    extend_chain(left, root, pack(a), 4)
    extend_chain(right, root, pack(b), 4)
    for i, (x, y) in enumerate(zip(left, right, strict=False)):
        assert (x == y) == (a[: 4 * (i + 1)] == b[: 4 * (i + 1)])


def test_tokens_that_a_weak_sum_confuses_have_different_hashes() -> None:
    """A polynomial of base 31 gives these blocks one value, forwards or backwards."""
    root = root_hash("m")
    seen = set()
    for ids in ([100, 200, 300, 400], [101, 169, 300, 400], [99, 231, 300, 400], [131, 199, 300, 400]):
        hashes: list = []
        extend_chain(hashes, root, pack(ids), 4)
        seen.add(hashes[0])
    assert len(seen) == 4


def test_roots_frame_their_fields() -> None:
    roots = [
        root_hash("model", "org_12345"),
        root_hash("modelorg_", "12345"),
        root_hash("modelorg_12345", ""),
        root_hash("modelorg_12345"),
        root_hash("model", ""),
        root_hash("model"),
    ]
    assert len(set(roots)) == len(roots)
    assert root_hash("m", "a") == root_hash("m", "a")
    assert len(root_hash("m")) == 32

"""The prefix index: matches, neighbours, tails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anaphora.cache.block import Block
from anaphora.cache.hashing import BlockHash, extend_chain, pack, root_hash, unpack
from anaphora.cache.index import PrefixIndex, common_tokens
from tests.support.cache import common_prefix

ROOT = root_hash("m")
short = st.lists(st.integers(1, 3), max_size=14)


@given(short, short)
def test_common_tokens_counts_whole_tokens(a: list[int], b: list[int]) -> None:
    assert common_tokens(pack(a), pack(b)) == common_prefix(a, b)


def chain_of(ids: list[int], size: int) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_chain(hashes, ROOT, pack(ids), size)
    return hashes


def insert(index: PrefixIndex, ids: list[int], blocks: list[Block]) -> None:
    """Index the full blocks and the tail of ``ids``, as the manager does."""
    size = index.block_size
    hashes = chain_of(ids, size)
    for i, digest in enumerate(hashes):
        if digest not in index.full:
            block = Block(len(blocks) + 1)
            blocks.append(block)
            index.add_full(block, digest, hashes[i - 1] if i else ROOT, pack(ids[i * size : (i + 1) * size]))
            for tail in index.set_ready(block):
                index.remove(tail)
    if rest := ids[len(hashes) * size :]:
        block = Block(len(blocks) + 1)
        blocks.append(block)
        for tail in index.add_tail(block, hashes[-1] if hashes else ROOT, pack(rest)) or ():
            index.remove(tail)


def filled(stored: list[list[int]], size: int) -> tuple[PrefixIndex, list[Block]]:
    """Return an index of these token strings, and its blocks."""
    index = PrefixIndex(size)
    blocks: list[Block] = []
    for ids in stored:
        insert(index, ids, blocks)
    return index, blocks


@given(st.lists(short, max_size=10), short, st.integers(1, 5))
def test_a_match_is_the_longest_prefix_in_common_with_anything_indexed(
    stored: list[list[int]], wanted: list[int], size: int
) -> None:
    index, _ = filled(stored, size)
    match = index.match(ROOT, chain_of(wanted, size), pack(wanted))
    assert match.tokens == max((common_prefix(ids, wanted) for ids in stored), default=0)
    assert len(match.blocks) == match.tokens // size or match.tail is not None


@given(st.lists(short, max_size=10), short, st.integers(1, 5))
def test_a_neighbour_shares_the_whole_match_and_continues_differently(
    stored: list[list[int]], wanted: list[int], size: int
) -> None:
    index, _ = filled(stored, size)
    hashes = chain_of(wanted, size)
    match = index.match(ROOT, hashes, pack(wanted))
    if match.tokens == len(wanted):
        return
    at, shared = divmod(match.tokens, size)
    found = index.neighbour(hashes[at - 1] if at else ROOT, pack(wanted[at * size : (at + 1) * size]), shared)
    others = {
        tuple(ids[at * size :][: shared + 1]) for ids in stored if common_prefix(ids, wanted) == match.tokens < len(ids)
    }
    assert (found is not None) == bool(others)
    if found is not None:
        assert tuple(unpack(found.tokens)[: shared + 1]) in others


def test_of_several_neighbours_the_latest_is_returned() -> None:
    index = PrefixIndex(4)
    blocks: list[Block] = []
    for number in range(100):
        insert(index, [7, 8, number], blocks)
        blocks[-1].arrival, blocks[-1].computed_by = float(number), f"r{number}"
    found = index.neighbour(ROOT, pack([7, 8, 200]), 2)
    assert found is blocks[-1]
    index.remove(blocks[-1])
    assert index.neighbour(ROOT, pack([7, 8, 50]), 2) is not None


@given(st.lists(short, max_size=10), st.integers(1, 5))
def test_removing_everything_leaves_nothing(stored: list[list[int]], size: int) -> None:
    index, blocks = filled(stored, size)
    for block in blocks:
        if block.indexed:
            index.remove(block)
    assert not index.full
    assert not index._continuations
    assert all(block.children == 0 for block in blocks)


def test_a_hash_collision_is_not_a_hit() -> None:
    """As if two contents had the same hash: the tokens are compared too."""
    index = PrefixIndex(2)
    insert(index, [1, 2, 3, 4], [])
    assert index.match(ROOT, chain_of([1, 2, 3, 4], 2), pack([1, 2, 9, 9])).tokens == 2


def test_blocks_that_are_not_computed_yet_are_referenced_but_never_copied_from() -> None:
    index = PrefixIndex(4)
    (digest,) = chain_of([1, 2, 3, 4], 4)
    block = Block(1)
    index.add_full(block, digest, ROOT, pack([1, 2, 3, 4]))
    assert index.match(ROOT, [digest], pack([1, 2, 3, 4])).blocks == (block,)
    assert index.match(ROOT, [], pack([1, 2, 3])).tokens == 0
    index.set_ready(block)
    assert index.match(ROOT, [], pack([1, 2, 3])).tail is block


def test_a_tail_grows_and_is_redundant_once_its_block_is_full() -> None:
    index = PrefixIndex(4)
    tail, full = Block(1), Block(2)
    assert index.add_tail(tail, ROOT, pack([1, 2])) == []
    assert index.add_tail(tail, ROOT, pack([1, 2, 3])) == []
    assert tail.filled == 3
    assert index.add_tail(Block(3), ROOT, pack([1, 2])) is None
    (digest,) = chain_of([1, 2, 3, 4], 4)
    index.add_full(full, digest, ROOT, pack([1, 2, 3, 4]))
    assert index.set_ready(full) == [tail]


def test_a_parent_that_is_computed_again_counts_its_continuations() -> None:
    index = PrefixIndex(2)
    blocks: list[Block] = []
    insert(index, [1, 2, 3, 4], blocks)
    parent, child = blocks
    assert parent.children == 1
    digest = parent.hash
    assert digest is not None
    index.remove(parent)
    assert index.match(ROOT, chain_of([1, 2, 3, 4], 2), pack([1, 2, 3, 4])).tokens == 0
    index.add_full(parent, digest, ROOT, pack([1, 2]))
    index.set_ready(parent)
    assert parent.children == 1
    assert index.match(ROOT, chain_of([1, 2, 3, 4], 2), pack([1, 2, 3, 4])).blocks == (parent, child)

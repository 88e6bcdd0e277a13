"""Hits per prefix: counted at the end of a match, summed up along its path when asked."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.cache.hashing import unpack
from tests.cache.test_manager import OTHER, ROOT, Cache, Clock

SYSTEM = [*range(8)]


class Counting(Cache):
    """Counts hits as the scheduler does; ``saved`` are the tokens of full blocks that were reused."""

    saved = 0

    def use(self, key: str, ids: list[int], root=ROOT) -> int:
        blocks = self.match(self.table(key, ids, root)).blocks
        self.prefix_hits.add(blocks, self._clock())
        self.saved += len(blocks) * self.block_size
        return super().use(key, ids, root)


def rows(cache: Cache, root=ROOT) -> list[tuple[int, int, int]]:
    return [(used.depth * 4, used.hits, used.saved * 4) for used in cache.prefix_hits.reused(root)]


def test_hits_count_for_shorter_prefixes_too() -> None:
    clock = Clock()
    cache = Counting(101, 4, clock=clock)
    talk = [*SYSTEM, *range(20, 32)]
    cache.use("one", [*talk[:10]])
    for i in range(5):
        cache.use(f"other {i}", [*SYSTEM, 50 + i])
    clock.now = 3.0
    cache.use("turn two", [*talk[:18]])
    cache.use("turn three", [*talk, 1])
    assert rows(cache) == [(8, 7, 56), (16, 1, 8)]
    assert sum(saved for *_, saved in rows(cache)) == cache.saved
    top, turn = cache.prefix_hits.reused(ROOT)
    assert (top.last_hit, turn.last_hit) == (3.0, 3.0)
    assert unpack(cache.prefix_hits.prefix_tokens(turn.block)) == talk[:16]
    assert rows(cache, OTHER) == []


def test_an_evicted_block_passes_its_hits_to_its_parent() -> None:
    cache = Counting(9, 4)
    long = [*SYSTEM, *range(20, 28)]
    cache.use("a", long)
    cache.use("b", [*long, 1])
    cache.use("c", [*SYSTEM, 2])
    assert rows(cache) == [(8, 2, 16), (16, 1, 8)]
    cache.use("x", [*range(100, 120)])
    assert rows(cache) == [(8, 2, 16), (12, 1, 4)]
    cache.use("y", [*range(200, 204)])
    assert rows(cache) == [(8, 2, 16)]
    assert cache.reset()
    assert rows(cache) == []


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=12))
def test_rows_add_up_and_agree_with_a_plain_count(prompts: list[list[int]]) -> None:
    cache = Counting(200, 2)
    seen: set[tuple[int, ...]] = set()
    tally: dict[tuple[int, ...], int] = {}
    for i, prompt in enumerate(prompts):
        cut = max((c for c in range(0, len(prompt) + 1, 2) if tuple(prompt[:c]) in seen), default=0)
        for c in range(2, cut + 1, 2):
            tally[tuple(prompt[:c])] = tally.get(tuple(prompt[:c]), 0) + 1
        seen |= {tuple(prompt[:c]) for c in range(0, len(prompt) + 1, 2)}
        cache.use(f"p{i}", prompt)
    found = {tuple(unpack(cache.prefix_hits.prefix_tokens(u.block))): u.hits for u in cache.prefix_hits.reused(ROOT)}
    further = {p: max((h for q, h in tally.items() if q[:-2] == p), default=0) for p in tally}
    assert found == {p: hits for p, hits in tally.items() if hits > further[p]}
    assert sum(u.saved for u in cache.prefix_hits.reused(ROOT)) * 2 == cache.saved

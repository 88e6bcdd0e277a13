"""The cache manager, driven as the scheduler does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anaphora.cache.hashing import BlockHash, root_hash
from anaphora.cache.manager import CacheManager
from anaphora.errors import CacheInvariantError
from anaphora.types.reports import Reason
from tests.support import cache as support
from tests.support.cache import OTHER, ROOT, Clock


class Cache(support.Cache):
    """Short forms: ``use`` returns the cached tokens of a prompt, ``reason`` the reason and detail of a question."""

    def use(self, key: str, ids: list[int], root: BlockHash = ROOT) -> int:
        cached = self.run(key, ids, root).report.cached_tokens
        self.check([])
        return cached

    def reason(self, ids: list[int], root: BlockHash = ROOT) -> tuple[str, str]:
        report = self.ask(ids, root)
        return report.reason, report.detail


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> Iterator[Cache]:
    cache = Cache(17, 4, clock=clock)
    yield cache
    cache.check([])


def test_a_hit_is_exact_to_the_token_and_at_most_all_but_the_last(cache: Cache) -> None:
    assert cache.use("a", [*range(10)]) == 0
    assert cache.use("b", [*range(10)]) == 9
    assert cache.use("c", [*range(8)]) == 7
    assert cache.use("d", [*range(7), 99]) == 7
    assert cache.use("e", [*range(10), 10, 11, 12]) == 10
    assert cache.use("f", [77]) == 0
    assert cache.use("g", [77]) == 0


def test_the_source_of_a_copy_is_held_until_the_step_has_finished(cache: Cache) -> None:
    cache.use("a", [1, 2, 3, 4, 5, 6])
    table = cache.table("b", [1, 2, 3, 4, 5, 9, 9], ROOT)
    match = cache.match(table)
    assert match.tokens == 5
    source = match.tail
    assert source is not None
    assert cache.admit(table, match, 8)
    reservation = cache.reserve(table, 5, 7, step=7)
    assert reservation is not None
    (copy,) = reservation.copies
    assert (copy.source, copy.filled) == (source.id, 1)
    assert source.ref_count == 1
    cache.check([table])
    cache.finish_step(7)
    assert source.ref_count == 0
    cache.release(table, 7)


def test_a_full_hit_copies_only_when_it_first_writes(cache: Cache) -> None:
    cache.use("a", [1, 2, 3, 4, 5, 6])
    table = cache.table("b", [1, 2, 3, 4, 5, 6], ROOT)
    taken = cache.admit(table, cache.match(table), 7)
    assert taken is not None
    assert taken.tokens == 6
    free = cache.pool.available
    assert cache.reserve(table, 6, 6, step=1) is not None
    assert cache.pool.available == free
    table.append([8], 4)
    reservation = cache.reserve(table, 6, 7, step=2)
    assert reservation is not None
    assert [c.filled for c in reservation.copies] == [2]
    cache.finish_step(2)
    cache.release(table, 7)


def test_recency_follows_use_so_the_shared_prefix_stays() -> None:
    """Insertion order would evict the oldest entry, the prefix that every prompt begins with."""
    cache = Cache(5, 4)
    system = [*range(4)]
    assert cache.use("s", [*system, 50]) == 0
    for i in range(8):
        assert cache.use(f"q{i}", [*system, *range(100 + 4 * i, 104 + 4 * i)]) == 4


def test_unfilled_tails_are_evicted_before_full_blocks() -> None:
    """Both chains of full blocks fit, but not with the tails: the two prompts must not evict each other."""
    cache = Cache(6, 4)
    first, second = [*range(9)], [*range(50, 59)]
    cache.use("1", first)
    cache.use("2", second)
    for turn in range(3):
        assert cache.use(f"1.{turn}", first) == 8
        assert cache.use(f"2.{turn}", second) == 8


def test_leaves_are_evicted_before_their_parents() -> None:
    cache = Cache(10, 4)
    long = [*range(32)]
    cache.use("long", long)
    cache.use("other", [*range(90, 98)])
    assert cache.use("long again", long) == 28


def test_new_prefixes_are_cached_when_the_cache_is_full() -> None:
    cache = Cache(9, 4)
    prompts = [[i] * 4 + [1] for i in range(20, 29)]
    for i, prompt in enumerate(prompts):
        cache.use(f"once {i}", prompt)
    assert cache.use("ninth", prompts[-1]) == 4
    for prompt in prompts:
        cache.use("again", prompt)
        assert cache.use("and again", prompt) == 4


def test_tenants_do_not_see_each_other(cache: Cache) -> None:
    cache.use("a", [*range(10)])
    assert cache.reason([*range(10)], OTHER) == (Reason.COLD, "no earlier prompt begins like this one")
    assert cache.use("b", [*range(10)], OTHER) == 0
    assert cache.use("c", [*range(10)], OTHER) == 9


def test_reasons(cache: Cache, clock: Clock) -> None:
    assert cache.reason([1, 2, 3]) == (Reason.COLD, "no earlier prompt begins like this one")
    cache.use("a", [*range(10)])
    assert cache.reason([77, 78, 79])[0] == Reason.COLD
    assert cache.reason([*range(10)])[0] == Reason.SHORT
    assert cache.reason([*range(10), 11, 12])[0] == Reason.HIT
    reason, detail = cache.reason([*range(6), 99, 98])
    assert reason == Reason.DIVERGED
    assert "token 6" in detail
    clock.now = 5.0
    cache.use("big", [*range(100, 163)])
    clock.now = 7.5
    reason, detail = cache.reason([*range(10)])
    assert reason == Reason.EVICTED
    assert detail.startswith("evicted 2.5 s ago when request big needed its block; ")


def test_an_eviction_for_another_tenant_is_other_traffic(cache: Cache) -> None:
    cache.use("a", [*range(10)])
    cache.use("secret-id", [*range(100, 163)], OTHER)
    reason, detail = cache.reason([*range(10)])
    assert reason == Reason.EVICTED
    assert "secret-id" not in detail
    assert "other traffic" in detail


def test_reset_says_whether_it_did(cache: Cache) -> None:
    table = cache.start("a", [*range(10)]).table
    cache.pins.keep([cache.pins.make(cache.table("pin", [*range(4)], ROOT))], 1)
    assert not cache.reset()
    cache.release(table, 10)
    assert cache.reset()
    assert cache.use("a again", [*range(10)]) == 0


def test_a_disabled_cache_finds_and_keeps_nothing() -> None:
    cache = Cache(17, 4, enabled=False)
    cache.use("a", [*range(10)])
    assert cache.use("b", [*range(10)]) == 0
    assert cache.reason([*range(10)])[0] == Reason.BYPASSED
    assert len(cache.pool.free) == cache.pool.total


@pytest.mark.parametrize("leak", ["reference", "lost", "twice", "pending"])
def test_the_check_finds_planted_faults(leak: str) -> None:
    cache = Cache(17, 4)
    table = cache.start("a", [*range(10)]).table
    cache.check([table])
    if leak == "reference":
        table.blocks[0].ref_count += 1
    elif leak == "lost":
        table.blocks.pop()
    elif leak == "twice":
        cache.pool.free.append(cache.pool.free[0])
    else:
        cache.index.pending[table.hashes[0]] = table
    with pytest.raises(CacheInvariantError):
        cache.check([table])


def test_a_block_released_too_often_is_refused() -> None:
    cache = Cache(17, 4)
    table = cache.start("a", [*range(10)]).table
    block = table.blocks[2]
    cache.release(table, 10)
    with pytest.raises(CacheInvariantError, match="more often"):
        cache.pool.release(block)


def test_block_keys_in_place_of_tokens_serve_a_simulation(cache: Cache) -> None:
    """A trace of block keys is run as prompts in which every token of a block is the number of its key."""

    def prompt(*keys: int) -> list[int]:
        return [key for key in keys for _ in range(4)]

    assert cache.use("cold", prompt(7, 8, 9)) == 0
    assert cache.use("same", prompt(7, 8, 9)) == 11
    assert cache.use("longer", prompt(7, 8, 9, 10)) == 12
    assert cache.use("diverged", prompt(7, 9, 8, 10)) == 4


def test_hashes_copied_from_the_table_before_are_correct() -> None:
    cache = CacheManager(8, 4)
    prompts = [list(range(10)), [*range(7), 99, 98, 97, 96, 95], list(range(10)), [1, *range(9)], list(range(3)), []]
    for prompt in prompts:
        table, alone = cache.table("a", prompt, ROOT), CacheManager(8, 4).table("b", prompt, ROOT)
        assert table.hashes == alone.hashes
        assert len(table.hashes) == len(prompt) // 4
        table.append([5, 6, 7], 4)
        alone.append([5, 6, 7], 4)
        assert table.hashes == alone.hashes
    assert cache.table("c", prompts[0], root_hash("another")).hashes != alone.hashes

"""Pins: prefixes are kept, whichever request computes them and whatever happens to their blocks."""

from __future__ import annotations

import pytest

from anaphora.cache.pins import Pin
from anaphora.errors import CacheInvariantError, InvalidRequest
from tests.cache.test_manager import OTHER, ROOT, Cache

SYSTEM = [*range(10)]


def pin_of(cache: Cache, ids: list[int], root=ROOT) -> Pin:
    return cache.pins.make(cache.table("pin", ids, root))


def pinned(cache: Cache, ids: list[int], root=ROOT, reserved: int = 0) -> Pin:
    pin = pin_of(cache, ids, root)
    cache.pins.keep([pin], cache.pool.total - reserved)
    cache.check([])
    return pin


def flood(cache: Cache, first: int = 100) -> None:
    """Run other prompts until all idle blocks have been evicted."""
    for i in range(6):
        cache.use(f"x{first + i}", [*range(100 * (first + i), 100 * (first + i) + 15)])


def test_a_pinned_prefix_is_never_evicted() -> None:
    cache = Cache(9, 4)
    cache.use("s", SYSTEM)
    pin = pinned(cache, SYSTEM)
    assert cache.pins.kept_tokens(pin) == 10
    assert cache.pinned_blocks == 3
    flood(cache)
    assert cache.use("s again", [*SYSTEM, 77]) == 10
    cache.pins.remove(pin)
    flood(cache, 200)
    assert cache.use("s gone", [*SYSTEM, 77]) == 0
    cache.check([])


def test_a_prefix_pinned_before_it_is_computed_is_kept_once_a_request_computes_it() -> None:
    cache = Cache(9, 4)
    pin = pinned(cache, SYSTEM)
    assert cache.pins.kept_tokens(pin) == cache.pinned_blocks == 0
    cache.use("longer", [*SYSTEM, 77, 78, 79])
    assert cache.pins.kept_tokens(pin) == 10
    flood(cache)
    assert cache.use("again", [*SYSTEM, 99]) == 10
    cache.check([])


def test_pins_share_what_they_have_in_common() -> None:
    cache = Cache(17, 4)
    cache.use("s", [*SYSTEM, 1, 2, 3])
    one, other = pinned(cache, [*SYSTEM, 1]), pinned(cache, [*SYSTEM, 2])
    assert cache.pins.blocks_with(()) == 4
    cache.pins.remove(one)
    assert cache.pins.kept_tokens(other) == 8
    cache.use("t", [*SYSTEM, 2, 2, 2])
    assert cache.pins.kept_tokens(other) == 11
    cache.pins.remove(other)
    assert cache.pinned_blocks == cache.pins.blocks_with(()) == 0
    cache.check([])
    assert cache.reset()


def test_pinning_twice_is_pinning_once() -> None:
    cache = Cache(9, 4)
    cache.use("s", SYSTEM)
    pin = pin_of(cache, SYSTEM)
    assert cache.pins.keep([pin, pin], 8) == [True, False]
    assert cache.pins.keep([pin_of(cache, SYSTEM)], 8) == [False]
    cache.pins.remove(pin)
    assert cache.pinned_blocks == 0


def test_a_pin_of_one_salt_keeps_nothing_of_another() -> None:
    cache = Cache(9, 4)
    mine, theirs = pinned(cache, SYSTEM), pinned(cache, SYSTEM, OTHER)
    assert mine.id != theirs.id
    cache.use("s", SYSTEM)
    assert cache.pins.kept_tokens(mine) == 10
    assert cache.pins.kept_tokens(theirs) == 0


def test_pins_that_leave_too_little_room_are_refused_with_the_numbers() -> None:
    cache = Cache(9, 4)
    pinned(cache, SYSTEM, reserved=4)
    with pytest.raises(InvalidRequest, match=r"3 of the cache's 8 blocks .* 2 more, and 4 must stay .* most 4 may be"):
        pinned(cache, [*range(50, 58)], reserved=4)
    pinned(cache, [*SYSTEM[:8], 50], reserved=4)
    assert cache.pins.blocks_with(()) == 4


def test_a_reset_empties_pins_and_they_fill_again() -> None:
    cache = Cache(9, 4)
    cache.use("s", SYSTEM)
    pin = pinned(cache, SYSTEM)
    assert cache.reset()
    assert cache.pins.kept_tokens(pin) == 0
    assert cache.use("s", SYSTEM) == 0
    assert cache.pins.kept_tokens(pin) == 10
    table = cache.start("reader", [*SYSTEM, 7]).table
    assert not cache.reset()
    cache.release(table, 11)
    assert cache.reset()
    cache.check([])


def test_a_pin_loses_the_blocks_of_a_failed_step_and_gets_them_from_the_next() -> None:
    cache = Cache(9, 4)
    table = cache.start("s", SYSTEM).table
    pin = pinned_while_running(cache, [*SYSTEM, 1, 2], table)
    assert cache.pins.kept_tokens(pin) == 8
    table.append([1, 2], 4)
    assert cache.reserve(table, 10, 12, 50) is not None
    cache.fail_step(50)
    cache.release(table, 10)
    cache.check([])
    assert cache.pins.kept_tokens(pin) == 8
    assert cache.use("again", [*SYSTEM, 1, 2]) >= 8
    assert cache.pins.kept_tokens(pin) == 12
    cache.check([])


def pinned_while_running(cache: Cache, ids: list[int], table: object) -> Pin:
    pin = pin_of(cache, ids)
    cache.pins.keep([pin], cache.pool.total)
    cache.check([table])  # type: ignore[list-item]
    return pin


def test_a_pinned_tail_moves_to_the_block_that_replaces_its_own() -> None:
    """Two sequences fill the same block: the second one's stays private, and the pinned tail moves to the first."""
    cache = Cache(17, 4)
    first = cache.start("first", SYSTEM).table
    pin = pinned_while_running(cache, SYSTEM, first)
    assert cache.pins.kept_tokens(pin) == 10
    second = cache.start("second", [*SYSTEM, 1, 2, 3]).table
    first.append([1, 2], 4)
    assert cache.reserve(first, 10, 12, 60) is not None
    cache.finish_step(60)
    cache.commit(first, 12)
    cache.check([first, second])
    assert cache.pins.kept_tokens(pin) == 10
    assert not first.blocks[2].indexed
    cache.release(first, 12)
    cache.release(second, 13)
    cache.check([])
    assert cache.use("third", [*SYSTEM, 5]) == 10


def test_the_check_finds_a_pin_that_is_not_held() -> None:
    cache = Cache(9, 4)
    cache.use("s", SYSTEM)
    pin = pinned(cache, SYSTEM)
    cache.pins._release(pin.pieces[0])
    with pytest.raises(CacheInvariantError, match="computed and not held"):
        cache.check([])

"""Pins and prefix lists through the engine, and random traffic with pins over a tight pool."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.core.engine import Engine
from anaphora.errors import InvalidRequest, NotFound
from anaphora.types.outputs import FinishReason
from anaphora.types.reports import Prefix
from tests.core.test_engine_property import prompts
from tests.support.engine import FakeRunner, answer, expected, make_engine, make_request, run

BLOCK = 4
SYSTEM = [*range(100, 122)]


def compute(engine: Engine, id: str, tokens: Iterable[int], max_tokens: int = 0, salt: str | None = None) -> int:
    """Run a request alone and return its cached tokens."""
    engine.add(make_request(id, tokens, max_tokens, cache_salt=salt))
    (updates,) = run(engine).values()
    assert updates[0].prompt is not None
    return updates[0].prompt.cache.cached_tokens


def test_a_pinned_prefix_outlives_all_other_traffic() -> None:
    engine = make_engine(FakeRunner(31, BLOCK), max_model_len=60)
    (report,) = engine.pin([Prefix(tuple(SYSTEM))])
    assert (report.tokens, report.kept_tokens, report.new) == (22, 0, True)
    assert compute(engine, "warm", SYSTEM) == 0
    (report,) = engine.pin([Prefix(tuple(SYSTEM))])
    assert (report.kept_tokens, report.new) == (22, False)
    for i in range(20):
        compute(engine, f"x{i}", [i, *range(1, 50)], 4)
    assert compute(engine, "after", [*SYSTEM, 7], 1) == 22
    assert engine.stats().pinned_blocks == 6
    engine.prefixes.unpin([Prefix(tuple(SYSTEM))], [])
    for i in range(20):
        compute(engine, f"y{i}", [i, *range(1, 50)], 4)
    assert compute(engine, "gone", [*SYSTEM, 7], 1) == 0
    assert engine.reset_prefix_cache()


def test_pins_leave_room_for_a_full_length_request() -> None:
    engine = make_engine(FakeRunner(31, BLOCK), max_model_len=60)
    engine.pin([Prefix(tuple(range(200, 240)), "a"), Prefix(tuple(range(200, 220)), "b")])
    with pytest.raises(InvalidRequest, match=r"15 of the cache's 30 blocks .* 1 more, and 15 must stay"):
        engine.pin([Prefix((1,))])
    compute(engine, "a", range(200, 240), salt="a")
    compute(engine, "b", range(200, 220), salt="b")
    assert engine.stats().pinned_blocks == 15
    engine.add(make_request("long", range(1, 51), 10))
    assert answer(run(engine)["long", 0]) == expected([*range(1, 51)], 10, 0)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (Prefix(()), "at least 1 token"),
        (Prefix(tuple(range(60))), "at most 59"),
        (Prefix((1, 1000)), "token id 1000"),
        (Prefix((-1,)), "token id -1"),
    ],
)
def test_if_one_prefix_cannot_be_pinned_none_is(prefix: Prefix, message: str) -> None:
    engine = make_engine(FakeRunner(31, BLOCK), max_model_len=60)
    with pytest.raises(InvalidRequest, match=message):
        engine.pin([Prefix((1, 2, 3)), prefix])
    assert engine.prefixes.list(None, 5).pins == ()


def test_nothing_is_pinned_if_prefix_caching_is_off() -> None:
    engine = make_engine(FakeRunner(31, BLOCK), max_model_len=60, enable_prefix_caching=False)
    with pytest.raises(InvalidRequest, match="prefix caching is off"):
        engine.pin([Prefix((1, 2, 3))])
    assert engine.prefixes.list(None, 5).shared == ()


def test_unpin_by_prefix_or_id_all_or_none() -> None:
    engine = make_engine(FakeRunner(31, BLOCK), max_model_len=60)
    one, two = engine.pin([Prefix((1, 2, 3)), Prefix((4, 5))])
    with pytest.raises(NotFound, match="'pin-nothing' is not pinned"):
        engine.prefixes.unpin([Prefix((1, 2, 3))], ["pin-nothing"])
    with pytest.raises(NotFound, match=r"^'a\\nb"):
        engine.prefixes.unpin([], ["a\nb"])
    with pytest.raises(NotFound):
        engine.prefixes.unpin([Prefix((1, 2, 3), "other salt")], [])
    assert len(engine.prefixes.list(None, 5).pins) == 2
    gone = engine.prefixes.unpin([Prefix((1, 2, 3))], [two.id, one.id])
    assert [report.id for report in gone] == [one.id, two.id]
    assert engine.prefixes.list(None, 5).pins == ()


def test_a_list_contains_only_one_salt() -> None:
    engine = make_engine(FakeRunner(101, BLOCK), max_model_len=200)
    engine.pin([Prefix(tuple(SYSTEM), "mine")])
    for i in range(4):
        compute(engine, f"m{i}", [*SYSTEM, i, 1], salt="mine")
        compute(engine, f"o{i}", [*range(300, 330), i, 1])
    mine, others = engine.prefixes.list("mine", 5), engine.prefixes.list(None, 5)
    (row,) = mine.shared
    assert (row.tokens, row.hits, row.tokens_saved, row.pinned) == (20, 3, 60, True)
    assert [*row.start] == SYSTEM[:20]
    assert [*mine.pins[0].start] == SYSTEM
    (row,) = others.shared
    assert (row.tokens, row.hits, row.tokens_saved, row.pinned) == (28, 3, 84, False)
    assert row.idle_s >= 0
    assert others.pins == ()
    assert engine.prefixes.list("nobody", 5).total == 0
    assert engine.prefixes.list(None, 0).shared == ()
    assert others.max_pinned_blocks == 50
    assert others.pinned_blocks == 6


Action = tuple[str, list[int], int]


@st.composite
def actions(draw: st.DrawFn) -> list[Action]:
    kinds = st.sampled_from(["ask", "ask", "pin", "warm", "unpin", "abort", "reset", "list"])
    return draw(st.lists(st.tuples(kinds, prompts(), st.integers(0, 6)), min_size=3, max_size=30))


@settings(max_examples=150)
@given(
    plan=actions(),
    spare=st.integers(0, 14),
    lookahead=st.integers(0, 1),
    failing=st.sets(st.integers(0, 25), max_size=2),
    slots=st.integers(1, 4),
)
def test_pins_among_random_traffic(
    plan: list[Action], spare: int, lookahead: int, failing: set[int], slots: int
) -> None:
    """Whatever is pinned, unpinned, warmed, aborted, evicted or failed: every request ends, and invariants hold."""
    longest = 48
    runner = FakeRunner(1 + longest // BLOCK + spare, BLOCK, lookahead=lookahead)
    runner.failing = failing
    engine = make_engine(runner, max_num_batched_tokens=16, max_num_seqs=slots, max_model_len=longest)
    wanted: dict[tuple[str, int], list[int]] = {}
    aborted: set[str] = set()
    pinned: dict[str, Prefix] = {}
    updates: dict[tuple[str, int], list] = {}  # type: ignore[type-arg]
    for number, (kind, prompt, amount) in enumerate(plan):
        if kind == "ask":
            engine.add(make_request(f"r{number}", prompt, amount, n=1 + amount % 2))
            for choice in range(1 + amount % 2):
                wanted[f"r{number}", choice] = expected(prompt, min(amount, longest - len(prompt)), choice)
        elif kind in ("pin", "warm"):
            pin_or_refuse(engine, Prefix(tuple(prompt)), pinned)
            if kind == "warm":
                engine.add(make_request(f"w{number}", prompt, 0))
                wanted[f"w{number}", 0] = []
        elif kind == "unpin" and pinned:
            id = sorted(pinned)[amount % len(pinned)]
            engine.prefixes.unpin([pinned.pop(id)], [])
        elif kind == "abort":
            aborted.add(f"r{number - amount}")
            engine.abort(f"r{number - amount}")
        elif kind == "reset":
            engine.reset_prefix_cache()
        elif kind == "list":
            engine.prefixes.list(None, amount)
        for _ in range(amount % 3):
            if engine.has_work:
                for update in engine.step().updates:
                    updates.setdefault((update.request_id, update.choice), []).append(update)
        engine.check()
    run(engine, updates)
    for key, tokens in wanted.items():
        got = updates.get(key, [])
        if key[0] not in aborted:
            assert got
            assert got[-1].finish_reason is not None
            if got[-1].finish_reason is not FinishReason.ERROR:
                assert answer(got) == tokens
            else:
                assert failing, f"{key}: {got[-1].error}"
    limit = engine.cache.pool.total - longest // BLOCK
    assert engine.stats().pinned_blocks <= limit
    assert engine.cache.referenced_blocks == engine.stats().pinned_blocks
    engine.prefixes.unpin(list(pinned.values()), [])
    assert engine.cache.referenced_blocks == 0
    assert engine.reset_prefix_cache()
    engine.check()


def pin_or_refuse(engine: Engine, prefix: Prefix, pinned: dict[str, Prefix]) -> None:
    before = engine.prefixes.list(None, 0)
    try:
        (report,) = engine.pin([prefix])
    except InvalidRequest:
        assert engine.prefixes.list(None, 0).pins == before.pins
        assert before.pinned_blocks + engine.cache.blocks_for(len(prefix.token_ids)) > before.max_pinned_blocks
    else:
        pinned[report.id] = prefix

"""Failed steps, aborts and preemption: whom they end, and what stays in the cache."""

from __future__ import annotations

import pytest

from anaphora.types.outputs import FinishReason
from tests.support.engine import FakeRunner, Updates, advance, answer, expected, make_engine, make_request, run

STEM = [*range(100, 120)]
both_pipelines = pytest.mark.parametrize("lookahead", [0, 1])


@both_pipelines
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("fate", ["abort", "fail", "preempt"])
def test_followers_finish_whatever_happens_to_the_owner(lookahead: int, steps: int, fate: str) -> None:
    runner = FakeRunner(100, 4, lookahead=lookahead)
    engine = make_engine(runner, max_num_batched_tokens=6)
    for name in ("owner", "one", "two"):
        engine.add(make_request(name, [*STEM, 7], 5))
    if fate == "fail":
        runner.failing = {steps}
    updates: dict = {}

    def step() -> None:
        for update in engine.step().updates:
            updates.setdefault(update.request_id, []).append(update)
        engine.check()

    for _ in range(steps):
        step()
    if fate == "abort":
        engine.abort("owner")
    elif fate == "preempt" and engine.scheduler.running:
        engine.scheduler._preempt(engine.scheduler.running[0])
    engine.check()
    while engine.has_work:
        step()
    assert not runner.faults
    for name in ("one", "two") if fate == "abort" else ("owner", "one", "two"):
        if fate == "fail" and updates[name][-1].error:
            assert name == "owner"  # the owner was alone in the step that failed
            continue
        assert answer(updates[name]) == expected([*STEM, 7], 5)


def test_only_the_request_that_cannot_be_computed_fails() -> None:
    runner = FakeRunner(100, 4)
    runner.poison = {666}
    engine = make_engine(runner)
    updates: Updates = {}
    engine.add(make_request("good", STEM, 4))
    advance(engine, updates)
    engine.add(make_request("bad", [*STEM, 666], 4))
    engine.add(make_request("late", [*STEM, 5], 4))
    run(engine, updates)
    assert answer(updates["good", 0]) == expected(STEM, 4)
    assert answer(updates["late", 0]) == expected([*STEM, 5], 4)
    (last,) = updates["bad", 0]
    assert last.finish_reason is FinishReason.ERROR
    assert "made to fail" in str(last.error)
    engine.add(make_request("next", [*STEM, 5], 4))
    assert answer(run(engine)["next", 0]) == expected([*STEM, 5], 4)


@both_pipelines
@pytest.mark.parametrize("before", [8, 10])
def test_blocks_that_a_failed_request_computed_earlier_are_removed(lookahead: int, before: int) -> None:
    """If its logits are not finite, the keys and values of its earlier steps may be damaged too."""
    runner = FakeRunner(100, 4, lookahead=lookahead)
    runner.poison = {666}
    engine = make_engine(runner, max_num_batched_tokens=before)
    engine.add(make_request("good", STEM[:4], 1))
    run(engine)
    start = [*STEM[:4], *range(100, 100 + before - 4)]
    engine.add(make_request("bad", [*start, 1, 2, 3, 666], 4))
    assert run(engine)["bad", 0][-1].finish_reason is FinishReason.ERROR
    engine.check()
    engine.add(make_request("next", [*start, 5], 4))
    updates = run(engine)
    assert answer(updates["next", 0]) == expected([*start, 5], 4)
    assert updates["next", 0][0].prompt.cache.cached_tokens == 4  # type: ignore[union-attr]


def test_steps_that_always_fail_end_every_request() -> None:
    runner = FakeRunner(100, 4, lookahead=1)
    runner.failing = set(range(1000))
    engine = make_engine(runner)
    for i in range(4):
        engine.add(make_request(f"r{i}", [i + 1, 2, 3], 4))
    updates = run(engine)
    assert all(u[-1].finish_reason is FinishReason.ERROR for u in updates.values())
    assert len(updates) == 4


@both_pipelines
def test_preempted_requests_answer_the_same_and_count_once(lookahead: int) -> None:
    runner = FakeRunner(14, 4, lookahead=lookahead)
    engine = make_engine(runner)
    prompts = [[i, i, i, i, i, i, i, i] for i in range(1, 6)]
    for i, prompt in enumerate(prompts):
        engine.add(make_request(f"r{i}", prompt, 20))
    updates = run(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    for i, prompt in enumerate(prompts):
        assert answer(updates[f"r{i}", 0]) == expected(prompt, 20)
    assert (stats.requests, stats.queries, stats.hits) == (5, 40, 0)
    assert stats.generation_tokens == 100


@both_pipelines
def test_one_missing_block_preempts_one_sequence(lookahead: int) -> None:
    runner = FakeRunner(4 * 4 + 1, 4, lookahead=lookahead)
    engine = make_engine(runner)
    for i in range(4):
        engine.add(make_request(f"r{i}", [i + 1] * 12, 16))
    before = 0
    while engine.has_work:
        engine.step()
        assert engine.stats().preemptions - before <= 1
        before = engine.stats().preemptions
    assert before >= 1
    engine.check()

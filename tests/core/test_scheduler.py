"""The scheduler through the engine, on a FakeRunner that checks every read."""

from __future__ import annotations

import pytest

from anaphora.cache.hashing import root_hash
from anaphora.errors import CacheInvariantError, InvalidRequest
from anaphora.types.outputs import FinishReason
from tests.support.engine import FakeRunner, Updates, advance, answer, expected, make_engine, make_request, run

STEM = [*range(100, 120)]
both_pipelines = pytest.mark.parametrize("lookahead", [0, 1])


@both_pipelines
def test_sixteen_identical_cold_prompts_compute_the_prefix_once(lookahead: int) -> None:
    runner = FakeRunner(300, 4, lookahead=lookahead)
    engine = make_engine(runner, max_num_seqs=16, max_num_batched_tokens=8)
    prompt = [*range(100, 140)]
    for i in range(16):
        engine.add(make_request(f"r{i}", prompt, 3))
    updates = run(engine)
    assert all(answer(u) == expected(prompt, 3) for u in updates.values())
    assert runner.computed == 40 + 15  # each follower computes its last token to get logits
    assert engine.stats().hits == 15 * 39
    assert engine.stats().preemptions == 0


@both_pipelines
def test_a_waiting_follower_holds_nothing_and_counts_as_served(lookahead: int) -> None:
    runner = FakeRunner(100, 4, lookahead=lookahead)
    engine = make_engine(runner, max_num_batched_tokens=6)
    updates: Updates = {}
    engine.add(make_request("owner", STEM, 2))
    engine.add(make_request("follower", STEM, 2))
    advance(engine, updates)
    assert [s.request.id for s in engine.scheduler.running] == ["owner"]
    (follower,) = engine.scheduler.waiting
    assert not follower.table.blocks
    assert engine.stats().waiting_for_prefix == 1
    (first, *_) = run(engine, updates)["follower", 0]
    assert first.prompt is not None
    assert first.prompt.cache.waited
    assert first.prompt.cache.cached_tokens >= 16
    assert 0 < first.prompt.waited_s <= first.prompt.queue_s
    assert runner.computed == 40 - first.prompt.cache.cached_tokens


def test_a_waiting_request_is_looked_up_often_and_counted_once() -> None:
    runner = FakeRunner(11, 4)
    engine = make_engine(runner)
    engine.add(make_request("warm", [*range(50, 58)], 1))
    run(engine)
    engine.add(make_request("big", [*range(1, 30)], 8))
    engine.step()
    engine.add(make_request("b", [*range(50, 58), *range(200, 212)], 1))
    while "b" in [s.request.id for s in engine.scheduler.waiting]:
        engine.step()
    run(engine)
    assert engine.stats().queries == 8 + 29 + 20
    assert engine.stats().requests == 3


def test_choices_of_one_request_count_as_one_prompt_and_are_not_hits_of_each_other() -> None:
    runner = FakeRunner(200, 4)
    engine = make_engine(runner)
    engine.add(make_request("r", STEM, 3, n=5))
    updates = run(engine)
    assert {choice: answer(u) for (_, choice), u in updates.items()} == {c: expected(STEM, 3, c) for c in range(5)}
    assert runner.computed == 20 + 4
    assert [u[0].prompt is not None for _, u in sorted(updates.items())] == [True, False, False, False, False]
    assert (engine.stats().requests, engine.stats().queries, engine.stats().hits) == (1, 20, 0)


def test_ending_one_choice_leaves_the_others() -> None:
    runner = FakeRunner(200, 4)
    engine = make_engine(runner)
    engine.add(make_request("r", STEM, 10, n=2))
    updates: Updates = {}
    advance(engine, updates)
    engine.finish_choice("r", 0)
    run(engine, updates)
    assert answer(updates["r", 0]) == expected(STEM, 1)
    assert answer(updates["r", 1]) == expected(STEM, 10, 1)


@both_pipelines
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_an_exact_repeat_computes_one_token_and_answers_the_same(lookahead: int, length: int, block: int) -> None:
    runner = FakeRunner(100, block, lookahead=lookahead)
    engine = make_engine(runner)
    prompt = [*range(100, 100 + length)]
    answers = []
    for i in range(3):
        before = runner.computed
        engine.add(make_request(f"r{i}", prompt, 5))
        (updates,) = run(engine).values()
        assert updates[0].prompt is not None
        assert updates[0].prompt.cache.cached_tokens == (length - 1 if i else 0)
        assert runner.computed - before == (1 if i else length)
        answers.append(answer(updates))
    assert answers == [expected(prompt, 5)] * 3


def test_reuse_depends_on_tokens_and_not_on_text() -> None:
    """The answer's two tokens come back as one: reuse ends where the tokens differ."""
    runner = FakeRunner(100, 4)
    engine = make_engine(runner)
    engine.add(make_request("a", [1, 2, 3], 3))
    (updates,) = run(engine).values()
    first, *_ = answer(updates)
    engine.add(make_request("b", [1, 2, 3, first, 999, 5], 1))
    (updates,) = run(engine).values()
    assert updates[0].prompt is not None
    assert updates[0].prompt.cache.cached_tokens == 4
    assert updates[0].prompt.cache.reason == "diverged"


def test_a_conversation_reuses_the_answer_too() -> None:
    runner = FakeRunner(100, 4)
    engine = make_engine(runner)
    history = [*STEM]
    cached = []
    for turn in range(4):
        engine.add(make_request(f"t{turn}", history, 6))
        (updates,) = run(engine).values()
        assert updates[0].prompt is not None
        cached.append((updates[0].prompt.cache.cached_tokens, len(history)))
        history += [*answer(updates), 30 + turn, 31 + turn]
    for (hit, _), (_, before) in zip(cached[1:], cached, strict=False):
        assert hit == before + 5  # all but the answer's last token, whose keys were never needed


def test_the_hit_rate_does_not_depend_on_concurrency() -> None:
    rates = []
    for slots in (1, 8):
        runner = FakeRunner(300, 4)
        engine = make_engine(runner, max_num_seqs=slots)
        for i in range(6):
            engine.add(make_request(f"r{i}", [*STEM, 200 + i, 7], 4))
        run(engine)
        rates.append((engine.stats().queries, engine.stats().hits))
    assert rates[0] == rates[1]


def test_two_conversations_over_one_system_prompt_answer_as_on_a_fresh_engine() -> None:
    a, b = [*STEM, *range(1, 30)], [*STEM, *range(300, 320)]
    runner = FakeRunner(100, 4)
    engine = make_engine(runner)
    engine.add(make_request("a", a, 5))
    run(engine)
    engine.add(make_request("b", b, 5))
    assert answer(run(engine)["b", 0]) == expected(b, 5)
    assert engine.stats().hits == 20


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_prompt_logprobs_compute_the_whole_prompt_and_report_it(order: tuple[str, str]) -> None:
    prompts = {"one": [*STEM, 1], "two": [*STEM, 2, 3]}
    runner = FakeRunner(100, 4)
    engine = make_engine(runner, max_num_batched_tokens=7)
    engine.add(make_request("warm", STEM, 1))
    run(engine)
    for name in order:
        before = runner.computed
        engine.add(make_request(name, prompts[name], 2, prompt_logprobs=1))
        updates = run(engine)[name, 0]
        done = updates[0].prompt
        assert done is not None
        assert done.cache.reason == "bypassed"
        assert done.cache.feature == "prompt_logprobs"
        assert done.prompt_logprobs is not None
        assert [p and p.token_id for p in done.prompt_logprobs] == [None, *prompts[name][1:]]
        assert runner.computed - before == len(prompts[name])
    assert engine.stats().hits == 0
    engine.add(make_request("after", [*prompts["two"], 9], 1))
    assert run(engine)["after", 0][0].prompt.cache.cached_tokens == len(prompts["two"])  # type: ignore[union-attr]


def test_prompt_logprobs_neither_wait_nor_make_others_wait() -> None:
    runner = FakeRunner(100, 4)
    engine = make_engine(runner, max_num_batched_tokens=12)
    engine.add(make_request("owner", STEM, 1))
    engine.add(make_request("scores", STEM, 1, prompt_logprobs=0))
    engine.add(make_request("follower", STEM, 1))
    updates = run(engine)
    assert updates["scores", 0][0].prompt.waited_s == 0  # type: ignore[union-attr]
    assert updates["follower", 0][0].prompt.cache.cached_tokens == 19  # type: ignore[union-attr]


@both_pipelines
def test_stops(lookahead: int) -> None:
    runner = FakeRunner(100, 4, lookahead=lookahead)
    engine = make_engine(runner)
    third = expected(STEM, 3)[2]
    engine.add(make_request("eos", STEM, 9, eos_token_ids=(third,)))
    engine.add(make_request("on", STEM, 9, eos_token_ids=(third,), ignore_eos=True))
    engine.add(make_request("stop", STEM, 9, stop_token_ids=(third,)))
    engine.add(make_request("none", STEM, 0))
    updates = run(engine)
    ends = {name: (answer(u), u[-1].finish_reason, u[-1].stop_reason) for (name, _), u in updates.items()}
    assert ends == {
        "eos": (expected(STEM, 3), FinishReason.STOP, None),
        "on": (expected(STEM, 9), FinishReason.LENGTH, None),
        "stop": (expected(STEM, 3), FinishReason.STOP, third),
        "none": ([], FinishReason.LENGTH, None),
    }


def test_requests_that_can_never_be_served_are_refused_with_the_limit() -> None:
    runner = FakeRunner(11, 4)
    engine = make_engine(runner)
    assert engine.info.max_model_len == 40
    assert "40" in engine.info.warnings[0]
    refused = {
        "prompt": [make_request("x", [1] * 40), make_request("x", []), make_request("x", [1, 1000])],
        "logit_bias": [make_request("x", [1], logit_bias={1000: 1.0})],
        "stop_token_ids": [make_request("x", [1], stop_token_ids=(5000,))],
    }
    for field, requests in refused.items():
        for request in requests:
            with pytest.raises(InvalidRequest) as error:
                engine.add(request)
            assert error.value.param == field
    engine.add(make_request("twin", [1], 30))
    with pytest.raises(InvalidRequest, match="twin"):
        engine.add(make_request("twin", [2]))
    engine.add(make_request("long", [1] * 39, 1_000_000_000))
    assert len(answer(run(engine)["long", 0])) == 1


def test_a_window_over_the_limit_is_capped_with_a_warning() -> None:
    engine = make_engine(FakeRunner(100, 4, context_length=64), max_model_len=32768)
    assert engine.info.max_model_len == 64
    assert "32768" in engine.info.warnings[0]
    assert make_engine(FakeRunner(100, 4, context_length=64), max_model_len=32).info.warnings == ()


def test_a_request_that_finds_no_room_on_an_idle_engine_ends_with_an_error() -> None:
    """If blocks are held forever (here: pinned beyond the engine's limit), no request waits forever."""
    engine = make_engine(FakeRunner(11, 4))
    engine.add(make_request("r", [*range(1, 33)], 1))
    run(engine)
    cache = engine.cache
    assert cache.pins.keep([cache.pins.make(cache.table("pin", range(1, 33), root_hash("fake-1")))], 8) == [True]
    assert engine.cache.pinned_blocks == 8
    engine.add(make_request("big", [*range(50, 80)], 1))
    engine.add(make_request("small", [7], 2))
    updates = run(engine)
    (last,) = updates["big", 0]
    assert last.finish_reason is FinishReason.ERROR
    assert "8 KV blocks" in str(last.error)
    assert answer(updates["small", 0]) == expected([7], 2)
    engine.reset_prefix_cache()


def test_a_planted_leak_fails_the_check() -> None:
    engine = make_engine(FakeRunner(100, 4))
    engine.add(make_request("r", STEM, 4))
    engine.step()
    engine.scheduler.running[0].table.blocks[0].ref_count += 1
    with pytest.raises(CacheInvariantError):
        engine.check()


def test_reset_does_not_wait_for_requests() -> None:
    engine = make_engine(FakeRunner(100, 4))
    engine.add(make_request("r", STEM, 4))
    engine.step()
    assert not engine.reset_prefix_cache()
    run(engine)
    assert engine.reset_prefix_cache()
    engine.add(make_request("again", STEM, 4))
    assert run(engine)["again", 0][0].prompt.cache.reason == "cold"  # type: ignore[union-attr]


def test_without_the_cache_everything_is_computed() -> None:
    runner = FakeRunner(100, 4)
    engine = make_engine(runner, enable_prefix_caching=False)
    for i in range(3):
        engine.add(make_request(f"r{i}", STEM, 4))
    updates = run(engine)
    assert all(answer(u) == expected(STEM, 4) for u in updates.values())
    assert runner.computed == 60
    stats = engine.stats()
    assert (stats.queries, stats.hits, stats.reasons) == (0, 0, {"bypassed": 3})
    assert stats.free_blocks == stats.total_blocks


def test_decoding_sequences_are_grouped_by_what_they_share() -> None:
    runner = FakeRunner(300, 4)
    engine = make_engine(runner, max_num_batched_tokens=200)
    stem = [*range(100, 140)]
    for i in range(4):
        engine.add(make_request(f"r{i}", [*stem, *[i + 1] * 6], 8))
    run(engine)
    groups = [g for batch in runner.batches for g in batch.groups]
    assert groups
    assert {(g.first, g.last, len(g.slots)) for g in groups} == {(0, 10, 4)}
    runner.batches.clear()
    engine = make_engine(runner, shared_prefix_attention=False)
    engine.add(make_request("a", stem, 8, n=3))
    run(engine)
    assert not any(batch.groups for batch in runner.batches)

"""Random traffic over a tight pool: every request ends, every answer is right, no block is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine import FakeRunner, answer, chain, expected, make_engine, make_request, run

BLOCK = 4


@dataclass
class Traffic:
    """What happens before each step: requests that arrive, aborts, steps that fail."""

    arrivals: dict[int, list[tuple[list[int], int, int, str | None]]] = field(default_factory=dict)
    aborts: dict[int, int] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that share prefixes: one of two stems, cut anywhere, and a tail of few different tokens."""
    stem = draw(st.sampled_from([range(100, 130), range(200, 230)]))
    cut = draw(st.integers(0, 30))
    return [*stem[:cut], *draw(st.lists(st.integers(1, 3), min_size=1, max_size=9))]


@st.composite
def traffic(draw: st.DrawFn) -> Traffic:
    arrivals: dict[int, list[tuple[list[int], int, int, str | None]]] = {}
    for _ in range(draw(st.integers(1, 10))):
        entry = (
            draw(prompts()),
            draw(st.integers(0, 12)),
            draw(st.integers(1, 3)),
            draw(st.sampled_from([None, "a"])),
        )
        arrivals.setdefault(draw(st.integers(0, 12)), []).append(entry)
    aborts = draw(st.dictionaries(st.integers(0, 20), st.integers(0, 9), max_size=3))
    return Traffic(arrivals, aborts, draw(st.sets(st.integers(0, 25), max_size=2)))


@settings(max_examples=150)
@given(
    plan=traffic(),
    blocks=st.integers(13, 40),
    lookahead=st.integers(0, 1),
    budget=st.integers(3, 40),
    slots=st.integers(1, 6),
)
def test_every_request_ends_with_the_right_answer(
    plan: Traffic, blocks: int, lookahead: int, budget: int, slots: int
) -> None:
    runner = FakeRunner(blocks, BLOCK, lookahead=lookahead)
    runner.failing = plan.failing
    engine = make_engine(runner, max_num_batched_tokens=budget, max_num_seqs=slots)
    wanted: dict[tuple[str, int], list[int]] = {}
    got: dict[tuple[str, int], list[int]] = {}
    ended: set[tuple[str, int]] = set()
    aborted: set[str] = set()
    errors: set[tuple[str, int]] = set()
    names: list[str] = []
    for at in range(1000):
        for prompt, max_tokens, n, salt in plan.arrivals.pop(at, []):
            names.append(f"r{len(names)}")
            engine.add(make_request(names[-1], prompt, max_tokens, n=n, cache_salt=salt))
            for choice in range(n):
                fits = min(max_tokens, engine.info.max_model_len - len(prompt))
                wanted[names[-1], choice] = expected(prompt, fits, choice)
        if at in plan.aborts and plan.aborts[at] < len(names):
            aborted.add(names[plan.aborts[at]])
            engine.abort(names[plan.aborts[at]])
        if not engine.has_work and not plan.arrivals:
            break
        for update in engine.step().updates:
            key = update.request_id, update.choice
            assert key not in ended, "an update after the end"
            assert update.request_id not in aborted, "an update after the abort"
            got.setdefault(key, []).extend(update.token_ids)
            if update.finish_reason:
                ended.add(key)
            if update.error:
                errors.add(key)
        engine.check()
    assert not engine.has_work
    assert not runner.faults, runner.faults[:3]
    for key, tokens in wanted.items():
        if key[0] in aborted and key not in ended:
            continue
        assert key in ended
        if key not in errors:
            assert got[key] == tokens
    assert engine.cache.referenced_blocks == 0
    stats = engine.stats()
    assert stats.hits <= stats.queries
    assert runner.widest <= budget
    assert engine.reset_prefix_cache()
    assert engine.stats().free_blocks == engine.stats().total_blocks


@settings(max_examples=60)
@given(requests=st.lists(prompts(), min_size=1, max_size=8), lookahead=st.integers(0, 1), block=st.integers(1, 9))
def test_work_done_is_prompt_minus_cached_whatever_the_block_size(
    requests: list[list[int]], lookahead: int, block: int
) -> None:
    runner = FakeRunner(200, block, lookahead=lookahead)
    engine = make_engine(runner)
    known: list[list[int]] = []
    for i, prompt in enumerate(requests):
        before = runner.computed
        (updates,) = run_one(engine, f"r{i}", prompt)
        tokens = expected(prompt, 3, 0)
        assert answer(updates) == tokens
        assert updates[0].prompt is not None
        cached = updates[0].prompt.cache.cached_tokens
        assert runner.computed - before == len(prompt) - cached
        assert cached == min(max((common(prompt, other) for other in known), default=0), len(prompt) - 1)
        known.append(prompt + tokens[:-1])


def run_one(engine, id, prompt):  # type: ignore[no-untyped-def]
    engine.add(make_request(id, prompt, 3))
    return run(engine).values()


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for x, y in zip(chain(a), chain(b), strict=False) if x == y)

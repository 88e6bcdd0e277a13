"""What the engine measures of its own steps."""

from __future__ import annotations

import pytest

from anaphora.config import CacheConfig, EngineConfig
from anaphora.core.engine import Engine
from tests.support.engine import FakeRunner, make_engine, make_request, run


class SlowRunner(FakeRunner):
    """A runner whose every step takes half a second of its own clock, within ``submit``, as on a CPU."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def submit(self, batch):  # type: ignore[no-untyped-def]
        self.now += 0.5
        return super().submit(batch)


def test_prefill_seconds_are_measured_and_price_the_reused_tokens() -> None:
    runner = SlowRunner(100, 4)
    engine = Engine(EngineConfig(cache=CacheConfig(block_size=4)), runner, clock=runner.clock)
    prompt = [*range(100, 140)]
    engine.add(make_request("cold", prompt, 3))
    (updates,) = run(engine).values()
    assert updates[0].prompt is not None
    assert updates[0].prompt.prefill_s == 0.5
    stats = engine.stats()
    assert stats.prefill_seconds == 0.5
    assert stats.prefill_seconds_saved == 0.0
    assert stats.steps == 3
    engine.add(make_request("hit", prompt, 1))
    run(engine)
    assert engine.stats().prefill_seconds == 1.0
    per_token = 1.0 / 41  # two prefill steps of half a second, 40 and 1 tokens
    assert engine.stats().prefill_seconds_saved == pytest.approx(39 * per_token)


def test_counters_never_fall() -> None:
    runner = FakeRunner(14, 4)
    engine = Engine(EngineConfig(cache=CacheConfig(block_size=4)), runner)
    for i in range(6):
        engine.add(make_request(f"r{i}", [i + 1] * 9, 12))
    names = ("queries", "hits", "requests", "generation_tokens", "preemptions", "evicted_blocks", "steps")
    before = engine.stats()
    while engine.has_work:
        engine.step()
        now = engine.stats()
        assert all(getattr(now, name) >= getattr(before, name) for name in names)
        gauges = now.free_blocks + now.idle_cached_blocks + now.referenced_blocks
        assert gauges == now.total_blocks
        before = now
    assert before.preemptions > 0
    engine.check()


def test_a_request_is_a_hit_from_sixteen_tokens_on_or_if_a_shorter_prompt_is_cached_whole() -> None:
    engine = make_engine(FakeRunner(200, 4))
    first = [*range(100, 140)]
    hits = []
    for number, prompt in enumerate(([1, 2, 3], first, [*first[:15], 90, 91], [*first[:16], 92, 93], [1, 2, 3], [1])):
        engine.add(make_request(f"r{number}", prompt, 1))
        run(engine)
        hits.append(engine.stats().requests_hit)
    assert hits == [0, 0, 0, 1, 2, 2]
    engine.check()

"""The rows, by name: what each sends, to which engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from card.engines import CARD24, CARD24_085, FLOAT8, WHOLE, Bench, Job
from card.meter import ms

Figures = dict[str, Any]

TENANTS = 16
TURNS = 5
WARM_TOKENS = 4


def shared(
    bench: Bench, count: int, kind: str = WHOLE, *, caching: bool = True, sharing: bool = True, systems: int = 1
) -> Figures:
    """``count`` requests at once under one system prompt (or several), which was computed before the clock starts."""
    size, engine, count = bench.size, bench.engine(kind, caching=caching, sharing=sharing), bench.size.count(count)
    beginnings = [bench.text(size.shared) for _ in range(systems)]
    bench.run(engine, bench.jobs(systems, WARM_TOKENS, beginnings))
    bench.run(engine, bench.jobs(count if caching else min(count, 16), WARM_TOKENS, beginnings))
    return bench.run(engine, bench.jobs(count, size.answer, beginnings)).figures()


def steady(bench: Bench, *, sharing: bool) -> Figures:
    """512 always running: whenever one has ended, another comes. Answers of 50 to 350 tokens."""
    size, engine = bench.size, bench.engine(sharing=sharing)
    count, system = size.count(512), bench.text(size.shared)
    low, high = max(size.answer // 4, 1), size.answer * 7 // 4

    def job(least: int = low) -> Job:
        return Job(system + bench.text(size.own), bench.random.randint(least, high))

    bench.run(engine, bench.jobs(1, WARM_TOKENS, [system]))
    warm = size.seconds / 8
    jobs = [job(1) for _ in range(count)]  # so that they do not all end at once
    return bench.run(engine, jobs, lambda _job, _answer: job(), (warm, warm + size.seconds)).figures()


def conversations(bench: Bench) -> Figures:
    """128 conversations of 5 turns under one system prompt; a turn comes as soon as the one before is answered."""
    size, engine = bench.size, bench.engine()
    system = bench.text(size.shared)

    def follow(job: Job, answer: list[int]) -> Job | None:
        if job.turns == 1:
            return None
        return Job((*job.prompt, *answer, *bench.text(size.own)), size.answer, job.turns - 1)

    bench.run(engine, bench.jobs(1, WARM_TOKENS, [system]))
    count = size.count(128)
    jobs = [Job(system + bench.text(size.own), size.answer, TURNS) for _ in range(count)]
    found = bench.run(engine, jobs, follow).figures()
    return {"turns_per_s": found["requests_per_s"]} | found


def no_reuse(bench: Bench, *, caching: bool) -> Figures:
    """128 requests whose prompts have nothing in common."""
    size, engine, count = bench.size, bench.engine(caching=caching), bench.size.count(128)
    length = size.shared + size.own
    bench.run(engine, [Job(bench.text(length), WARM_TOKENS) for _ in range(min(count, 8))])
    return bench.run(engine, [Job(bench.text(length), size.answer) for _ in range(count)]).figures()


def alone(bench: Bench, *, hit: bool) -> Figures:
    """One request at a time: time to its first token, the median of ten."""
    size, engine = bench.size, bench.engine()
    times, cached, prompt = [], 0, 0
    for index in range(12):
        system = bench.text(size.shared)
        if hit:
            bench.run(engine, [Job(system + bench.text(size.own), 1)])
        seen = bench.run(engine, [Job(system + bench.text(size.own), 1)])
        if index > 1:
            times += [seen.first[name] - seen.arrived[name] for name in seen.first]
            cached, prompt = cached + seen.cached, prompt + seen.prompt
    return {"ttft_ms": ms(times), "hit_rate": round(cached / prompt, 4)}


def single_stream(bench: Bench) -> Figures:
    engine, job = bench.engine(), Job(bench.text(bench.size.shared + bench.size.own), bench.size.answer)
    bench.run(engine, [job])
    return bench.run(engine, [job]).figures()


def sweep(bench: Bench, count: int, *, caching: bool) -> Figures:
    """``count`` requests at once, three times: their prefill should not grow with their number."""
    size, engine = bench.size, bench.engine(caching=caching)
    system, rounds = bench.text(size.shared), []
    for _ in range(4):
        seen = bench.run(engine, bench.jobs(max(size.count(count * size.part), 1), 8, [system]))
        rounds.append(seen.figures())
    names = ("requests_per_s", "ttft_ms", "prefill_ms", "itl_ms", "hit_rate")
    return {"requests": count} | {name: round(statistics.median(r[name] for r in rounds[1:]), 4) for name in names}


def long_burst(bench: Bench, kind: str) -> Figures:
    """16 prompts of 16,000 tokens and 48 of the usual length at once on a small card: none may fail."""
    size, engine = bench.size, bench.engine(kind)
    system = bench.text(size.shared)
    jobs = bench.jobs(size.count(48), size.answer, [system])
    jobs += [Job(system + bench.text(size.long - size.shared), size.answer) for _ in range(size.count(16))]
    return bench.run(engine, jobs).figures() | {"pool_tokens": engine.cache.pool.total * engine.cache.block_size}


def float8(bench: Bench) -> Figures:
    """As on_512 with the cache in float8; its error is that of log-probabilities against a cache in bfloat16."""
    prompt = bench.text(bench.size.shared + bench.size.own)
    exact, rounded = (bench.logprobs(kind, prompt) for kind in (WHOLE, FLOAT8))
    gaps = [abs(a - b) for a, b in zip(exact, rounded, strict=True)]
    spread = statistics.pstdev(exact)
    error = {
        "rms": round(statistics.fmean(gap * gap for gap in gaps) ** 0.5, 6),
        "max": round(max(gaps), 6),
        "rms_of_spread": round((statistics.fmean(gap * gap for gap in gaps) ** 0.5) / spread, 6),
    }
    return shared(bench, 512, FLOAT8) | {"logprob_error": error}


def rows(bench: Bench) -> dict[str, Callable[[], Figures]]:
    """All rows by name, in the order of measurement: rows of one runner together."""
    found: dict[str, Callable[[], Figures]] = {
        "ttft_cold": partial(alone, bench, hit=False),
        "ttft_hit": partial(alone, bench, hit=True),
        "single_stream": partial(single_stream, bench),
        "on_512": partial(shared, bench, 512),
        "off_256": partial(shared, bench, 256, caching=False),
        "on_256": partial(shared, bench, 256),
        "on_1024": partial(shared, bench, 1024),
        "tenants16_256": partial(shared, bench, 256, systems=TENANTS),
        "tenants16_1024": partial(shared, bench, 1024, systems=TENANTS),
        "conversations": partial(conversations, bench),
        "no_reuse_off": partial(no_reuse, bench, caching=False),
        "no_reuse_on": partial(no_reuse, bench, caching=True),
        "steady_512": partial(steady, bench, sharing=True),
        "on_512_unshared": partial(shared, bench, 512, sharing=False),
        "on_256_unshared": partial(shared, bench, 256, sharing=False),
        "on_1024_unshared": partial(shared, bench, 1024, sharing=False),
        "steady_512_unshared": partial(steady, bench, sharing=False),
    }
    for count in (10, 20, 30):
        found[f"sweep_{count}_off"] = partial(sweep, bench, count, caching=False)
        found[f"sweep_{count}_on"] = partial(sweep, bench, count, caching=True)
    return found | {
        "card24_off": partial(shared, bench, 96, CARD24, caching=False),
        "card24_on": partial(shared, bench, 512, CARD24),
        "card24_long16k_burst_090": partial(long_burst, bench, CARD24),
        "card24_long16k_burst_085": partial(long_burst, bench, CARD24_085),
        "fp8_on_512": partial(float8, bench),
    }

"""What ``anaphora plan`` computes with: prefill by length and cached part, decode steps by batch and context."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from anaphora.config import SchedulerConfig
from anaphora.core.engine import Engine
from anaphora.types.batch import Batch, Chunk, Pending
from card.engines import CARD24, WHOLE, Bench, Job
from card.meter import Metered

STEPS = 24
"""Decode steps of each measurement; the first few are left out."""

WARM_STEPS = 6

PREFILL = {WHOLE: ((128, 512, 2048, 8192), (0, 2304, 8192)), CARD24: ((128, 512, 2048), (0, 2304))}
"""Lengths and cached parts."""

APART = {
    WHOLE: [(256, (1, 16, 64, 256, 512, 1024)), (2560, (1, 16, 64, 256)), (8192, (1, 16, 64))],
    CARD24: [(256, (1, 8, 32, 96)), (2560, (1, 4, 8, 12))],
}
"""Own tokens of a sequence, and how many sequences."""

SHARED = {
    WHOLE: [(2304, (16, 64, 256, 512, 1024)), (8192, (16, 64, 256, 512, 1024))],
    CARD24: [(2304, (8, 32, 96))],
}
"""Tokens that all share, and how many sequences; each has 256 of its own."""


class WithoutPrefill(Metered):
    """A runner that computes only the last token of a prompt's chunk: long contexts cost no time to make.

    Their keys and values are whatever the pool holds.
    """

    def submit(self, batch: Batch) -> Pending:
        return super().submit(replace(batch, chunks=tuple(map(_last, batch.chunks))))


def _last(chunk: Chunk) -> Chunk:
    if chunk.token_ids is None or chunk.length == 1:
        return chunk
    end = chunk.start + chunk.length
    return chunk._replace(start=end - 1, length=1, token_ids=chunk.token_ids[-1:], write_from=end - 1)


def calibrate(bench: Bench, kind: str) -> dict[str, Any]:
    """``prefill`` has rows of length, cached, tokens a second; ``decode`` of sequences, shared, own, milliseconds."""
    runner = bench.runner(kind)
    for pool in runner._backend.pools:
        pool.normal_()  # uninitialised memory may hold NaN
    info = runner.info
    settings = bench.settings(kind).scheduler
    return {
        "model": bench.size.shape,
        "block_bytes": info.bytes_per_block,
        "block_size": info.block_size,
        "blocks": info.num_blocks - 1,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "prefill": list(_prefill(bench, kind)),
        "decode": list(_decode(bench, kind, info.num_blocks * info.block_size)),
    }


def _prefill(bench: Bench, kind: str) -> Iterable[list[float]]:
    lengths, cached = PREFILL[kind]
    budget, window = bench.settings(kind).scheduler.max_num_batched_tokens, bench.size.shape["max_position_embeddings"]
    for start in cached:
        engine = bench.engine(kind)
        system = bench.text(_scaled(bench, start))
        if system:
            bench.run(engine, [Job(system, 1)])
        for full in lengths:
            length = _scaled(bench, full)
            if start + full >= window * bench.size.part:
                continue
            count = max(2 * budget // length, 1)
            bench.run(engine, [Job(system + bench.text(length), 1) for _ in range(max(count // 8, 1))])
            seen = bench.run(engine, [Job(system + bench.text(length), 1) for _ in range(count)])
            yield [length, len(system), round(count * length / (seen.end - seen.begin), 1)]


def _decode(bench: Bench, kind: str, tokens: int) -> Iterable[list[float]]:
    for own, batches in APART[kind]:
        for batch in batches:
            yield from _step(bench, kind, tokens, (batch, 0, own))
    for shared, batches in SHARED[kind]:
        for batch in batches:
            yield from _step(bench, kind, tokens, (batch, shared, 256))


def _step(bench: Bench, kind: str, tokens: int, cell: tuple[int, int, int]) -> Iterable[list[float]]:
    """The median decode step; nothing if so much does not fit."""
    batch, shared, own = bench.size.count(cell[0]), _scaled(bench, cell[1]), _scaled(bench, cell[2])
    if shared + batch * (own + STEPS + 16) >= tokens:
        return
    engine = _engine(bench, kind)
    system = bench.text(shared)
    if system:
        bench.run(engine, [Job(system, 1)])
    # The context grows by a token a step: at the median it is of the length that was asked for.
    jobs = [Job(system + bench.text(own - STEPS // 2 if own > STEPS else own), STEPS) for _ in range(batch)]
    seen = bench.run(engine, jobs)
    steps = [seconds for seconds, rows in seen.steps if rows == batch][WARM_STEPS:]
    if steps:
        yield [batch, shared, own, round(1000 * statistics.median(steps), 4)]


def _engine(bench: Bench, kind: str) -> Engine:
    """Admits every prompt in one step, and computes none."""
    settings = bench.settings(kind)
    scheduler = SchedulerConfig(max_num_seqs=settings.scheduler.max_num_seqs, max_num_batched_tokens=2**22)
    return Engine(replace(settings, scheduler=scheduler), WithoutPrefill(bench.runner(kind)))


def _scaled(bench: Bench, tokens: int) -> int:
    return tokens * bench.size.shared // 2300

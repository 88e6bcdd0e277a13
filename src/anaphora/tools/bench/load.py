"""Sending: so many at once (closed loop), or at given times whatever the server does (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from anaphora.tools.bench.client import Sample, Server
from anaphora.tools.bench.workloads import Session


class Watch(Protocol):
    """Who is told while requests run: ``heard`` each piece of an answer, ``done`` each request that has ended."""

    def heard(self, text: str) -> None: ...
    def done(self, sample: Sample) -> None: ...


async def closed_loop(
    server: Server, sessions: Sequence[Session], concurrency: int, watch: Watch, salt: str | None = None
) -> list[Sample]:
    """``concurrency`` workers take sessions in order; the samples in the order of the sessions."""
    waiting = iter(enumerate(sessions))
    found: dict[int, list[Sample]] = {}

    async def work() -> None:
        for index, session in waiting:
            found[index] = await _follow(server, session, watch, salt)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(sessions))):
            group.create_task(work())
    return [sample for index in sorted(found) for sample in found[index]]


async def open_loop(server: Server, sessions: Sequence[Session], watch: Watch, salt: str | None = None) -> list[Sample]:
    """Each session starts ``at`` seconds after the beginning."""
    begun = time.perf_counter()

    async def start(session: Session) -> list[Sample]:
        await asyncio.sleep(session.at - (time.perf_counter() - begun))
        return await _follow(server, session, watch, salt)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(start(session)) for session in sessions]
    return [sample for task in tasks for sample in task.result()]


async def _follow(server: Server, session: Session, watch: Watch, salt: str | None) -> list[Sample]:
    samples = []
    for planned in session.requests:
        samples.append(await server.send(planned, salt, watch.heard))
        watch.done(samples[-1])
    return samples


def arrivals(sessions: Sequence[Session], rate: float, seed: str) -> list[Session]:
    """The sessions with random arrival times, ``rate`` requests a second on average.

    Gaps are exponential (a Poisson process). Sessions of one burst arrive together, and the gap after them is as
    much longer as they hold more requests.
    """
    rng = random.Random(seed)
    placed: list[Session] = []
    now = 0.0
    for index, session in enumerate(sessions):
        if index and session.burst != sessions[index - 1].burst:
            burst = sessions[index - 1].burst
            requests = sum(len(other.requests) for other in sessions if other.burst == burst)
            now += rng.expovariate(rate / requests)
        placed.append(replace(session, at=now))
    return placed

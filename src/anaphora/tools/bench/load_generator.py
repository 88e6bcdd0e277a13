"""Sends requests: a fixed number at a time (closed loop), or at given times (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from anaphora.tools.bench.client import RequestResult, Server
from anaphora.tools.bench.workloads import Session


class Observer(Protocol):
    """Gets the events of running requests."""

    def on_text(self, text: str) -> None:
        """Called with each piece of an answer."""

    def on_end(self, result: RequestResult) -> None:
        """Called with each request that has ended."""


async def closed_loop(
    server: Server, sessions: Sequence[Session], concurrency: int, observer: Observer, salt: str | None = None
) -> list[RequestResult]:
    """Lets ``concurrency`` workers take sessions in order. Returns the results in the order of the sessions."""
    waiting = iter(enumerate(sessions))
    found: dict[int, list[RequestResult]] = {}

    async def work() -> None:
        for index, session in waiting:
            found[index] = await _follow(server, session, observer, salt)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(sessions))):
            group.create_task(work())
    return [result for index in sorted(found) for result in found[index]]


async def open_loop(
    server: Server, sessions: Sequence[Session], observer: Observer, salt: str | None = None
) -> list[RequestResult]:
    """Starts each session ``at`` seconds after the call, whatever the server does. Returns results in their order."""
    begun = time.perf_counter()

    async def start(session: Session) -> list[RequestResult]:
        await asyncio.sleep(session.at - (time.perf_counter() - begun))
        return await _follow(server, session, observer, salt)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(start(session)) for session in sessions]
    return [result for task in tasks for result in task.result()]


async def _follow(server: Server, session: Session, observer: Observer, salt: str | None) -> list[RequestResult]:
    results = []
    for planned in session.requests:
        results.append(await server.send(planned, salt, observer.on_text))
        observer.on_end(results[-1])
    return results


def arrivals(sessions: Sequence[Session], rate: float, seed: str) -> list[Session]:
    """Returns the sessions with random arrival times, ``rate`` requests per second on average.

    Gaps are exponential (a Poisson process). Sessions of one burst arrive together; the gap after them is in
    proportion to their number of requests.
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

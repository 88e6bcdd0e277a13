"""Helpers for tests that talk to an engine process over a FakeRunner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil

from anaphora.config import EngineConfig
from anaphora.remote.client import EngineClient
from anaphora.types.outputs import SequenceUpdate
from anaphora.types.request import Request
from anaphora.types.sampling import SamplingParams

FAKE = "tests.support.engine:load_fake"
SLOW = "tests.support.runners:load_slow"
LONG = 2000


@asynccontextmanager
async def started(runner: str = FAKE) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(EngineConfig(runner=runner))
    try:
        yield client
    finally:
        await client.close()


def request(request_id: str, max_tokens: int = 5, n: int = 1, prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    sampling = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, seed=1)
    return Request(request_id, prompt, sampling, time.monotonic())


async def collect(client: EngineClient, wanted: Request) -> list[SequenceUpdate]:
    return [update async for update in client.generate(wanted)]


def tokens(updates: list[SequenceUpdate], choice: int = 0) -> list[int]:
    return [token for update in updates if update.choice == choice for token in update.token_ids]


async def first_update(client: EngineClient, wanted: Request) -> asyncio.Task[list[SequenceUpdate]]:
    """Return, once the first update has come, a task that reads the whole answer."""
    seen = asyncio.Event()

    async def read() -> list[SequenceUpdate]:
        updates = []
        async for update in client.generate(wanted):
            updates.append(update)
            seen.set()
        return updates

    task = asyncio.create_task(read())
    await seen.wait()
    return task


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds. If it never does, the time limit of the test ends the wait."""
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def assert_nothing_kept(client: EngineClient) -> None:
    """Assert that no stream is left, and wait for open calls (the watchdog's ping is answered between two steps)."""
    assert not client._streams
    await until(lambda: not client._calls)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}

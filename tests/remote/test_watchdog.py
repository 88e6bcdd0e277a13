"""The watchdog tells a process that hangs from one that computes for long. Its time is given by the tests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial

import psutil
import pytest

from anaphora.errors import EngineDead
from anaphora.remote import client as client_module
from anaphora.remote.client import EngineClient
from anaphora.remote.watchdog import CHECK_INTERVAL_S, MAX_IDLE_CHECKS, MAX_STEP_S, Watchdog, process_cpu_seconds
from anaphora.types.outputs import StepResult
from tests.support.clients import SLOW, assert_nothing_kept, collect, first_update, request, started, until


class Timer:
    """A ``sleep`` that ends when the test says so; ``count`` is the number of sleeps that have begun."""

    def __init__(self) -> None:
        self.count = 0
        self._sleeping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def sleep(self, seconds: float) -> None:
        assert seconds == CHECK_INTERVAL_S
        self.count += 1
        self._sleeping = asyncio.get_running_loop().create_future()
        await self._sleeping

    def wake(self) -> None:
        """End the sleep that began last."""
        self._sleeping.set_result(None)

    async def until_sleep(self, number: int) -> None:
        """Wait until this many sleeps have begun."""
        while self.count < number:
            await asyncio.sleep(0)

    async def elapse(self, times: int = 1) -> None:
        """End this many sleeps, one after the other, and wait until the next one has begun."""
        for _ in range(times):
            await self.until_sleep(1)
            number = self.count
            self.wake()
            await self.until_sleep(number + 1)


@pytest.fixture
async def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    """The clock of every watchdog that a client starts."""
    timer = Timer()
    monkeypatch.setattr(client_module, "Watchdog", partial(Watchdog, sleep=timer.sleep))
    return timer


async def ping_answered(client: EngineClient, timer: Timer) -> None:
    await timer.until_sleep(1)
    sent, sleeps = client._sent, timer.count
    timer.wake()
    await timer.until_sleep(sleeps + 2)  # first while it waits for the answer, then until the next ping
    assert client._sent == sent + 1


async def suspend(process: psutil.Process) -> None:
    process.suspend()
    await until(lambda: process.status() == psutil.STATUS_STOPPED)


@pytest.mark.usefixtures("engine_surroundings")
async def test_a_stopped_engine_is_noticed_and_used_again_once_it_answers(
    timer: Timer, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(SLOW) as client:
        engine = psutil.Process(client.pid)
        running = await first_update(client, request("long", max_tokens=60))
        await ping_answered(client, timer)
        await suspend(engine)
        try:
            await timer.elapse(1 + MAX_IDLE_CHECKS - 1)
            assert client.hung is None
            await timer.elapse()
            assert "neither answered nor computed for 30 s" in (client.hung or "")
            with pytest.raises(EngineDead, match="hangs"):
                await collect(client, request("new"))
            with pytest.raises(EngineDead, match="hangs"):
                await client.reset_prefix_cache()
        finally:
            engine.resume()
        await until(lambda: client.hung is None)
        assert sum(len(update.token_ids) for update in await running) == 60
        assert len(await collect(client, request("new"))) == 5
        await client.check()
    await assert_nothing_kept(client)
    said = [record.getMessage() for record in caplog.records if record.name == "anaphora.remote.watchdog"]
    assert [("hangs" in line, "works again" in line) for line in said] == [(True, False), (False, True)]


@pytest.mark.usefixtures("engine_surroundings")
async def test_pings_do_not_make_an_idle_engine_check_its_cache(timer: Timer) -> None:
    async with started() as client:
        reports: list[StepResult] = []
        client.on_step.append(reports.append)
        await collect(client, request("one"))
        await until(lambda: not reports[-1].updates)  # the last report before it is idle
        seen = len(reports)
        for _ in range(4):
            await ping_answered(client, timer)
        assert len(reports) == seen
        engine = psutil.Process(client.pid)
        await suspend(engine)
        try:
            await timer.elapse(1 + MAX_IDLE_CHECKS)
            assert client.hung is not None
        finally:
            engine.resume()


class Watched:
    """A watchdog over a process that exists only as its CPU time, and that never answers unless told to."""

    def __init__(self) -> None:
        self.timer = Timer()
        self.cpu_seconds = 0.0
        self.answer = asyncio.get_running_loop().create_future()
        self.dog = Watchdog(4711, lambda: self.answer, cpu_seconds=self.measure, sleep=self.timer.sleep)
        self.task = asyncio.create_task(self.dog.run())

    def measure(self) -> float:
        if self.cpu_seconds < 0:
            raise psutil.NoSuchProcess(4711)
        return self.cpu_seconds

    async def check(self, times: int, computed: float = 0.0) -> None:
        """Let checks pass, between which the process computes for so many seconds."""
        for _ in range(times):
            self.cpu_seconds += computed
            await self.timer.elapse()


async def test_a_long_step_that_computes_is_not_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    await watched.check(60, computed=1.0)
    assert watched.dog.fault is None
    await watched.check(MAX_IDLE_CHECKS - 1)
    assert watched.dog.fault is None
    await watched.check(1)
    assert "neither answered nor computed" in str(watched.dog.fault)
    assert "4711" in caplog.text
    await watched.check(1, computed=1.0)
    assert watched.dog.fault is None  # it computes again, though it has not answered yet
    await watched.check(2)
    await watched.check(1, computed=-0.5)  # a child has ended, and its time with it
    await watched.check(2)
    assert watched.dog.fault is None
    sleeps = watched.timer.count
    watched.answer.set_result(None)
    await watched.timer.until_sleep(sleeps + 1)
    watched.cpu_seconds = -1
    watched.timer.wake()
    await watched.task  # ends with the process


async def test_a_step_without_end_is_a_fault() -> None:
    watched = Watched()
    steps = int(MAX_STEP_S / CHECK_INTERVAL_S)
    await watched.check(1 + steps, computed=CHECK_INTERVAL_S)
    assert watched.dog.fault is None
    await watched.check(1, computed=CHECK_INTERVAL_S)
    assert "in one step for 1810 s" in str(watched.dog.fault)
    watched.task.cancel()
    await asyncio.gather(watched.task, return_exceptions=True)


SPIN = "while True: pass"
WAIT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


@pytest.mark.parametrize("code", [SPIN, WAIT], ids=["itself", "in a child"])
async def test_the_cpu_time_of_a_process_contains_that_of_its_children(code: str) -> None:
    busy = subprocess.Popen([sys.executable, "-c", code])
    process = psutil.Process(busy.pid)
    try:
        await until(lambda: code == SPIN or bool(process.children()))
        before = process_cpu_seconds(process)
        await until(lambda: process_cpu_seconds(process) > before + 0.1)
    finally:
        for member in (*process.children(), process):
            member.kill()
        busy.wait()
    with pytest.raises(psutil.NoSuchProcess):
        process_cpu_seconds(process)

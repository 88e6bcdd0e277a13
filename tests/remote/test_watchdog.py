"""A process that hangs is told from one that computes for long."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import psutil
import pytest

from anaphora.errors import EngineDead
from anaphora.remote import watchdog
from anaphora.remote.watchdog import Watchdog
from anaphora.types.outputs import StepResult
from tests.support.clients import assert_nothing_kept, collect, first_update, request, started, until

pytestmark = pytest.mark.usefixtures("engine_surroundings")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.05)
    monkeypatch.setattr(watchdog, "SILENT_LOOKS", 10)


async def test_a_stopped_engine_is_noticed_and_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as client:
        engine = psutil.Process(client.pid)
        running = await first_update(client, request("long", max_tokens=2000))
        assert client.hung is None
        engine.suspend()
        try:
            await until(lambda: client.hung is not None)
            assert "neither answered nor computed" in (client.hung or "")
            with pytest.raises(EngineDead, match="hangs"):
                await collect(client, request("new"))
            with pytest.raises(EngineDead, match="hangs"):
                await client.reset_prefix_cache()
        finally:
            engine.resume()
        await until(lambda: client.hung is None)
        assert sum(len(update.token_ids) for update in await running) == 2000
        assert len(await collect(client, request("new"))) == 5
        await client.check()
    await assert_nothing_kept(client)
    said = [record.getMessage() for record in caplog.records if record.name == "anaphora.remote.watchdog"]
    assert [("hangs" in line, "goes on" in line) for line in said] == [(True, False), (False, True)]


async def test_an_idle_engine_is_watched_and_not_woken_for_its_books() -> None:
    async with started() as client:
        reports: list[StepResult] = []
        client.on_step.append(reports.append)
        await collect(client, request("one"))
        await until(lambda: not reports[-1].updates)  # the last report before it rests
        seen = len(reports)
        before = client._sent
        await until(lambda: client._sent > before + 3)
        assert len(reports) == seen
        psutil.Process(client.pid).suspend()
        await until(lambda: client.hung is not None)


SPIN = "while True: pass"
WAIT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


@pytest.mark.parametrize("code", [SPIN, WAIT], ids=["itself", "in a child"])
async def test_a_long_step_that_computes_is_no_alarm(caplog: pytest.LogCaptureFixture, code: str) -> None:
    busy = subprocess.Popen([sys.executable, "-c", code])
    process = psutil.Process(busy.pid)
    family = [process]
    try:
        dog = Watchdog(process.pid, asyncio.get_running_loop().create_future)
        task = asyncio.create_task(dog.run())
        await until(lambda: watchdog._cpu_seconds(process) > 20 * watchdog.LOOK_S)
        assert dog.complaint is None
        family += process.children()
        for member in family:
            member.suspend()
        await until(lambda: dog.complaint is not None)
        assert str(busy.pid) in caplog.text
        for member in family:
            member.resume()
        await until(lambda: dog.complaint is None)  # it computes again, though it has not answered yet
    finally:
        for member in family:
            member.kill()
        busy.wait()
    await task  # ends with the process


async def test_a_step_without_end_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LONGEST_STEP_S", 0.2)
    monkeypatch.setattr(watchdog, "IDLE_SHARE", 0.0)
    dog = Watchdog(os.getpid(), asyncio.get_running_loop().create_future)
    task = asyncio.create_task(dog.run())
    await until(lambda: dog.complaint is not None)
    assert "in one step" in (dog.complaint or "")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

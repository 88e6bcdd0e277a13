"""How the engine process ends, and what does not end it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from anaphora.errors import CacheInvariantError, EngineDead
from anaphora.remote import child as child_module
from anaphora.remote import client as client_module
from anaphora.remote.client import EngineClient
from anaphora.types.outputs import SequenceUpdate
from tests.support.clients import (
    FAKE,
    LONG,
    SLOW,
    assert_nothing_kept,
    children,
    collect,
    first_update,
    gone,
    request,
    started,
    tokens,
    until,
)

pytestmark = pytest.mark.usefixtures("engine_surroundings")


async def assert_dead(client: EngineClient, reason: str, *running: asyncio.Task[list[SequenceUpdate]]) -> None:
    for task in running:
        with pytest.raises(EngineDead, match=reason):
            await task
    assert client.dead is not None
    for call in (collect(client, request("late")), client.reset_prefix_cache(), client.check()):
        with pytest.raises(EngineDead, match=reason):
            await call
    await client.abort("late")
    await assert_nothing_kept(client)
    await until(lambda: gone(client.pid))


@pytest.mark.parametrize(("kill", "reason"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGTERM, "SIGTERM")])
def test_every_caller_is_told_that_the_engine_was_killed(kill: signal.Signals, reason: str) -> None:
    async def main() -> None:
        async with started(SLOW) as client:
            running = [await first_update(client, request(f"r{i}", LONG)) for i in range(3)]
            os.kill(client.pid, kill)
            await assert_dead(client, reason, *running)

    asyncio.run(main())


def test_an_idle_engine_that_is_killed_is_noticed() -> None:
    async def main(kill: signal.Signals) -> None:
        async with started() as client:
            os.kill(client.pid, kill)
            await until(lambda: client.dead is not None)
            await assert_dead(client, kill.name)

    for kill in (signal.SIGKILL, signal.SIGTERM):
        asyncio.run(main(kill))


def test_an_error_that_ends_the_engine_is_the_reason_given(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with started("tests.support.runners:load_with_failing_step") as client:
            with pytest.raises(EngineDead, match="ZeroDivisionError: no tokens to divide by"):
                await collect(client, request("a"))
            await assert_dead(client, "no tokens to divide by")

    asyncio.run(main())
    assert "Traceback" in capfd.readouterr().err


def test_a_failed_check_is_raised_and_reported_and_not_fatal() -> None:
    async def main() -> None:
        async with started("tests.support.runners:load_with_failing_check") as client:
            with pytest.raises(CacheInvariantError, match="are not 8"):
                await client.check()
            await collect(client, request("a"))
            await until(lambda: client.cache_fault is not None)
            assert client.dead is None
            assert len(tokens(await collect(client, request("b")))) == 5

    asyncio.run(main())


def test_the_engine_ignores_ctrl_c() -> None:
    async def main() -> None:
        async with started(SLOW) as client:
            running = await first_update(client, request("a", 20))
            os.kill(client.pid, signal.SIGINT)
            assert len(tokens(await running)) == 20
            os.kill(client.pid, signal.SIGINT)
            assert len(tokens(await collect(client, request("b")))) == 5

    asyncio.run(main())


def test_the_engine_ends_with_a_parent_that_was_killed() -> None:
    code = """
import asyncio, sys
from anaphora.config import EngineConfig
from anaphora.remote.client import EngineClient
async def main():
    client = await EngineClient.start(EngineConfig(runner=sys.argv[1]))
    print(client.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code, FAKE], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
    asyncio.run(until(lambda: gone(pid)))
    assert not os.listdir(tempfile.gettempdir())


def test_the_engine_ends_when_its_input_does() -> None:
    """Where the kernel sends no signal at the parent's death, only the end of the input tells."""
    start = {"endpoint": f"ipc://{tempfile.gettempdir()}/engine", "config": {"runner": FAKE}}
    with subprocess.Popen([sys.executable, "-m", "anaphora.remote.process"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(json.dumps(start).encode() + b"\n")
        child.stdin.close()
        try:
            assert child.wait(timeout=60) == 1
        finally:
            child.kill()


def test_close_ends_everything_and_may_be_repeated() -> None:
    before = children()

    async def main() -> None:
        async with started(SLOW) as client:
            running = await first_update(client, request("a", LONG))
            await asyncio.gather(client.close(), client.close())
            await client.close()
            await assert_dead(client, "closed", running)

    asyncio.run(main())
    assert children() == before
    assert not os.listdir(tempfile.gettempdir())


def test_an_engine_that_does_not_listen_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SHUTDOWN_S", 0.05)
    monkeypatch.setattr(child_module, "TERMINATE_S", 0.05)

    async def main() -> None:
        async with started() as client:
            os.kill(client.pid, signal.SIGSTOP)
            await client.close()
            assert gone(client.pid)

    asyncio.run(main())

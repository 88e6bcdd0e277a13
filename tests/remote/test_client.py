"""EngineClient and the engine process together, over a FakeRunner."""

import asyncio
import logging
import os
import tempfile
from contextlib import aclosing
from pathlib import Path

import pytest

from anaphora.config import EngineConfig
from anaphora.errors import AnaphoraError, ConfigError, EngineDead, InvalidRequest, ModelError
from anaphora.remote.client import EngineClient
from anaphora.types.outputs import FinishReason, SequenceUpdate, StepResult
from anaphora.types.reports import Prefix
from tests.support.clients import (
    FAKE,
    LONG,
    SLOW,
    assert_nothing_kept,
    children,
    collect,
    first_update,
    request,
    started,
    tokens,
    until,
)

pytestmark = pytest.mark.usefixtures("engine_surroundings")


# --- Start --------------------------------------------------------------------------------------------------------


def test_start_returns_the_engine_s_info_and_leaves_no_file() -> None:
    async def main() -> None:
        async with started() as client:
            assert client.info.max_model_len > 0
            assert client.stats.running == 0
            assert client.dead is None
            assert not os.listdir(tempfile.gettempdir())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("runner", "error", "message"),
    [
        ("tests.support.runners:load_refused", ModelError, "sundial"),
        ("no_such_package:load", ConfigError, "no_such_package"),
        ("tests.support.runners:load_broken", EngineDead, "RuntimeError: the weights are upside down"),
        (
            "tests.support.runners:load_exiting",
            EngineDead,
            "exit code 7 before it was ready(.|\n)*layer 39 of 40\nout of luck",
        ),
    ],
)
def test_an_error_at_start_is_raised(
    runner: str, error: type[AnaphoraError], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = children()
    with pytest.raises(error, match=message) as caught:
        asyncio.run(EngineClient.start(EngineConfig(runner=runner)))
    assert type(caught.value) is error
    assert not os.listdir(tempfile.gettempdir())
    assert children() == before
    out, err = capfd.readouterr()
    assert not out
    assert ("Traceback" in err) == (runner.endswith("load_broken"))
    if issubclass(error, ConfigError):  # the caller reports it, once
        assert not err


def test_a_cancelled_start_leaves_no_process(capfd: pytest.CaptureFixture[str]) -> None:
    before = children()

    async def main() -> None:
        start = asyncio.create_task(EngineClient.start(EngineConfig(runner="tests.support.runners:load_for_ever")))
        await until(lambda: "loading" in capfd.readouterr().err)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    asyncio.run(main())
    assert children() == before
    assert not os.listdir(tempfile.gettempdir())


def test_a_temporary_folder_with_too_long_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.gettempdir(), "long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match=f"{folder}.*set TMPDIR"):
        asyncio.run(EngineClient.start(EngineConfig(runner=FAKE)))


def test_a_file_in_the_working_folder_replaces_no_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with started() as client:
            assert len(tokens(await collect(client, request("a")))) == 5

    asyncio.run(main())


# --- Requests -----------------------------------------------------------------------------------------------------


def test_generate_yields_every_token_of_every_choice() -> None:
    async def main() -> None:
        async with started() as client:
            updates = await collect(client, request("a", max_tokens=6, n=3))
            for choice in range(3):
                assert len(tokens(updates, choice)) == 6
                assert [u for u in updates if u.choice == choice][-1].finish_reason is FinishReason.LENGTH
            assert any(u.prompt is not None for u in updates)
            await assert_nothing_kept(client)

    asyncio.run(main())


def test_many_requests_at_once_get_the_answers_that_each_gets_alone() -> None:
    async def main() -> None:
        async with started() as client:
            wanted = [request(f"r{i}", max_tokens=1 + i % 7, prompt=tuple(range(1, 3 + i))) for i in range(64)]
            together = await asyncio.gather(*(collect(client, r) for r in wanted))
            assert [len(tokens(u)) for u in together] == [r.sampling.max_tokens for r in wanted]
            for index in (0, 13, 63):
                assert tokens(await collect(client, wanted[index])) == tokens(together[index])
            await client.check()
            await assert_nothing_kept(client)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["break", "cancel", "abort"])
def test_leaving_early_frees_the_request(how: str) -> None:
    async def main() -> None:
        async with started(SLOW) as client:
            if how == "break":
                async with aclosing(client.generate(request("a", LONG, n=2))) as updates:
                    async for _ in updates:
                        break
            else:
                task = await first_update(client, request("a", LONG, n=2))
                if how == "cancel":
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                else:
                    await client.abort("a")
                    last = (await task)[-2:]
                    assert [(u.choice, u.finish_reason) for u in last] == [(0, "abort"), (1, "abort")]
            await assert_nothing_kept(client)
            await until(lambda: client.stats.running == 0)
            await until(client.reset_prefix_cache)
            await client.check()

    asyncio.run(main())


def test_a_running_id_is_refused_and_free_again_after_its_request_was_left() -> None:
    async def main() -> None:
        async with started(SLOW) as client:
            alone = tokens(await collect(client, request("a", 20)))
            running = await first_update(client, request("a", LONG))
            with pytest.raises(InvalidRequest, match="'a'") as caught:
                await collect(client, request("a"))
            assert caught.value.param == "request_id"
            running.cancel()
            await asyncio.wait([running])
            # The engine may be in a step of the first request; the second must not get its tokens.
            for _ in range(5):
                (await first_update(client, request("a", LONG, prompt=(9, 8, 7)))).cancel()
                await asyncio.sleep(0)
                assert tokens(await collect(client, request("a", 20))) == alone

    asyncio.run(main())


def test_abort_of_an_unknown_request_does_nothing() -> None:
    async def main() -> None:
        async with started() as client:
            await client.abort("nobody")
            await client.finish_choice("nobody", 0)
            assert len(tokens(await collect(client, request("a")))) == 5

    asyncio.run(main())


def test_a_finished_choice_gets_no_more_updates_and_the_others_continue() -> None:
    async def main() -> None:
        async with started(SLOW) as client:
            seen: list[SequenceUpdate] = []
            async for update in client.generate(request("a", 30, n=2)):
                seen.append(update)
                if len(tokens(seen, 1)) == 3:
                    await client.finish_choice("a", 1)
            assert len(tokens(seen, 0)) == 30
            assert len(tokens(seen, 1)) == 3
            await until(lambda: client.stats.running == 0)
            await client.check()

    asyncio.run(main())


def test_a_request_ends_when_its_last_choice_is_finished_by_another_task() -> None:
    async def main() -> None:
        async with started(SLOW) as client:
            task = await first_update(client, request("a", LONG))
            await client.finish_choice("a", 0)
            assert all(u.finish_reason is None for u in await task)
            await until(lambda: client.stats.running == 0)
            await assert_nothing_kept(client)

    asyncio.run(main())


@pytest.mark.parametrize(
    "prompt", [(1,) * 10**5, (2**70,), ("two",), (1.5,)], ids=["too long", "beyond 64 bits", "text", "fraction"]
)
def test_a_refused_request_does_not_affect_others(prompt: tuple[int, ...]) -> None:
    async def main() -> None:
        async with started(SLOW) as client:
            other = await first_update(client, request("other", 20))
            with pytest.raises(InvalidRequest):
                await collect(client, request("a", prompt=prompt))
            assert len(tokens(await other)) == 20
            assert len(tokens(await collect(client, request("a")))) == 5
            await client.check()
            await assert_nothing_kept(client)

    asyncio.run(main())


def test_a_slow_reader_does_not_block_others() -> None:
    async def main() -> None:
        async with started() as client:
            slow = client.generate(request("slow", 50))
            await anext(slow)
            for i in range(3):
                assert len(tokens(await collect(client, request(f"r{i}", 50)))) == 50
            assert len(tokens([u async for u in slow])) == 49

    asyncio.run(main())


def test_an_unreadable_message_is_refused_and_the_engine_continues(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with started() as client:
            client._socket.send(b"cposix\nsystem\n(S'exit 1'\ntR.")
            client._sent += 1
            assert len(tokens(await collect(client, request("a")))) == 5
            await client.check()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "refused message 1" in caplog.text


def test_on_step_is_called_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    def fail(step: StepResult) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with started() as client:
            steps: list[StepResult] = []
            client.on_step += [fail, steps.append]
            await collect(client, request("a"))
            assert sum(len(step.updates) for step in steps) == 5
            assert client.stats.generation_tokens == 5

    asyncio.run(main())
    assert "ZeroDivisionError" in caplog.text


def test_a_refusal_for_a_cancelled_caller_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with started() as client:
            for leaving in (client.unpin(ids=["pin-nothing"]), client.pin([Prefix((10**6,))])):
                call = asyncio.create_task(leaving)
                await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait((call,))
                assert call.cancelled()
            await client.check()  # answered after the refusals
            await assert_nothing_kept(client)

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

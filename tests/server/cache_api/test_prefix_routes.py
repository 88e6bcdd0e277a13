"""The routes under /v1/cache, over an engine process with a fake runner: warm, pin, unpin, list, and --warm FILE."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from anaphora.errors import ConfigError
from anaphora.server.cache_api import prefix_routes
from anaphora.server.cache_api.prefix_routes import compute
from anaphora.server.cache_api.warm_file import read_warm_file, warm_up
from tests.support.clients import until
from tests.support.servers import EngineServer, engine_server, environment, fake_command, fake_server, scripted

pytestmark = pytest.mark.usefixtures("engine_surroundings")

WINDOW = 1000
BLOCKS = 255 - 63
"""Blocks of 16 tokens that may be pinned: the fake engine's pool minus a request of the full window."""
SYSTEM = "You answer in one word. " * 8
CHAT = "/v1/chat/completions"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EngineServer]:
    async with engine_server(tmp_path / "model", WINDOW) as server:
        yield server


async def post(server: EngineServer, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await server.client.post(path, json=body)
    assert response.status_code == status, response.text
    if status == 200:
        return response.json()
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


async def listed(server: EngineServer, salt: str | None = None, **params: Any) -> dict[str, Any]:
    headers = {b"x-cache-salt": salt.encode()} if salt else {}
    response = await server.client.get("/v1/cache/prefixes", params=params, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def chat(question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [*system(), {"role": "user", "content": question}], "max_tokens": 4} | fields


def system() -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}]


async def cached(server: EngineServer, question: str, **fields: Any) -> int:
    usage = (await post(server, CHAT, **chat(question, **fields)))["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def flood(server: EngineServer) -> None:
    """Sends other prompts until everything that may be evicted is."""
    await asyncio.gather(
        *(post(server, "/v1/completions", prompt=f"{i} " * 200, max_tokens=1) for i in range(100, 112))
    )


async def test_a_pinned_system_text_is_reused_by_every_conversation_despite_other_traffic(server: EngineServer) -> None:
    (pin,) = (await post(server, "/v1/cache/pin", messages=system(), model="tiny"))["data"]
    rendered = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    assert pin["tokens"] == pin["kept_tokens"] == len(rendered)
    assert pin["new"]
    await flood(server)
    for question in ("Why?", "How?"):
        assert await cached(server, question) == len(rendered)
    (again,) = (await post(server, "/v1/cache/pin", messages=system()))["data"]
    assert again == pin | {"new": False}
    assert server.engine.stats.pinned_blocks == -(-len(rendered) // 16)
    assert "anaphora:kv_blocks_pinned" in (await server.client.get("/metrics")).text
    await post(server, "/v1/cache/unpin", messages=system())
    assert server.engine.stats.pinned_blocks == 0
    await flood(server)
    assert await cached(server, "Why?") == 0


async def test_warming_computes_and_pins_nothing(server: EngineServer) -> None:
    body = {"prompt": ["a" * 40, "a" * 40 + "b" * 20]}
    answer = await post(server, "/v1/cache/warm", **body)
    assert [entry["tokens"] for entry in answer["data"]] == [40, 60]
    assert answer["usage"]["completion_tokens"] == 0
    answer = await post(server, "/v1/cache/warm", **body)
    assert [entry["cached_tokens"] for entry in answer["data"]] == [39, 59]
    assert server.engine.stats.pinned_blocks == 0


async def test_a_pinned_request_is_found_when_it_is_sent(server: EngineServer) -> None:
    body = chat("Why?", temperature=0.5, stream=True, user="u", response_format=None)
    (pin,) = (await post(server, "/v1/cache/pin", **body))["data"]
    assert await cached(server, "Why?") == pin["tokens"] - 1
    (gone,) = (await post(server, "/v1/cache/unpin", id=pin["id"]))["data"]
    assert gone["id"] == pin["id"]


async def test_pins_stay_through_a_reset_and_fill_again(server: EngineServer) -> None:
    (pin,) = (await post(server, "/v1/cache/pin", messages=system()))["data"]
    assert (await post(server, "/reset_prefix_cache"))["reset"]
    (now,) = (await listed(server))["pins"]
    assert (now["id"], now["kept_tokens"]) == (pin["id"], 0)
    assert await cached(server, "Why?") == 0
    await flood(server)
    assert await cached(server, "How?") == pin["tokens"]


async def test_pinning_too_much_is_refused_with_numbers(server: EngineServer) -> None:
    most = [f"{i:03}" + "x" * 749 for i in range(BLOCKS // 47)]
    assert len((await post(server, "/v1/cache/pin", prompt=most))["data"]) == 4
    error = await post(server, "/v1/cache/pin", 400, prompt="y" * 752)
    assert "188 of the cache's 255 blocks of 16 tokens are pinned, this needs 47 more, and 63 must" in error["message"]
    assert f"at most {BLOCKS} may be pinned" in error["message"]
    assert len((await listed(server))["pins"]) == 4
    answer = await post(server, "/v1/completions", prompt="z" * (WINDOW - 10), max_tokens=10, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 10


async def test_the_list_is_sorted_by_savings_and_stays_within_the_callers_salt(server: EngineServer) -> None:
    before = time.time()
    for i in range(5):
        await cached(server, f"{i}?")
    for i in range(3):
        await cached(server, f"{i}?", cache_salt="mine")
    await post(server, "/v1/cache/pin", prompt="short", cache_salt="mine")
    everybody, mine = await listed(server), await listed(server, "mine", limit=1)
    (row,) = everybody["data"]
    assert row["hits"] == 4
    assert row["tokens_saved"] == 4 * row["tokens"]
    assert row["tokens"] % 16 == 0
    assert row["text_start"].startswith("<|im_start|>system\nYou answer")
    assert before <= row["last_used"] <= time.time()
    assert not row["pinned"]
    assert everybody["pins"] == []
    assert everybody["max_pinned_blocks"] == BLOCKS
    (row,) = mine["data"]
    assert row["hits"] == 2
    (pin,) = mine["pins"]
    assert (pin["text_start"], pin["tokens"]) == ("short", 5)
    assert (await listed(server, "nobody"))["total"] == 0
    await post(server, "/v1/cache/pin", prompt="long", cache_salt="Grüße")
    assert len((await listed(server, "Grüße"))["pins"]) == 1
    assert "short" not in str(everybody)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=", "limit"),
        ("lmit=2", "lmit"),
        ("cache_salt=a", "cache_salt"),
    ],
)
async def test_a_wrong_query_parameter_is_refused_by_name(tmp_path: Path, query: str, param: str) -> None:
    async with scripted(tmp_path / "model") as server:  # refused before the engine is asked
        response = await server.client.get(f"/v1/cache/prefixes?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        response = await server.client.get("/v1/cache/prefixes", headers={"x-cache-salt": "s" * 257})
        assert response.status_code == 400


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"prompt": "a", "messages": []}, None),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": [1000]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": "a" * WINDOW}, "prompt"),
    ({"messages": []}, "messages"),
    ({"messages": "a"}, "messages"),
    ({"prompt": "a", "cache_slat": "x"}, "cache_slat"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
]


@pytest.mark.parametrize("route", ["pin", "warm", "unpin"])
async def test_wrong_bodies_are_refused_and_nothing_is_pinned(server: EngineServer, route: str) -> None:
    for body, param in BAD:
        error = await post(server, f"/v1/cache/{route}", 400, **body)
        assert error["param"] == param, (body, error)
    await post(server, f"/v1/cache/{route}", 404, prompt="a", model="other")
    assert (await listed(server))["pins"] == []
    assert await cached(server, "Why?") == 0


async def test_what_is_not_pinned_cannot_be_unpinned(server: EngineServer) -> None:
    await post(server, "/v1/cache/pin", prompt="a")
    for body in ({"prompt": "b"}, {"prompt": ["a", "b"]}, {"prompt": "a", "cache_salt": "s"}, {"id": "pin-1"}):
        await post(server, "/v1/cache/unpin", 404, **body)
    for body in ({"id": ""}, {"id": []}, {"id": 5}, {"id": "pin-1", "ids": 1}):
        await post(server, "/v1/cache/unpin", 400, **body)
    assert len((await listed(server))["pins"]) == 1


async def test_api_keys_guard_the_routes(tmp_path: Path) -> None:
    async with engine_server(tmp_path / "model", WINDOW, api_key=("key",)) as server:
        for path in ("pin", "unpin", "warm"):
            await post(server, f"/v1/cache/{path}", 401, prompt="a")
        for path in ("/v1/chat/completions/render", "/v1/completions/render"):
            await post(server, path, 401, prompt="a")
        assert (await server.client.get("/v1/cache/prefixes")).status_code == 401


async def test_a_disconnect_while_computing_removes_the_new_pins(tmp_path: Path) -> None:
    async with engine_server(tmp_path / "model", WINDOW, "tests.support.runners:load_slow") as server:
        (kept,) = (await post(server, "/v1/cache/pin", prompt="102 " * 240))["data"]
        body = {"prompt": [f"{i} " * 240 for i in range(100, 103)]}
        leaving = asyncio.create_task(post(server, "/v1/cache/pin", **body))
        await until(lambda: bool(server.engine._streams))
        assert len((await listed(server))["pins"]) == 3
        leaving.cancel()
        (end,) = await asyncio.gather(leaving, return_exceptions=True)
        assert isinstance(end, BaseException)
        assert [pin["id"] for pin in (await listed(server))["pins"]] == [kept["id"]]
        assert not server.engine._streams


async def test_a_disconnect_keeps_what_another_request_has_pinned(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing = asyncio.Event()

    async def compute_two_for_ever(service: Any, context: Any, requests: Any) -> Any:
        if len(requests) == 2:
            computing.set()
            await asyncio.Event().wait()
        return await compute(service, context, requests)

    monkeypatch.setattr(prefix_routes, "compute", compute_two_for_ever)
    leaving = asyncio.create_task(post(server, "/v1/cache/pin", prompt=["ours", "theirs"]))
    await computing.wait()
    (ours,) = (await post(server, "/v1/cache/pin", prompt="ours"))["data"]
    assert (ours["kept_tokens"], ours["new"]) == (4, False)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert [pin["id"] for pin in (await listed(server))["pins"]] == [ours["id"]]
    await post(server, "/v1/cache/unpin", id=ours["id"])
    assert not server.service.completed_pins


STAGES = ["before pinning", "pinning", "pinned", "computing", "pinning again", "pinned again"]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_disconnect_at_any_point_before_the_answer_leaves_no_pin(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The client leaves at each point at which the server waits for the engine."""
    gone = asyncio.Event()
    stages = iter(STAGES[1:])
    pin, compute_requests = server.engine.pin, prefix_routes.compute

    async def reach(name: str) -> None:
        if name == stage:
            gone.set()
            for _ in range(20):  # turns of the loop in which the server learns of it and cancels its work
                await asyncio.sleep(0)

    async def pin_in_stages(prefixes: Any) -> Any:
        pinning = asyncio.ensure_future(pin(prefixes))
        await asyncio.sleep(0)  # the message is sent
        await reach(next(stages))
        report = await pinning
        await reach(next(stages))
        return report

    async def compute_in_stages(*args: Any) -> Any:
        await reach(next(stages))
        return await compute_requests(*args)

    monkeypatch.setattr(server.engine, "pin", pin_in_stages)
    monkeypatch.setattr(prefix_routes, "compute", compute_in_stages)
    sent = await leave(server, {"prompt": ["left", "behind " * 50]}, gone, at_once=stage == STAGES[0])
    assert sent == []
    assert (await listed(server))["pins"] == []
    assert not server.engine._streams


async def leave(server: EngineServer, body: dict[str, Any], gone: asyncio.Event, at_once: bool) -> list[dict[str, Any]]:
    """Sends a body to /v1/cache/pin and disconnects when ``gone`` is set; returns the server's messages."""
    sent: list[dict[str, Any]] = []
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is not None:
            if at_once:
                gone.set()
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/v1/cache/pin"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await server.app(scope | {"root_path": "", "headers": []}, receive, send)
    return sent


async def test_pins_stay_after_the_answer(server: EngineServer) -> None:
    gone = asyncio.Event()
    sent = await leave(server, {"prompt": "kept"}, gone, at_once=False)
    gone.set()
    assert sent[0]["status"] == 200
    assert len((await listed(server))["pins"]) == 1


# --- --warm FILE ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("You are a poet.\nWrite.\n", 1),
        ('\ufeff{"prompt": "a"}\r\n', 1),
        ('"You are a poet."', 1),
        ('{"prompt": "a"}\n\n{"messages": [{"role": "system", "content": "b"}]}\n"c"\n', 3),
        ('[{"prompt": "a"},\n "b"]', 2),
        ('{\n  "prompt": "a"\n}', 1),
    ],
)
async def test_the_formats_of_a_warm_file(server: EngineServer, tmp_path: Path, text: str, entries: int) -> None:
    path = tmp_path / "prefixes"
    path.write_text(text, "utf-8")
    found = read_warm_file(str(path))
    assert len(found) == entries
    await warm_up(server.service, found)
    pins = (await listed(server))["pins"]
    assert len(pins) == entries
    assert all(pin["kept_tokens"] == pin["tokens"] for pin in pins)
    assert not any(pin["text_start"].endswith("\n") for pin in pins if pin["text_start"].startswith("You"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  \n", "is empty"),
        ("[]", "is empty"),
        ('{"prompt": "a"}\n{"prompt": }\n', "line 2: not valid JSON"),
        ('{"prompt": "a"}\n{"promt": "b"}\n', "line 2: the body must hold one of messages, prompt"),
        ('[{"prompt": "a"}, 7]', "entry 2: the body must be a JSON object"),
        ('{"prompt": "a", "cache_slat": "s"}', "cache_slat"),
        ('"a"\n"\\ud83d"', "line 2: not a request body: .*surrogates"),
        # From Python 3.13 on the parser itself goes this deep.
        (
            '"a"\n' + "[" * 9000 + "]" * 9000,
            "line 2: (not valid JSON: maximum recursion|the body must be a JSON object)",
        ),
        ("[" * 100_000, "line 1: not valid JSON: maximum recursion depth"),
    ],
)
def test_a_warm_file_that_cannot_be_read_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prefixes"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message):
        read_warm_file(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_warm_file(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot read"):
        read_warm_file("a\0b")


async def test_a_prefix_that_cannot_be_pinned_is_named_with_its_line(server: EngineServer, tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    for bad, message in (
        ('{"prompt": "' + "x" * WINDOW + '"}', "line 2: This model's maximum context length"),
        ('{"prompt": "a", "model": "other"}', "line 2: the model 'other' does not exist"),
        ('{"prompt": ""}', "line 2: the prompt is empty"),
    ):
        path.write_text('{"prompt": "a"}\n' + bad, "utf-8")
        with pytest.raises(ConfigError, match=message):
            await warm_up(server.service, read_warm_file(str(path)))


def test_a_server_pins_the_warm_file_before_it_serves_and_warns_of_what_breaks_reuse(tmp_path: Path) -> None:
    """The whole start: --warm, the template of the model, the order of the lines in the log."""
    path = tmp_path / "prefixes.jsonl"
    path.write_text(json.dumps({"messages": system()}) + "\n" + json.dumps({"prompt": "short"}) + "\n")
    with fake_server(tmp_path / "model", warm=str(path), max_model_len=WINDOW) as running:
        answer = httpx.post(running.url + CHAT, json=chat("Why?"))
        pins = httpx.get(running.url + "/v1/cache/prefixes").json()["pins"]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == pins[0]["tokens"]
    log = "".join(running.log)
    assert log.index("warmed and pinned 2 prefixes") < log.index(" at http://")
    assert "line 2: --block-size: a block of 16 tokens is larger than the 5 tokens that prompts share" in log
    assert "check of the resting engine failed" not in log


def test_a_start_that_cannot_pin_the_warm_file_ends_naming_the_line(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.jsonl"
    path.write_text(json.dumps({"prompt": "x" * WINDOW}) + "\n")
    command = fake_command(tmp_path / "model", warm=str(path), max_model_len=WINDOW)
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode != 0
    assert f"--warm {path}: This model's maximum context length is 1000 tokens" in done.stderr
    assert " at http://" not in done.stderr

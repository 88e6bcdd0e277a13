"""Body limits and disconnects, at the level of ASGI messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.middleware.errors import ServerErrorMiddleware

from tests.support.servers import ScriptedServer, scripted

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(tmp_path: Path, chunked: bool) -> None:
    async with scripted(tmp_path, max_body_bytes=1000) as server:
        content = json.dumps({"prompt": "x" * 1000}).encode()

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 100):
                yield content[start : start + 100]

        response = await server.client.post("/v1/completions", content=parts() if chunked else content)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
        assert (await server.client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "root_path": "",
    "headers": [],
}


async def leave(server: ScriptedServer, body: dict[str, Any], after_chunks: int | None) -> list[dict[str, Any]]:
    """Sends a request and disconnects: after some chunks of the answer, or once the engine runs it."""
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if after_chunks is not None and len(sent) > after_chunks:
            gone.set()
            await asyncio.sleep(0)

    call = asyncio.ensure_future(server.app(SCOPE, receive, send))  # type: ignore[arg-type]
    if after_chunks is None:
        while not server.engine.running:
            await asyncio.sleep(0)
        gone.set()
    await asyncio.wait_for(call, 5)
    return sent


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_disconnect_while_waiting_aborts_the_request(server: ScriptedServer, streamed: bool) -> None:
    server.engine.hold = asyncio.Event()  # never set: the request would wait for ever
    for _ in range(20):
        await leave(server, {"prompt": "x", "stream": streamed}, None)
    assert len(server.engine.aborted) == 20
    assert not server.engine.running
    assert server.service.in_flight == 0


async def test_a_disconnect_from_a_stream_aborts_the_request(tmp_path: Path) -> None:
    async with scripted(tmp_path, "a" * 400) as server:
        sent = await leave(server, {"prompt": ["x", "y"], "stream": True, "max_tokens": 400}, 5)
        assert len(sent) < 50
        assert len(server.engine.aborted) == 2
        assert not server.engine.running


async def test_chunks_bypass_the_middleware(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    build = ServerErrorMiddleware.__call__

    async def counting(self: Any, scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            passed.append(message["type"])
            await send(message)

        await build(self, scope, receive, noted)

    monkeypatch.setattr(ServerErrorMiddleware, "__call__", counting)
    headers = {"X-Request-Id": "mine"}
    answer = await server.client.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=headers)
    assert answer.text.count("data: ") > 10
    assert answer.headers["x-request-id"] == "mine"
    assert passed == ["http.response.start"]

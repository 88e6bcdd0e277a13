"""The pass-through between real sockets: nothing changed, nothing delayed, everything recorded."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from anaphora.config import parse_server_url
from anaphora.observe.record import RecordWriter, RequestRecord, read, salt_digest
from anaphora.tools.record import proxy as proxy_module
from anaphora.tools.record.proxy import Proxy, Upstream

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hé"}]}


@dataclass
class Setup:
    proxy: Proxy
    port: int
    out: Path
    listener: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def records(self) -> list[RequestRecord]:
        self.proxy.writer.close()
        return list(read(self.out))


@contextlib.asynccontextmanager
async def recording(
    script: Script | None, out: Path, *, ask_usage: bool = False, keep_prompts: bool = True, path: str = ""
) -> AsyncIterator[Setup]:
    """The proxy in front of a server that runs ``script`` on each connection; None: nothing listens there."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert script is not None
        try:
            await script(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if script is None:
        server.close()
    writer = RecordWriter(out)
    upstream = Upstream.parse(parse_server_url(f"http://127.0.0.1:{port}{path}"))
    proxy = Proxy(upstream, writer, keep_prompts=keep_prompts, ask_usage=ask_usage)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    try:
        yield Setup(proxy, listener.sockets[0].getsockname()[1], out, listener.sockets[0])
    finally:
        listener.close()
        await asyncio.wait_for(proxy.shut_down(), 20)
        server.close()
        writer.close()


def request(path: str = "/v1/chat/completions", body: bytes = b"", *fields: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "hOsT: proxy:1", *fields]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def sse(*events: Any) -> list[bytes]:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    parts = [f"data: {text}\n\n".encode() for text in texts]
    return [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def replying(reply: bytes, seen: bytearray, length: int) -> Script:
    """Reads ``length`` bytes, sends ``reply`` and closes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readexactly(length))
        writer.write(reply)
        await writer.drain()

    return script


async def through(setup: Setup, data: bytes) -> bytes:
    """What comes back until the connection's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
    writer.write(data)
    await writer.drain()
    got = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return got


def readdressed(setup: Setup, data: bytes) -> bytes:
    return data.replace(b"hOsT: proxy:1", b"hOsT: " + setup.proxy.upstream.netloc)


BIG = bytes(range(256)) * 4096


@pytest.mark.parametrize(
    ("sent", "reply"),
    [
        (request(body=json.dumps(CHAT).encode()), answer(json.dumps({"usage": USAGE}).encode())),
        (request("/any/path?q=%20&x=1", method="GET"), answer(b"{}", "X-Odd:value", "x-odd: again")),
        (request("/v1/models", method="HEAD"), b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"),
        (request("*", method="OPTIONS"), b"HTTP/1.1 204 No Content\r\nAllow: GET\r\n\r\n"),
        (
            request("/x", b"", "Connection: keep-alive, X-Hop", "X-Hop: 1", "TE: trailers", "Upgrade: h2c"),
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nProxy-Authenticate: x\r\n\r\nuntil the end",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nhOsT: proxy:1\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2;a=b\r\n{}\r\n0\r\nT: 1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: T\r\n\r\n3 ;q\r\nabc\r\n0\r\nT: 2\r\n\r\n",
        ),
        (request("/upload", BIG), answer(BIG)),
        (
            request(body=gzip.compress(json.dumps(CHAT).encode())),
            answer(gzip.compress(BIG), "Content-Encoding: gzip"),
        ),
        (b"GET / HTTP/1.0\n\n", b"HTTP/1.0 200 OK\n\nold"),
        (b"\x00no http\r\n\r\n", b"\x01neither"),
    ],
)
async def test_bytes_pass_unchanged_both_ways(sent: bytes, reply: bytes, tmp_path: Path) -> None:
    seen = bytearray()
    length = len(sent)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readexactly(length))
        writer.write(reply)
        await writer.drain()

    async with recording(script, tmp_path / "log") as setup:
        length = len(readdressed(setup, sent))
        assert await through(setup, sent) == reply
        assert bytes(seen) == readdressed(setup, sent)


async def test_a_path_of_the_server_goes_before_that_of_the_request(tmp_path: Path) -> None:
    seen = bytearray()
    sent = request("/v1/models", method="GET")

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(b"{}"))

    async with recording(script, tmp_path / "log", path="/team-a/") as setup:
        await through(setup, sent)
    assert seen.startswith(b"GET /team-a/v1/models HTTP/1.1\r\n")


async def test_events_are_sent_on_as_they_come_and_give_usage_and_times(tmp_path: Path) -> None:
    go = asyncio.Event()
    role = {"id": "chatcmpl-7", "choices": [{"delta": {"role": "assistant", "content": ""}}]}
    first = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}], "usage": None}
    stop = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    events = sse(role, first, stop, {"choices": [], "usage": USAGE}, "[DONE]")

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")
        writer.write(SSE_HEAD + events[0])
        await go.wait()
        go.clear()
        writer.write(events[1][:10])  # an event in two pieces
        await go.wait()
        writer.write(events[1][10:] + b"".join(events[2:]) + LAST)
        await writer.drain()

    body, started = json.dumps({"stream": True, **CHAT}).encode(), time.time()
    async with recording(script, tmp_path / "log") as setup:
        reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
        writer.write(request(body=body))
        assert await reader.readuntil(events[0]) == SSE_HEAD + events[0]
        go.set()
        assert await reader.readexactly(10) == events[1][:10]
        go.set()
        assert await reader.read() == events[1][10:] + b"".join(events[2:]) + LAST
        writer.close()
        (record,) = setup.records()
    assert (record.id, record.model, record.stream) == ("chatcmpl-7", "m", True)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (40, 32, 3)
    assert record.finish == "stop"
    assert record.body == {"stream": True, **CHAT}
    assert record.ttft_s is not None
    assert 0 < record.ttft_s <= record.total_s
    assert started <= record.time <= time.time()


@pytest.mark.parametrize("packed", [False, True])
async def test_an_answer_in_one_piece(packed: bool, tmp_path: Path) -> None:
    told = {"id": "cmpl-1", "choices": [{"finish_reason": "length", "text": "x"}], "usage": {"prompt_tokens": 9}}
    raw = json.dumps(told).encode()
    reply = answer(gzip.compress(raw), "Content-Encoding: gzip") if packed else answer(raw)
    body = json.dumps({"prompt": "p", "n": 2, "cache_salt": "secret"}).encode()
    sent = request("/v1/completions", body)
    async with recording(replying(reply, bytearray(), len(body)), tmp_path / "log") as setup:
        await through(setup, sent)
        (record,) = setup.records()
    assert (record.prompt_tokens, record.cached_tokens, record.finish, record.n) == (9, None, "length", 2)
    assert record.salt == salt_digest("secret")
    assert record.ttft_s is None
    text = (tmp_path / "log").read_text()
    assert "secret" not in text
    assert "cached_tokens" not in text


async def test_without_prompts_no_text_is_written(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "prompt": "private"}).encode()
    reply = answer(json.dumps({"usage": USAGE}).encode())
    script = replying(reply, bytearray(), len(body))
    async with recording(script, tmp_path / "log", keep_prompts=False) as setup:
        await through(setup, request("/v1/completions", body))
        (record,) = setup.records()
    assert record.body is None
    assert record.model == "m"
    assert "private" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("told", "numbers"),
    [
        ({"usage": {"input_tokens": 5, "cache_read_input_tokens": 20, "output_tokens": 2}}, (25, 20, 2)),
        ({"meta_info": {"prompt_tokens": 8, "cached_tokens": 0, "completion_tokens": 1}}, (8, 0, 1)),
        ({"usage": {"prompt_tokens": 8}, "timings": {"cache_n": 6, "prompt_ms": 250.0}}, (8, 6, 0)),
        ({"usage": {"prompt_tokens": 8, "prompt_tokens_details": None}}, (8, None, 0)),
        ({"usage": {"prompt_tokens": True}, "timings": {"cache_n": True}, "id": 5}, (0, None, 0)),
        ({"usage": "none"}, (0, None, 0)),
        ([1], (0, None, 0)),
    ],
)
async def test_usage_of_other_servers(told: Any, numbers: tuple[Any, ...], tmp_path: Path) -> None:
    script = replying(answer(json.dumps(told).encode()), bytearray(), 2)
    async with recording(script, tmp_path / "log") as setup:
        await through(setup, request("/v1/messages", b"{}"))
        (record,) = setup.records()
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == numbers


async def test_anthropic_streams_tell_usage_twice(tmp_path: Path) -> None:
    start = {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 7, "output_tokens": 1}}}
    delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 12}}
    piece = {"type": "content_block_delta", "delta": {"text": "a"}}
    reply = SSE_HEAD + b"".join(sse(start, piece, delta)) + LAST
    async with recording(replying(reply, bytearray(), 2), tmp_path / "log") as setup:
        await through(setup, request("/v1/messages", b"{}"))
        (record,) = setup.records()
    assert (record.id, record.prompt_tokens, record.output_tokens, record.finish) == ("msg_1", 7, 12, "end_turn")
    assert record.ttft_s is not None


async def test_usage_that_comes_twice_is_put_together(tmp_path: Path) -> None:
    """Some servers tell the prompt with the finish reason, and the cached tokens only in an event behind it."""
    first = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 900, "cached": None}}
    second = {"choices": [], "usage": {"prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": 880}}}
    third = {"choices": [], "usage": None}
    reply = SSE_HEAD + b"".join(sse(first, second, third, "[DONE]")) + LAST
    async with recording(replying(reply, bytearray(), 2), tmp_path / "log") as setup:
        await through(setup, request(body=b"{}"))
        (record,) = setup.records()
    assert (record.prompt_tokens, record.cached_tokens) == (900, 880)


async def test_several_requests_share_a_connection(tmp_path: Path) -> None:
    body = json.dumps(CHAT).encode()
    replies = [answer(json.dumps({"id": f"r{n}", "usage": USAGE}).encode()) for n in range(3)]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            await reader.readuntil(b"}]}")
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + reply)

    async with recording(script, tmp_path / "log") as setup:
        got = await through(setup, request(body=body) * 3)
        assert got == b"".join(b"HTTP/1.1 100 Continue\r\n\r\n" + reply for reply in replies)
        assert [record.id for record in setup.records()] == ["r0", "r1", "r2"]


async def test_only_requests_for_text_are_recorded(tmp_path: Path) -> None:
    for path, method in (("/v1/models", "GET"), ("/tokenize", "POST"), ("/v1/messages/count_tokens", "POST")):
        async with recording(replying(answer(b"{}"), bytearray(), 5), tmp_path / "log") as setup:
            await through(setup, request(path, b"{}", method=method))
            assert setup.records() == []


async def test_a_client_that_leaves_is_felt_by_the_server(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")
        writer.write(SSE_HEAD + sse({"choices": [{"delta": {"content": "a"}}]})[0])
        assert await reader.read() == b""
        left.set()

    async with recording(script, tmp_path / "log") as setup:
        reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
        writer.write(request(body=json.dumps(CHAT).encode()))
        await reader.readuntil(b"content")
        writer.close()
        await asyncio.wait_for(left.wait(), 20)
        await asyncio.wait_for(setup.proxy.shut_down(), 20)
        (record,) = setup.records()
    assert record.finish == "abort"
    assert record.ttft_s is not None


async def test_a_client_that_is_reset_is_felt_too(tmp_path: Path) -> None:
    came, left = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")
        came.set()
        with contextlib.suppress(OSError):
            await reader.read()
        left.set()

    async with recording(script, tmp_path / "log") as setup:
        _, writer = await asyncio.open_connection("127.0.0.1", setup.port)
        writer.write(request(body=json.dumps(CHAT).encode()))
        await writer.drain()
        await asyncio.wait_for(came.wait(), 20)
        writer.transport.abort()
        await asyncio.wait_for(left.wait(), 20)


async def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    async with recording(None, tmp_path / "log") as setup:
        got = await through(setup, request(body=json.dumps(CHAT).encode()))
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 502 ")
        assert json.loads(body)["error"]["code"] == 502
        assert "cannot be reached" in json.loads(body)["error"]["message"]
        (record,) = setup.records()
    assert (record.status, record.finish) == (502, "error")
    assert "cannot be reached" in record.error
    assert record.body == CHAT


async def test_a_client_that_waits_for_leave_gets_the_error_at_once(tmp_path: Path) -> None:
    async with recording(None, tmp_path / "log") as setup:
        reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 502 ")
        writer.close()


async def test_a_server_that_does_not_answer_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, dialled = asyncio.open_connection, asyncio.Event()

    async def hang(host: str, port: int, **more: Any) -> Any:
        if "ssl" in more:
            dialled.set()
            await asyncio.Event().wait()
        return await real(host, port, **more)

    monkeypatch.setattr(asyncio, "open_connection", hang)
    monkeypatch.setattr(proxy_module, "CONNECT_S", 0.001)
    async with recording(None, tmp_path / "log") as setup:
        got = await through(setup, request(body=json.dumps(CHAT).encode()))
        assert dialled.is_set()
        assert got.startswith(b"HTTP/1.1 504 Gateway Timeout\r\n")
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["type"] == "gateway_timeout"
        assert [record.status for record in setup.records()] == [504]


async def test_a_server_that_closes_without_a_word(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")

    async with recording(script, tmp_path / "log") as setup:
        assert (await through(setup, request(body=json.dumps(CHAT).encode()))).startswith(b"HTTP/1.1 502 ")
        assert [record.status for record in setup.records()] == [502]


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\nContent-", b"\0garbage", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_nothing_follows_a_response_that_breaks_off_in_its_head(begun: bytes, tmp_path: Path) -> None:
    body = json.dumps(CHAT).encode()
    async with recording(replying(begun, bytearray(), len(request(body=body))), tmp_path / "log") as setup:
        assert await through(setup, request(body=body)) == begun
        (record,) = setup.records()
    assert (record.status, record.finish) == (0, "error")
    assert "before the end of its answer" in record.error


async def test_an_idle_connection_that_the_server_closes_is_closed_as_it_would_be(tmp_path: Path) -> None:
    """A client that sends on it sees no answer, as without the recorder, and tries again."""
    closing = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")
        writer.write(answer(b"{}"))
        await reader.readuntil(b"}]}")
        closing.set()

    async with recording(script, tmp_path / "log") as setup:
        got = await through(setup, request(body=json.dumps(CHAT).encode()) * 2)
        assert got == answer(b"{}")
        assert [(record.finish, record.status) for record in setup.records()] == [("", 200), ("error", 0)]


@pytest.mark.parametrize("reset", [False, True])
async def test_an_answer_that_breaks_off_breaks_off_here_too(reset: bool, tmp_path: Path) -> None:
    got = asyncio.Event()
    part = SSE_HEAD + sse({"choices": [{"delta": {"content": "a"}}]})[0]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")
        writer.write(part)
        await writer.drain()
        await asyncio.wait_for(got.wait(), 20)  # a reset may overtake what was written before it
        if reset:
            writer.transport.abort()

    async def ask(url: str) -> None:
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as response,
        ):
            async for _ in response.aiter_raw():
                got.set()

    async with recording(script, tmp_path / "log") as setup:
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await ask(setup.url)
        (record,) = setup.records()
    assert record.finish == "error"
    assert "before the end of its answer" in record.error
    assert record.status == 200


async def test_errors_of_the_server_are_recorded(tmp_path: Path) -> None:
    for told, said in (
        ({"error": {"message": "too long", "code": 400}}, "too long"),
        ({"object": "error", "message": "too long"}, "too long"),
        ({"detail": "Not Found"}, "Not Found"),
    ):
        reply = answer(json.dumps(told).encode(), status="400 Bad Request")
        async with recording(replying(reply, bytearray(), 2), tmp_path / said.replace(" ", "")) as setup:
            assert await through(setup, request(body=b"{}")) == reply
            record = setup.records()[-1]
        assert (record.status, record.error, record.finish) == (400, said, "error")


async def test_a_full_disk_costs_records_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    out = tmp_path / "log"
    out.symlink_to("/dev/full")
    reply = answer(json.dumps({"usage": USAGE}).encode())
    async with recording(replying(reply, bytearray(), 2), out) as setup:
        assert await through(setup, request(body=b"{}")) == reply
        assert await through(setup, request(body=b"{}")) == reply
        setup.proxy.writer.close()
        assert setup.proxy.writer.dropped == 2
    assert "No space left" in caplog.text


async def test_a_fault_in_the_books_does_not_touch_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "anaphora.record")
    monkeypatch.setattr("anaphora.tools.record.exchange.Exchange.response_head", lambda *_: 1 / 0)
    reply = answer(b"{}")
    async with recording(replying(reply, bytearray(), 2), tmp_path / "log") as setup:
        assert await through(setup, request(body=b"{}")) == reply
        assert setup.proxy.unrecorded == 1
    assert "could not be read" in caplog.text


async def test_a_fault_in_the_books_does_not_touch_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("anaphora.tools.record.exchange.Exchange.request_body", lambda *_: 1 / 0)
    seen, reply = bytearray(), answer(b"{}")
    sent = request(body=b"{}")

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readuntil(b"{}"))
        writer.write(reply)

    async with recording(script, tmp_path / "log") as setup:
        assert await through(setup, sent) == reply
        assert bytes(seen) == readdressed(setup, sent)
        assert setup.proxy.unrecorded == 1
    assert "could not be read" in caplog.text


@pytest.mark.parametrize("ask_usage", [False, True])
async def test_a_length_that_no_body_has_is_left_to_the_server(ask_usage: bool, tmp_path: Path) -> None:
    seen, reply = bytearray(), answer(b"", status="400 Bad Request")
    sent = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {'9' * 5000}\r\n\r\n{{}}".encode()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readuntil(b"{}"))
        writer.write(reply)

    async with recording(script, tmp_path / "log", ask_usage=ask_usage) as setup:
        assert await through(setup, sent) == reply
        assert bytes(seen) == sent.replace(b"Host: a", b"Host: 127.0.0.1:%d" % setup.proxy.upstream.port)


async def test_an_upgrade_is_passed_on(tmp_path: Path) -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(switch + b"\x81\x02hi")
        assert await reader.readexactly(4) == b"\x81\x82yo"
        writer.write(b"\x88\x00")

    async with recording(script, tmp_path / "log") as setup:
        reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
        writer.write(request("/v1/realtime", b"", "Upgrade: websocket", method="GET"))
        assert await reader.readexactly(len(switch) + 4) == switch + b"\x81\x02hi"
        writer.write(b"\x81\x82yo")
        assert await reader.read() == b"\x88\x00"
        writer.close()


# --- --ask-usage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "asks"),
    [
        (b'{ "stream": true, "prompt": "\\u00e9" }', True),
        (b'{"stream":false,"prompt":"p"}', False),
        (b'{"stream": true, "stream_options": {"include_usage": false}}', False),
        (b"no json", False),
    ],
)
async def test_asking_for_usage_changes_no_other_byte(body: bytes, asks: bool, tmp_path: Path) -> None:
    wish = b'"stream_options":{"include_usage":true},'
    wanted = b"{" + wish + body[1:] if asks else body
    seen = bytearray()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.extend(head + await reader.readexactly(len(wanted)))
        writer.write(answer(b"{}"))

    async with recording(script, tmp_path / "log", ask_usage=True) as setup:
        await through(setup, request("/v1/completions", body))
        assert bytes(seen) == readdressed(setup, request("/v1/completions", wanted))
    assert json.loads(wanted)["stream_options"] if asks else True


# --- The end ---------------------------------------------------------------------------------------------------------


async def turns_of_the_loop() -> None:
    """Lets everything run that is ready, and what becomes ready by it."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_end_waits_for_responses_and_not_for_idle_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    came, go = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(10):
            came.set()
            await go.wait()
            writer.write(answer(b"{}"))
            await reader.read()

    async with recording(script, tmp_path / "log") as setup:
        _, idle = await asyncio.open_connection("127.0.0.1", setup.port)
        running = asyncio.create_task(through(setup, request(body=b"{}")))
        await asyncio.wait_for(came.wait(), 20)
        assert setup.proxy.pending_requests == 1
        ending = asyncio.create_task(setup.proxy.shut_down())
        await turns_of_the_loop()
        assert not ending.done()
        go.set()
        assert await running == answer(b"{}")
        await asyncio.wait_for(ending, 20)
        idle.close()
        assert len(setup.records()) == 1
    assert not caplog.records


async def test_the_end_waits_until_a_slow_client_has_its_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = answer(BIG[:60_000])  # more than the kernel keeps here, less than makes the recorder wait for the client
    ended = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(reply)
        await writer.drain()
        await reader.read()

    async with recording(script, tmp_path / "log") as setup:
        monkeypatch.setattr(setup.proxy, "response_ended", ended.set)
        setup.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", setup.port))
        client.sendall(request(body=b"{}"))
        await asyncio.wait_for(ended.wait(), 20)
        monkeypatch.undo()
        ending = asyncio.create_task(setup.proxy.shut_down())
        await turns_of_the_loop()
        assert setup.proxy.pending_requests == 0
        assert not ending.done()
        got = await asyncio.to_thread(lambda: b"".join(iter(lambda: client.recv(65536), b"")))
        assert got == reply
        await asyncio.wait_for(ending, 20)
        client.close()


async def test_the_end_can_be_cut_short(tmp_path: Path) -> None:
    came = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        came.set()
        await reader.read()

    async with recording(script, tmp_path / "log") as setup:
        running = asyncio.create_task(through(setup, request(body=b"{}")))
        await asyncio.wait_for(came.wait(), 20)
        assert setup.proxy.pending_requests == 1
        ending = asyncio.create_task(setup.proxy.shut_down())
        await turns_of_the_loop()
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ending
        assert await running == b""
        (record,) = setup.records()
    assert (record.finish, record.error) == ("error", "the recorder was stopped")

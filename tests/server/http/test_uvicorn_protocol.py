"""HTTP on real sockets, before any route: what a connection may send, how slowly, and how it hears of the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from anaphora.server.http import uvicorn_protocol
from anaphora.server.http.asgi import read_body
from anaphora.server.http.lifetime import Ending, Server

pytestmark = pytest.mark.anyio

POST = b"POST /a?b=c HTTP/1.1\r\nhost: x\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"


class Echo:
    """Answers with method, path, query and body; the path /hold waits for ``release`` first."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.gone = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, 1000)
        except Exception:
            self.gone += 1
            raise
        if scope["path"] == "/hold":
            await self.release.wait()
        said = [scope["method"], scope["path"], scope["query_string"].decode(), body.decode()]
        content = json.dumps(said).encode()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]}
        )
        await send({"type": "http.response.body", "body": content})


class Peer:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[bytes, bytes], Any]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines)
        body = await self.reader.readexactly(int(headers[b"content-length"]))
        return int(first.split()[1]), headers, json.loads(body)

    async def closed(self) -> bytes:
        """What came until the server closed the connection."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


class Running:
    def __init__(self, app: Echo, grace_s: float) -> None:
        self.app = app
        self.ending = Ending()
        self.aborted: list[str] = []
        self.peers: list[Peer] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        ready = asyncio.Event()
        self.ready = ready
        self.server = Server(app, self.ending, grace_s, self._abort, ready.set)
        self.task = asyncio.create_task(self.server.serve(sockets=[self.listener]))

    def _abort(self, reason: str) -> None:
        self.aborted.append(reason)
        self.app.release.set()

    async def connect(self) -> Peer:
        self.peers.append(Peer(*await asyncio.open_connection(*self.address)))
        return self.peers[-1]


@contextlib.asynccontextmanager
async def running(grace_s: float = 5) -> AsyncIterator[Running]:
    server = Running(Echo(), grace_s)
    await server.ready.wait()
    try:
        yield server
    finally:
        server.ending.signal(signal.SIGTERM)
        server.ending.signal(signal.SIGTERM)
        await server.task
        for peer in server.peers:
            peer.writer.close()
            with contextlib.suppress(ConnectionError):
                await peer.writer.wait_closed()


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("cut", [None, 1, 7], ids=["whole", "bytes", "pieces"])
async def test_a_body_behind_an_offer_to_upgrade_is_read(chunked: bool, cut: int | None) -> None:
    body = (
        b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" if chunked else b"content-length: 5\r\n\r\nhello"
    )
    plain = b"GET /d HTTP/1.1\r\nhost: x\r\n\r\n"
    data = POST + H2C + body + plain + POST + H2C + body
    async with running() as server:
        peer = await server.connect()
        for start in range(0, len(data), cut or len(data)):
            peer.send(data[start : start + (cut or len(data))])
            await asyncio.sleep(0)
        for expected in (["POST", "/a", "b=c", "hello"], ["GET", "/d", "", ""], ["POST", "/a", "b=c", "hello"]):
            assert (await peer.answer())[::2] == (200, expected)


async def test_an_offer_of_websockets_is_answered_as_plain_http() -> None:
    async with running() as server:
        peer = await server.connect()
        peer.send(b"GET /d HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await peer.answer())[::2] == (200, ["GET", "/d", "", ""])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", "CONNECT"),
        (b"no request\r\n\r\n", "no valid HTTP"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000, "65536 bytes"),
        (POST + b"content-length: -1\r\n\r\n", "no valid HTTP"),
        (POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "no valid HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "no valid HTTP"),
    ],
    ids=["connect", "garbage", "long head", "negative length", "two lengths", "tls"],
)
async def test_what_is_no_request_is_refused_in_the_form_of_the_api(data: bytes, says: str) -> None:
    async with running() as server:
        peer = await server.connect()
        peer.send(data)
        status, headers, body = await peer.answer()
        assert (status, headers[b"connection"]) == (400, b"close")
        assert body["error"]["type"] == "invalid_request_error"
        assert says in body["error"]["message"]
        assert await peer.closed() == b""


@pytest.mark.parametrize(
    "start", [b"G", POST, POST + b"content-length: 5\r\n\r\nhel", POST + H2C + b"content-length: 5\r\n\r\nhel"]
)
async def test_a_request_that_does_not_arrive_is_408(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(uvicorn_protocol, "REQUEST_S", 0.1)
    async with running() as server:
        peer = await server.connect()
        peer.send(start)
        status, headers, body = await peer.answer()
        assert (status, headers[b"connection"]) == (408, b"close")
        assert body["error"]["type"] == "request_timeout"
        assert await peer.closed() == b""
        assert server.app.gone == (b"\r\n\r\n" in start)


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(uvicorn_protocol, "REQUEST_S", 0.1)
    async with running() as server:
        peer = await server.connect()
        peer.send(sent)
        assert await peer.closed() == b""
        served = await server.connect()
        served.send(POST + b"content-length: 0\r\n\r\n")
        assert (await served.answer())[0] == 200
        served.send(sent or b"\r\n")
        assert await served.closed() == b""


async def test_a_slow_body_that_goes_on_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "REQUEST_S", 0.1)
    monkeypatch.setattr(uvicorn_protocol, "LEAST_BYTES_PER_S", 10)
    async with running() as server:
        peer = await server.connect()
        peer.send(POST + b"content-length: 60\r\n\r\n")
        for _ in range(6):
            peer.send(b"0123456789")
            await asyncio.sleep(0.05)
        assert (await peer.answer())[::2] == (200, ["POST", "/a", "b=c", "0123456789" * 6])


async def test_waiting_for_an_answer_costs_no_time_of_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "REQUEST_S", 0.05)
    async with running() as server:
        peer = await server.connect()
        peer.send(b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n" + POST)
        await asyncio.sleep(0.3)
        server.app.release.set()
        assert (await peer.answer())[::2] == (200, ["GET", "/hold", "", ""])
        peer.send(b"content-length: 0\r\n\r\n")
        assert (await peer.answer())[::2] == (200, ["POST", "/a", "b=c", ""])


async def test_the_end_waits_for_answers_and_refuses_what_has_not_arrived() -> None:
    async with running(grace_s=0.2) as server:
        quick, slow, late, idle = [await server.connect() for _ in range(4)]
        for peer, path in ((quick, b"/hold"), (slow, b"/hold")):
            peer.send(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        late.send(POST + b"content-length: 5\r\n\r\nhel")
        idle.send(POST + b"content-length: 0\r\n\r\n")
        await idle.answer()
        server.ending.signal(signal.SIGTERM)
        assert await idle.closed() == b""
        status, _, body = await late.answer()
        assert status == 503
        assert "SIGTERM" in body["error"]["message"]
        assert [await peer.answer() for peer in (quick, slow)]
        assert len(server.aborted) == 1
        await server.task


async def test_a_second_signal_aborts_at_once_and_a_client_that_does_not_read_holds_nothing_up() -> None:
    async with running(grace_s=1000) as server:
        peer = await server.connect()
        peer.send(b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.05)
        server.ending.signal(signal.SIGINT)
        await asyncio.sleep(0.05)
        assert not server.aborted
        server.ending.signal(signal.SIGTERM)
        assert (await peer.answer())[0] == 200
        await server.task
        assert server.aborted == ["the server was told to end (SIGINT) before this answer was complete"]

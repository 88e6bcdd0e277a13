"""HTTP on real sockets, below the routes: limits of size and time, and shutdown. Time is a clock that tests advance."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest
from starlette.types import Receive, Scope, Send

from anaphora.server.http import uvicorn_protocol
from anaphora.server.http.asgi import read_body
from anaphora.server.http.uvicorn_protocol import REQUEST_S, BoundedHttpProtocol
from anaphora.server.http.uvicorn_server import FLUSH_S, HttpServer, Shutdown
from tests.support.clients import until
from tests.support.clock import ManualClock

pytestmark = pytest.mark.anyio

POST = b"POST /a?b=c HTTP/1.1\r\nhost: x\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"


class Echo:
    """Answers with method, path, query and body; the path /hold waits for ``release`` first."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.gone = 0
        self.held = 0
        self.content: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, 1000)
        except Exception:
            self.gone += 1
            raise
        if scope["path"] == "/hold":
            self.held += 1
            await self.release.wait()
        said = [scope["method"], scope["path"], scope["query_string"].decode(), body.decode()]
        content = self.content or json.dumps(said).encode()
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
        """Returns what arrives until the server closes the connection."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


class Running:
    """A server over Echo, with a clock that the test advances. ``received`` counts the bytes that it has read."""

    def __init__(self, app: Echo, grace_s: float) -> None:
        self.app = app
        self.shutdown = Shutdown()
        self.clock = ManualClock()
        self.received = 0
        self.aborted: list[str] = []
        self.peers: list[Peer] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.ready = asyncio.Event()
        announce, call_later = self.ready.set, self.clock.call_later
        self.server = HttpServer(app, self.shutdown, grace_s, self._abort, announce, call_later)
        self.task = asyncio.create_task(self.server.serve(sockets=[self.listener]))

    def _abort(self, reason: str) -> None:
        self.aborted.append(reason)
        self.app.release.set()

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    async def connect(self) -> Peer:
        before = self.connections
        self.peers.append(Peer(*await asyncio.open_connection(*self.address)))
        await until(lambda: self.connections > before)
        return self.peers[-1]

    async def send(self, peer: Peer, data: bytes) -> None:
        """Sends, and waits until the server has read it."""
        expected = self.received + len(data)
        peer.send(data)
        await until(lambda: self.received >= expected)


@contextlib.asynccontextmanager
async def running(grace_s: float = 5) -> AsyncIterator[Running]:
    server = Running(Echo(), grace_s)
    data_received = BoundedHttpProtocol.data_received

    def counting(self: BoundedHttpProtocol, data: bytes) -> None:
        data_received(self, data)
        server.received += len(data)

    with mock.patch.object(BoundedHttpProtocol, "data_received", counting):
        await server.ready.wait()
        try:
            yield server
        finally:
            server.shutdown.signal(signal.SIGTERM)
            server.shutdown.signal(signal.SIGTERM)
            while not server.task.done():
                server.clock.advance(FLUSH_S)
                await asyncio.sleep(0.001)
            await server.task
            for peer in server.peers:
                peer.writer.close()
                with contextlib.suppress(ConnectionError):
                    await peer.writer.wait_closed()


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("cut", [None, 1, 7], ids=["whole", "bytes", "pieces"])
async def test_the_body_of_a_request_with_an_upgrade_header_is_read(chunked: bool, cut: int | None) -> None:
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


async def test_a_websocket_upgrade_is_answered_as_plain_http() -> None:
    async with running() as server:
        peer = await server.connect()
        peer.send(b"GET /d HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await peer.answer())[::2] == (200, ["GET", "/d", "", ""])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", "CONNECT"),
        (b"no request\r\n\r\n", "not a valid HTTP"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000, "65536 bytes"),
        (POST + b"content-length: -1\r\n\r\n", "not a valid HTTP"),
        (POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "not a valid HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "not a valid HTTP"),
    ],
    ids=["connect", "garbage", "long head", "negative length", "two lengths", "tls"],
)
async def test_an_invalid_request_gets_an_error_in_the_apis_format(data: bytes, says: str) -> None:
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
async def test_a_request_that_does_not_arrive_is_408(start: bytes) -> None:
    async with running() as server:
        peer = await server.connect()
        await server.send(peer, start)
        server.clock.advance(REQUEST_S - 0.1)
        assert not any(connection.transport.is_closing() for connection in server.server.server_state.connections)
        server.clock.advance(0.1)
        status, headers, body = await peer.answer()
        assert (status, headers[b"connection"]) == (408, b"close")
        assert body["error"]["type"] == "request_timeout"
        assert await peer.closed() == b""
        assert server.app.gone == (b"\r\n\r\n" in start)


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_a_silent_connection_is_closed(sent: bytes) -> None:
    async with running() as server:
        peer = await server.connect()
        await server.send(peer, sent)
        server.clock.advance(REQUEST_S)
        assert await peer.closed() == b""
        await until(lambda: server.connections == 0)
        served = await server.connect()
        await server.send(served, POST + b"content-length: 0\r\n\r\n")
        assert (await served.answer())[0] == 200
        assert server.clock.waiting == 0  # between two requests it is uvicorn's keep-alive that counts
        await server.send(served, sent or b"\r\n")
        server.clock.advance(REQUEST_S)
        assert await served.closed() == b""


async def test_a_slow_body_is_read_in_full_while_data_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "MIN_BYTES_PER_S", 10)
    head = POST + b"content-length: 60\r\n\r\n"
    async with running() as server:
        slow, stalled = await server.connect(), await server.connect()
        for peer in (slow, stalled):
            await server.send(peer, head + b"0123456789")
        server.clock.advance(REQUEST_S)  # both are granted a second for 10 bytes of what they sent
        server.clock.advance((len(head) + 10) / 10 - 0.1)
        for _ in range(5):
            await server.send(slow, b"0123456789")
            server.clock.advance(1)
        assert (await slow.answer())[::2] == (200, ["POST", "/a", "b=c", "0123456789" * 6])
        assert (await stalled.answer())[0] == 408


async def test_waiting_for_an_answer_does_not_count_as_time_of_the_next_request() -> None:
    async with running() as server:
        peer = await server.connect()
        await server.send(peer, b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n" + POST)
        await until(lambda: server.app.held == 1)
        server.clock.advance(10 * REQUEST_S)
        server.app.release.set()
        assert (await peer.answer())[::2] == (200, ["GET", "/hold", "", ""])
        peer.send(b"content-length: 0\r\n\r\n")
        assert (await peer.answer())[::2] == (200, ["POST", "/a", "b=c", ""])


async def test_shutdown_waits_for_answers_and_refuses_incomplete_requests() -> None:
    async with running(grace_s=7) as server:
        quick, slow, late, idle = [await server.connect() for _ in range(4)]
        for peer in (quick, slow):
            await server.send(peer, b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.app.held == 2)
        await server.send(late, POST + b"content-length: 5\r\n\r\nhel")
        idle.send(POST + b"content-length: 0\r\n\r\n")
        await idle.answer()
        waiting = server.clock.waiting
        server.shutdown.signal(signal.SIGTERM)
        assert await idle.closed() == b""
        await until(lambda: server.clock.waiting > waiting)
        server.clock.advance(6.9)
        await asyncio.sleep(0.05)
        assert not server.aborted
        server.clock.advance(0.1)
        status, _, body = await late.answer()
        assert status == 503
        assert "SIGTERM" in body["error"]["message"]
        assert [await peer.answer() for peer in (quick, slow)]
        assert len(server.aborted) == 1
        await server.task


async def test_a_second_signal_aborts_at_once() -> None:
    async with running(grace_s=1000) as server:
        peer = await server.connect()
        await server.send(peer, b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.app.held == 1)
        server.shutdown.signal(signal.SIGINT)
        await until(lambda: not server.listener.fileno() >= 0)
        assert not server.aborted
        server.shutdown.signal(signal.SIGTERM)
        assert (await peer.answer())[0] == 200
        await server.task
        assert server.aborted == ["the server was shut down (SIGINT) before this answer was complete"]


async def test_a_client_that_does_not_read_is_cut_off_at_shutdown() -> None:
    async with running(grace_s=0) as server:
        peer = await server.connect()
        await server.send(peer, b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n")
        server.app.content = b"x" * 50_000_000  # more than the sockets buffer
        await until(lambda: server.app.held == 1)
        server.shutdown.signal(signal.SIGTERM)
        while not server.task.done():
            server.clock.advance(FLUSH_S)
            await asyncio.sleep(0.01)
        assert len(server.aborted) == 1
        assert server.connections == 0

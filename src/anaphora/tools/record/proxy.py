"""The pass-through: one connection to the server for each of a client's, bytes handed on as they come.

Connections are paired and live and die together, so keep-alive, pipelining, upgrades, early answers and disconnects
mean on one side what they mean on the other, and no header needs to be taken out. The answer's bytes are sent on before
they are looked at; of a request only its head is held until it is whole, because its ``Host`` must name the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from anaphora.observe.record import RecordWriter, RequestRecord
from anaphora.tools.record.ask_usage import UsageAsker
from anaphora.tools.record.exchange import Exchange, is_recorded
from anaphora.tools.record.http1 import Framing, Head, Kind, Piece, Splitter, answer_framing, request_framing

logger = logging.getLogger("anaphora.record")

CHUNK_BYTES = 64 * 1024
CONNECT_S = 10
FLUSH_S = 0.1
DRAIN_BYTES = 64 * 2**20
"""How much of a request is read and thrown away where the server cannot be reached, so that its sender reads why."""


@dataclass(frozen=True)
class Upstream:
    """Where the server is. ``path`` goes before that of each request."""

    host: str
    port: int
    netloc: bytes
    path: bytes
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, url: str) -> Upstream:
        """Of an address as config.parse_server_url gives it."""
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        netloc = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
        return cls(parts.hostname or "", port, netloc, parts.path.encode(), tls)

    def readdress(self, head: Head) -> bytes:
        """A request's head as the client would have sent it here: all the same but for Host and the path before."""
        raw = head.raw
        if self.path and head.target.startswith(b"/"):
            raw = raw.replace(b" /", b" " + self.path + b"/", 1)
        return re.sub(rb"(?im)^(host:[ \t]*)[^\r\n]*", lambda match: match[1] + self.netloc, raw, count=1)


class Proxy:
    """What all connections share.

    ``open`` counts the requests that await the end of their answers, ``lost`` those that passed unrecorded because
    their connection could not be followed, ``answers`` the good ones recorded, and how many of them told usage and
    cached tokens.
    """

    def __init__(self, upstream: Upstream, writer: RecordWriter, *, keep_prompts: bool, ask_usage: bool) -> None:
        self.upstream = upstream
        self.writer = writer
        self.keep_prompts = keep_prompts
        self.ask_usage = ask_usage
        self.lost = 0
        self.answers = self.with_usage = self.with_cached = 0
        self.ending = False
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @property
    def open(self) -> int:
        return sum(len(connection.waiting) for connection in self._connections)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one client's connection until its end; the callback of asyncio.start_server."""
        connection = _Connection(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            with contextlib.suppress(asyncio.CancelledError):  # only ``end`` cancels; Python 3.11 logs it as a fault
                await connection.run()
        finally:
            del self._connections[connection]
            self._changed.set()

    async def end(self) -> None:
        """Close idle connections at once and the others when their answers are over. Cancel it to cut them off."""
        self.ending = True
        try:
            while self._connections:
                self._changed.clear()
                for connection, task in list(self._connections.items()):
                    if not connection.busy:
                        task.cancel()
                with contextlib.suppress(TimeoutError):  # bytes that a client takes make no event
                    await asyncio.wait_for(self._changed.wait(), FLUSH_S)
        except asyncio.CancelledError:
            for task in self._connections.values():
                task.cancel()
            await asyncio.gather(*self._connections.values(), return_exceptions=True)
            raise

    def answered(self) -> None:
        self._changed.set()

    def keep(self, exchange: Exchange) -> None:
        """Have the record of an exchange written."""

        def complete(record: RequestRecord) -> None:
            exchange.complete(record)
            if record.status == 200 and not record.error:
                self.answers += 1
                self.with_usage += record.prompt_tokens > 0
                self.with_cached += record.cached_tokens is not None

        self.writer.write(exchange.record(), complete, exchange.size)


@dataclass(slots=True)
class _Waiting:
    """A request that awaits its answer. ``exchange`` is None where it is not to be recorded."""

    method: bytes
    exchange: Exchange | None
    answer_begun: bool = False


class _Connection:
    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.waiting: deque[_Waiting] = deque()
        self._proxy = proxy
        self._client_reader, self._client = reader, writer
        self._server_reader: asyncio.StreamReader | None = None
        self._server: asyncio.StreamWriter | None = None
        self._requests = Splitter(request_framing)
        self._answers = Splitter(self._answer_framing)
        self._asker = UsageAsker() if proxy.ask_usage else None
        self._latest: _Waiting | None = None
        self._requested = 0
        self._client_left = False
        self._followed = True

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited or not yet taken by the client."""
        return bool(self.waiting) or self._client.transport.get_write_buffer_size() > 0

    async def run(self) -> None:
        upward: asyncio.Task[None] | None = None
        try:
            if await self._connect():
                upward = asyncio.create_task(self._upward())
                await self._downward()
        except OSError as error:
            # One side is gone without a goodbye: the other must not take what it has got for whole.
            self._abort(f"the connection broke: {error}")
        finally:
            if upward is not None:
                upward.cancel()
            left = ("abort", "the client left") if self._client_left else ("error", "the recorder was stopped")
            self._give_up_waiting(*left)
            if self._server is not None:
                self._server.close()
            self._client.close()
        with contextlib.suppress(OSError):
            await self._client.wait_closed()  # what it has not read yet is still on its way

    # --- from the client to the server ------------------------------------------------------------------------------

    async def _connect(self) -> bool:
        """Reach the server while the client is still sending; says whether there is something to do."""
        upstream = self._proxy.upstream
        connecting = asyncio.open_connection(upstream.host, upstream.port, ssl=upstream.tls)
        try:
            self._server_reader, self._server = await asyncio.wait_for(connecting, CONNECT_S)
        except TimeoutError:
            await self._refuse(504, "gateway_timeout", f"did not answer within {CONNECT_S} s")
            return False
        except OSError as error:
            await self._refuse(502, "bad_gateway", f"cannot be reached: {error.strerror or error}")
            return False
        return True

    async def _upward(self) -> None:
        assert self._server is not None
        reset = False
        try:
            while data := await self._client_reader.read(CHUNK_BYTES):
                if self._server.is_closing():
                    return
                self._server.write(b"".join([self._passed(piece) for piece in self._requests.feed(data)]))
                with contextlib.suppress(OSError):  # the other direction hears of it
                    await self._server.drain()
        except OSError:
            reset = True
        self._server.write(b"".join(piece.raw for piece in self._requests.close()))
        self._client_left = True
        # This is how a server learns that nobody waits any more.
        if reset or not self._server.can_write_eof():
            self._server.transport.abort()
        elif self.waiting or self._requests.lost:
            self._server.write_eof()
        else:
            self._server.close()

    def _passed(self, piece: Piece) -> bytes:
        """The bytes to send for a piece of a request. As with answers, a fault in the books costs records only."""
        try:
            return self._asked(piece)
        except Exception:
            logger.exception("a request could not be followed; the rest of its connection is not recorded")
            self._lose()
            return piece.raw

    def _asked(self, piece: Piece) -> bytes:
        """Note a piece of a request; the bytes to send for it."""
        raw = piece.raw
        if piece.head is not None:
            self._requested += 1
            raw = self._proxy.upstream.readdress(piece.head)
            exchange = Exchange(piece.head, self._proxy.keep_prompts) if is_recorded(piece.head) else None
            self._latest = _Waiting(piece.head.method, exchange)
            if self._followed:
                self.waiting.append(self._latest)
        elif self._latest is not None and self._latest.exchange is not None:
            self._latest.exchange.asked(piece.body)
        recorded = self._latest is not None and self._latest.exchange is not None
        return self._asker.pass_on(piece, raw, recorded) if self._asker is not None else raw

    # --- from the server to the client ------------------------------------------------------------------------------

    async def _downward(self) -> None:
        assert self._server_reader is not None
        while data := await self._server_reader.read(CHUNK_BYTES):
            self._client.write(data)
            self._follow(self._answers.feed(data))
            await self._client.drain()
            if (self._client_left or self._proxy.ending) and not self.waiting and self._followed:
                return
        self._follow(self._answers.close())
        if self.waiting and not self._client_left:
            await self._closed_early()

    def _follow(self, pieces: Iterator[Piece]) -> None:
        """Note what was sent on already. A fault in here costs records, never an answer."""
        if not self._followed:
            return
        try:
            for piece in pieces:
                self._noted(piece)
        except Exception:
            logger.exception("an answer could not be followed; the rest of its connection is not recorded")
            self._followed = False
        if self._answers.lost or not self._followed:
            self._lose()

    def _noted(self, piece: Piece) -> None:
        if not self.waiting:
            return
        exchange = self.waiting[0].exchange
        if piece.head is not None:
            self.waiting[0].answer_begun = True
            if exchange is not None and piece.head.status >= 200:
                exchange.answered(piece.head)
        elif piece.kind is Kind.BODY and exchange is not None:
            exchange.answer(piece.body)
        elif piece.kind is Kind.END:
            self.waiting.popleft()
            if exchange is not None:
                exchange.end()
                self._proxy.keep(exchange)
            self._proxy.answered()

    def _answer_framing(self, head: Head) -> Framing | int:
        return answer_framing(head, self.waiting[0].method if self.waiting else b"")

    # --- when it goes wrong -----------------------------------------------------------------------------------------

    async def _closed_early(self) -> None:
        """The server closed the connection before the end of an answer."""
        if self.waiting[0].answer_begun or self._requested > 1:
            # On a connection used before, a client takes this for what it is, and sends the request again.
            self._give_up_waiting("error", "the server closed the connection before the end of its answer")
            return
        await self._send_error(502, "bad_gateway", "closed the connection without an answer")

    async def _refuse(self, status: int, kind: str, why: str) -> None:
        """Read the client's request and answer it with an error."""
        drained = 0
        while drained < DRAIN_BYTES and (data := await self._client_reader.read(CHUNK_BYTES)):
            drained += len(data)
            pieces = list(self._requests.feed(data))
            for piece in pieces:
                self._asked(piece)
            waits = any(piece.head is not None and piece.head.get(b"expect") for piece in pieces)
            if waits or self._requests.lost or any(piece.kind is Kind.END for piece in pieces):
                break
        if self.waiting:
            await self._send_error(status, kind, why)

    async def _send_error(self, status: int, kind: str, why: str) -> None:
        upstream = self._proxy.upstream
        said = f"the server at {upstream.netloc.decode()} {why}"
        body = msgspec.json.encode({"error": {"message": said, "type": kind, "param": None, "code": status}})
        reason = {502: "Bad Gateway", 504: "Gateway Timeout"}[status]
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._client.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self._give_up_waiting("error", said, status)
        await self._client.drain()

    def _abort(self, why: str) -> None:
        self._give_up_waiting("abort" if self._client_left else "error", why)
        for writer in (self._client, self._server):
            if writer is not None:
                writer.transport.abort()

    def _give_up_waiting(self, finish: str, why: str, status: int = 0) -> None:
        """Record the requests whose answers did not come to their end."""
        while self.waiting:
            exchange = self.waiting.popleft().exchange
            if exchange is not None:
                exchange.end(finish, why, status)
                self._proxy.keep(exchange)
        self._proxy.answered()

    def _lose(self) -> None:
        """From here on the connection is passed on unseen (an upgrade, or no HTTP): nothing on it is recorded."""
        self._followed = False
        self._requests.lose()
        self._proxy.lost += sum(waiting.exchange is not None for waiting in self.waiting)
        self.waiting.clear()
        self._proxy.answered()

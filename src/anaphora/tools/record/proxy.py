"""The pass-through: one connection to the server per client connection, bytes forwarded as they come.

The two connections of a pair open and close together, so keep-alive, pipelining, upgrades, early responses and
disconnects keep their meaning, and no header has to be removed. Response bytes are forwarded before they are read. Of a
request only the head is held until it is complete, because its ``Host`` must name the server.
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
from anaphora.tools.record.exchange import Exchange, is_recorded
from anaphora.tools.record.http1 import Framing, Head, Kind, Piece, Splitter, request_framing, response_framing
from anaphora.tools.record.include_usage import UsageInserter

logger = logging.getLogger("anaphora.record")

CHUNK_BYTES = 64 * 1024
CONNECT_S = 10
FLUSH_S = 0.1
DRAIN_BYTES = 64 * 2**20
"""Bytes of a request that are read and discarded if the server cannot be reached, so that the client reads why."""


@dataclass(frozen=True)
class Upstream:
    """Address of the server. ``path`` is put in front of the path of each request."""

    host: str
    port: int
    netloc: bytes
    path: bytes
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, url: str) -> Upstream:
        """Parses an address that comes from ``config.parse_server_url``."""
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        netloc = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
        return cls(parts.hostname or "", port, netloc, parts.path.encode(), tls)

    def readdress(self, head: Head) -> bytes:
        """Returns a request's head with the server's Host and path prefix; all other bytes are unchanged."""
        raw = head.raw
        if self.path and head.target.startswith(b"/"):
            raw = raw.replace(b" /", b" " + self.path + b"/", 1)
        return re.sub(rb"(?im)^(host:[ \t]*)[^\r\n]*", lambda match: match[1] + self.netloc, raw, count=1)


class Proxy:
    """What all connections share.

    ``unrecorded`` counts requests on connections that could not be read. ``responses`` counts recorded successful
    ones, ``with_usage`` and ``with_cached`` those among them that had usage and cached tokens.
    """

    def __init__(self, upstream: Upstream, writer: RecordWriter, *, keep_prompts: bool, ask_usage: bool) -> None:
        self.upstream = upstream
        self.writer = writer
        self.keep_prompts = keep_prompts
        self.ask_usage = ask_usage
        self.unrecorded = 0
        self.responses = self.with_usage = self.with_cached = 0
        self.ending = False
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @property
    def pending_requests(self) -> int:
        """Requests whose responses have not ended."""
        return sum(len(connection.pending) for connection in self._connections)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one client connection until it closes; the callback of asyncio.start_server."""
        connection = _Connection(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            with contextlib.suppress(
                asyncio.CancelledError
            ):  # only ``shut_down`` cancels; Python 3.11 logs it as an error
                await connection.run()
        finally:
            del self._connections[connection]
            self._changed.set()

    async def shut_down(self) -> None:
        """Closes idle connections at once and the others when their responses have ended. Cancel it to cut them off."""
        self.ending = True
        try:
            while self._connections:
                self._changed.clear()
                for connection, task in list(self._connections.items()):
                    if not connection.busy:
                        task.cancel()
                with contextlib.suppress(TimeoutError):  # a client that reads its bytes wakes nobody
                    await asyncio.wait_for(self._changed.wait(), FLUSH_S)
        except asyncio.CancelledError:
            for task in self._connections.values():
                task.cancel()
            await asyncio.gather(*self._connections.values(), return_exceptions=True)
            raise

    def response_ended(self) -> None:
        """Wakes ``shut_down``, which may be waiting for this response."""
        self._changed.set()

    def write_record(self, exchange: Exchange) -> None:
        """Queues the record of an exchange for the writer's thread."""

        def complete(record: RequestRecord) -> None:
            exchange.complete(record)
            if record.status == 200 and not record.error:
                self.responses += 1
                self.with_usage += record.prompt_tokens > 0
                self.with_cached += record.cached_tokens is not None

        self.writer.write(exchange.record(), complete, exchange.size)


@dataclass(slots=True)
class _PendingRequest:
    """A request whose response has not ended. ``exchange`` is None if it is not recorded."""

    method: bytes
    exchange: Exchange | None


class _Connection:
    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pending: deque[_PendingRequest] = deque()
        self._proxy = proxy
        self._client_reader, self._client = reader, writer
        self._server_reader: asyncio.StreamReader | None = None
        self._server: asyncio.StreamWriter | None = None
        self._requests = Splitter(request_framing)
        self._responses = Splitter(self._response_framing)
        self._usage_inserter = UsageInserter() if proxy.ask_usage else None
        self._latest: _PendingRequest | None = None
        self._requests_seen = 0
        self._client_gone = False
        self._server_has_sent = False
        self._reading = True

    @property
    def busy(self) -> bool:
        """Whether a response has not ended, or the client has not read all of it."""
        return bool(self.pending) or self._client.transport.get_write_buffer_size() > 0

    async def run(self) -> None:
        upward: asyncio.Task[None] | None = None
        try:
            if await self._connect():
                upward = asyncio.create_task(self._client_to_server())
                await self._server_to_client()
        except OSError as error:
            # Reset the other side too: it must not take an incomplete response for a complete one.
            self._abort(f"the connection broke: {error}")
        finally:
            if upward is not None:
                upward.cancel()
            reason = ("abort", "the client left") if self._client_gone else ("error", "the recorder was stopped")
            self._fail_pending(*reason)
            if self._server is not None:
                self._server.close()
            self._client.close()
        with contextlib.suppress(OSError):
            await self._client.wait_closed()  # it may not have read everything yet

    # --- from the client to the server ------------------------------------------------------------------------------

    async def _connect(self) -> bool:
        """Connects to the server. If that fails, answers the client with an error and returns False."""
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

    async def _client_to_server(self) -> None:
        assert self._server is not None
        reset = False
        try:
            while data := await self._client_reader.read(CHUNK_BYTES):
                if self._server.is_closing():
                    return
                self._server.write(b"".join([self._forwarded(piece) for piece in self._requests.feed(data)]))
                with contextlib.suppress(OSError):  # the other direction gets the error
                    await self._server.drain()
        except OSError:
            reset = True
        self._server.write(b"".join(piece.raw for piece in self._requests.close()))
        self._client_gone = True
        # Tell the server that the client is gone, so that it stops generating.
        if reset or not self._server.can_write_eof():
            self._server.transport.abort()
        elif self.pending or self._requests.gave_up:
            self._server.write_eof()
        else:
            self._server.close()

    def _forwarded(self, piece: Piece) -> bytes:
        """Returns the bytes to send for a piece of a request. An error in here costs records, never a request."""
        try:
            return self._observe_request(piece)
        except Exception:
            logger.exception("a request could not be read; the rest of its connection is not recorded")
            self._stop_following()
            return piece.raw

    def _observe_request(self, piece: Piece) -> bytes:
        """Records a piece of a request and returns the bytes to send for it."""
        raw = piece.raw
        if piece.head is not None:
            self._requests_seen += 1
            raw = self._proxy.upstream.readdress(piece.head)
            exchange = Exchange(piece.head, self._proxy.keep_prompts) if is_recorded(piece.head) else None
            self._latest = _PendingRequest(piece.head.method, exchange)
            if self._reading:
                self.pending.append(self._latest)
        elif self._latest is not None and self._latest.exchange is not None:
            self._latest.exchange.request_body(piece.body)
        recorded = self._latest is not None and self._latest.exchange is not None
        return self._usage_inserter.rewrite(piece, raw, recorded) if self._usage_inserter is not None else raw

    # --- from the server to the client ------------------------------------------------------------------------------

    async def _server_to_client(self) -> None:
        assert self._server_reader is not None
        while data := await self._server_reader.read(CHUNK_BYTES):
            self._server_has_sent = True
            self._client.write(data)
            self._read_responses(self._responses.feed(data))
            await self._client.drain()
            if (self._client_gone or self._proxy.ending) and not self.pending and self._reading:
                return
        self._read_responses(self._responses.close())
        if self.pending and not self._client_gone:
            await self._server_closed_early()

    def _read_responses(self, pieces: Iterator[Piece]) -> None:
        """Reads what was forwarded already. An error in here costs records, never a response."""
        if not self._reading:
            return
        try:
            for piece in pieces:
                self._observe_response(piece)
        except Exception:
            logger.exception("a response could not be read; the rest of its connection is not recorded")
            self._reading = False
        if self._responses.gave_up or not self._reading:
            self._stop_following()

    def _observe_response(self, piece: Piece) -> None:
        if not self.pending:
            return
        exchange = self.pending[0].exchange
        if piece.head is not None:
            if exchange is not None and piece.head.status >= 200:
                exchange.response_head(piece.head)
        elif piece.kind is Kind.BODY and exchange is not None:
            exchange.response_body(piece.body)
        elif piece.kind is Kind.END:
            self.pending.popleft()
            if exchange is not None:
                exchange.end()
                self._proxy.write_record(exchange)
            self._proxy.response_ended()

    def _response_framing(self, head: Head) -> Framing | int:
        return response_framing(head, self.pending[0].method if self.pending else b"")

    # --- failures ---------------------------------------------------------------------------------------------------

    async def _server_closed_early(self) -> None:
        """Handles a server that closed the connection before the end of a response."""
        if self._server_has_sent or self._requests_seen > 1:
            # An error after a part of a head would read as its next field. And clients send a request again if a
            # connection that they used before was closed.
            self._fail_pending("error", "the server closed the connection before the end of its answer")
            return
        await self._send_error(502, "bad_gateway", "closed the connection without an answer")

    async def _refuse(self, status: int, kind: str, why: str) -> None:
        """Reads the client's request and answers it with an error."""
        drained = 0
        while drained < DRAIN_BYTES and (data := await self._client_reader.read(CHUNK_BYTES)):
            drained += len(data)
            pieces = list(self._requests.feed(data))
            for piece in pieces:
                self._observe_request(piece)
            expects_continue = any(piece.head is not None and piece.head.get(b"expect") for piece in pieces)
            if expects_continue or self._requests.gave_up or any(piece.kind is Kind.END for piece in pieces):
                break
        if self.pending:
            await self._send_error(status, kind, why)

    async def _send_error(self, status: int, kind: str, why: str) -> None:
        upstream = self._proxy.upstream
        message = f"the server at {upstream.netloc.decode()} {why}"
        body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
        reason = {502: "Bad Gateway", 504: "Gateway Timeout"}[status]
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._client.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self._fail_pending("error", message, status)
        await self._client.drain()

    def _abort(self, why: str) -> None:
        self._fail_pending("abort" if self._client_gone else "error", why)
        for writer in (self._client, self._server):
            if writer is not None:
                writer.transport.abort()

    def _fail_pending(self, finish: str, why: str, status: int = 0) -> None:
        """Records all pending requests as incomplete."""
        while self.pending:
            exchange = self.pending.popleft().exchange
            if exchange is not None:
                exchange.end(finish, why, status)
                self._proxy.write_record(exchange)
        self._proxy.response_ended()

    def _stop_following(self) -> None:
        """Passes on the rest of the connection unread (an upgrade, or not HTTP): nothing on it is recorded."""
        self._reading = False
        self._requests.give_up()
        self._proxy.unrecorded += sum(request.exchange is not None for request in self.pending)
        self.pending.clear()
        self._proxy.response_ended()

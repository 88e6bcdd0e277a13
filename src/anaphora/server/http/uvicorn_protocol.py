"""uvicorn's HTTP as this server speaks it: requests bounded in size and time, refusals in the form of the API."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from anaphora.errors import AnaphoraError, EngineDead, InvalidRequest, RequestTimeout
from anaphora.server.api.responses import error_body

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and the headers together, and of what stands between two pieces of a body or behind it."""

REQUEST_S = 30.0
"""How long a request may take to arrive, head and body, besides a second for each LEAST_BYTES_PER_S of it."""

LEAST_BYTES_PER_S = 4096


class Protocol(HttpToolsProtocol):
    """What httptools and uvicorn leave open.

    A request's head, and the extensions and trailers of its chunks, are of bounded size, and it must arrive in bounded
    time (408). A request that offers to go on in another protocol (``Upgrade: h2c``, as Java's client sends it) is
    served as it is. When the client leaves, every request that it sent hears of it: uvicorn tells the last one alone,
    and one sent ahead of it would run on.
    """

    _head_bytes = 0
    _received = 0
    _incoming = False
    _clock: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unanswered: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._tell_all()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        self._received += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.refuse(InvalidRequest("this is no valid HTTP/1.1 request"))
        if self._head_bytes > MAX_HEAD_BYTES:
            self.refuse(InvalidRequest(f"the request line and headers are over the limit of {MAX_HEAD_BYTES} bytes"))
        if self._clock is None and (self._incoming or not self._answering) and not self.transport.is_closing():
            self._start_clock()

    # --- from bytes to requests -------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        """Feed the parser. It drops the body of a request that offers an upgrade, so that is read without the offer."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    self.refuse(InvalidRequest("CONNECT is for proxies, and this server is none"))
                    return
                lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
                lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
                data = b"\r\n".join([*lines, b"", data[upgrade.args[0] :]])
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._incoming = True

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_bytes = 0
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete] + [self.cycle]

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_bytes = 0
        self._incoming = False
        self._stop_clock()
        super().on_message_complete()

    # --- the time that a request may take to arrive -----------------------------------------------------------------

    def _start_clock(self, seconds: float | None = None) -> None:
        self._received = 0
        self._clock = self.loop.call_later(REQUEST_S if seconds is None else seconds, self._time_is_up)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _time_is_up(self) -> None:
        """What has come earns more time; the client may also wait for an answer before it goes on."""
        if self.flow.read_paused or self._answering:
            self._start_clock()
        elif (earned := self._received / LEAST_BYTES_PER_S) >= 1:
            self._start_clock(earned)
        elif self._incoming:
            self.refuse(RequestTimeout(f"the request did not arrive within {REQUEST_S:g} s"))
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        """Whether the answer to a request that has arrived is under way."""
        return any(not cycle.response_complete and not cycle.more_body for cycle in self._unanswered)

    # --- the end ----------------------------------------------------------------------------------------------------

    def end_incoming(self, why: str) -> None:
        """Refuse a request that has not arrived when the server ends."""
        if self._incoming:
            self.refuse(EngineDead(why))

    def send_400_response(self, msg: str) -> None:
        self.refuse(InvalidRequest(msg))

    def refuse(self, error: AnaphoraError) -> None:
        """End the connection with an error, without a word where that would fall into an answer that has begun."""
        if self.transport.is_closing():
            return
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._unanswered):
            body = msgspec.json.encode(error_body(error))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
        self._tell_all()

    def _tell_all(self) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._unanswered.clear()

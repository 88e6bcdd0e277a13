"""uvicorn's HTTP protocol with bounds on the size and duration of a request, and errors in the API's format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from anaphora.errors import AnaphoraError, EngineDead, InvalidRequest, RequestTimeout
from anaphora.server.http.json_responses import error_body

MAX_HEAD_BYTES = 64 * 1024
"""Limit of the request line and headers together, and of what precedes or follows a piece of a chunked body."""

REQUEST_S = 30.0
"""Seconds that a request may take to arrive, head and body, plus one second per MIN_BYTES_PER_S received."""

MIN_BYTES_PER_S = 4096


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None:
        """Drops the callback."""


CallLater = Callable[[float, Callable[[], None]], Timer]
"""``call_later(seconds, callback)``, as the event loop has it."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes gaps that httptools and uvicorn leave open.

    - The head of a request, and the extensions and trailers of its chunks, have a maximum size (400).
    - A request must arrive within a bounded time (408).
    - A request that offers another protocol (``Upgrade: h2c``, which Java's client sends) is served as HTTP/1.1.
    - When the client disconnects, all its pipelined requests are notified. uvicorn notifies only the last one; the
      others would run on.

    It subclasses uvicorn's private HttpToolsProtocol: uvicorn has no setting for any of these. pyproject.toml bounds
    uvicorn's version; tests/server/http/test_uvicorn_version.py says what to check on a new one.

    Args:
        call_later: replaces the event loop's; for tests.
    """

    def __init__(self, *args: Any, call_later: CallLater | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._call_later: CallLater = call_later or self.loop.call_later
        self._timer: Timer | None = None
        self._head_bytes = 0
        self._received_bytes = 0
        self._incoming = False
        self._unanswered: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._notify_disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        self._received_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.refuse(InvalidRequest("this is not a valid HTTP/1.1 request"))
        if self._head_bytes > MAX_HEAD_BYTES:
            self.refuse(InvalidRequest(f"the request line and headers are over the limit of {MAX_HEAD_BYTES} bytes"))
        if self._timer is None and (self._incoming or not self._answering) and not self.transport.is_closing():
            self._start_timer()

    # --- from bytes to requests -------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        """Feeds the parser.

        httptools drops the body of a request with an Upgrade header, so the head is parsed again without that header.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    self.refuse(InvalidRequest("CONNECT is not supported: this server is not a proxy"))
                    return
                lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
                lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
                data = b"\r\n".join([*lines, b"", data[upgrade.args[0] :]])
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it

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
        self._stop_timer()
        super().on_message_complete()

    # --- how long a request may take to arrive ----------------------------------------------------------------------

    def _start_timer(self, seconds: float | None = None) -> None:
        self._received_bytes = 0
        self._timer = self._call_later(REQUEST_S if seconds is None else seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        """Prolongs the time by what was received; does not count time in which the client waits for an answer."""
        if self.flow.read_paused or self._answering:
            self._start_timer()
        elif (earned_s := self._received_bytes / MIN_BYTES_PER_S) >= 1:
            self._start_timer(earned_s)
        elif self._incoming:
            self.refuse(RequestTimeout(f"the request did not arrive within {REQUEST_S:g} s"))
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        """Whether a request has arrived in full and its answer is incomplete."""
        return any(not cycle.response_complete and not cycle.more_body for cycle in self._unanswered)

    # --- errors and disconnects -------------------------------------------------------------------------------------

    def refuse_incoming(self, reason: str) -> None:
        """Answers a request that has not arrived in full with 503; for shutdown."""
        if self._incoming:
            self.refuse(EngineDead(reason))

    def send_400_response(self, msg: str) -> None:
        """Replaces uvicorn's plain text."""
        self.refuse(InvalidRequest(msg))

    def refuse(self, error: AnaphoraError) -> None:
        """Sends an error and closes the connection. Sends nothing if a response has begun: it would be part of it."""
        if self.transport.is_closing():
            return
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._unanswered):
            body = msgspec.json.encode(error_body(error))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
        self._notify_disconnect()

    def _notify_disconnect(self) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._unanswered.clear()

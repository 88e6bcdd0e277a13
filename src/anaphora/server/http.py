"""uvicorn as this server runs it: heads of bounded size, no clock that ticks, signals left to the caller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and the headers together, and of what stands between two pieces of a body or behind it."""

KEEP_ALIVE_S = 75
"""Longer than clients and load balancers keep idle connections (60 s is usual), so that they close them, not we."""

GRACE_S = 5
"""How long running requests may go on after the signal to end; then they are aborted."""


class Protocol(HttpToolsProtocol):
    """What httptools and uvicorn leave open.

    A request's head, and the extensions and trailers of its chunks, are of bounded size. When the client leaves, every
    request that it sent hears of it: uvicorn tells the last one alone, and one sent ahead of it would run on.
    """

    _head_bytes = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unanswered: list[RequestResponseCycle] = []

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request line and headers are over the limit of {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete] + [self.cycle]

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Ends the connection, without a word where it would fall into an answer that has begun."""
        if any(cycle.response_started and not cycle.response_complete for cycle in self._unanswered):
            self.transport.close()
        else:
            super().send_400_response(msg)
        self._tell_all()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell_all()
        super().connection_lost(exc)

    def _tell_all(self) -> None:
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._unanswered.clear()


class Server(uvicorn.Server):
    """Serves until ``stop`` is set; idle, the process sleeps."""

    def __init__(self, app: ASGIApp, stop: asyncio.Event, announce: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._stop = stop
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        self._announce()
        await self._stop.wait()

    async def cancel_rest(self) -> None:
        """Let the requests that were cancelled at the end write their books."""
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

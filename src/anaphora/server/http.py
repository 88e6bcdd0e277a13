"""uvicorn as this server runs it: heads of bounded size, no clock that ticks, signals left to the caller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and the headers together."""

KEEP_ALIVE_S = 75
"""Longer than clients and load balancers keep idle connections (60 s is usual), so that they close them, not we."""

GRACE_S = 5
"""How long running requests may go on after the signal to end; then they are aborted."""


class Protocol(HttpToolsProtocol):
    """httptools sets no limit to a request's head and keeps all of it in memory; this does."""

    _head_bytes: int | None = 0

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request line and headers are over the limit of {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()


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

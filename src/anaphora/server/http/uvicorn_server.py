"""uvicorn's lifecycle: no polling while it serves; shutdown notifies every client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from anaphora.server.http.uvicorn_protocol import BoundedHttpProtocol, CallLater

logger = logging.getLogger("anaphora.server")

KEEP_ALIVE_S = 75
"""Idle time after which the server closes a connection. Longer than what clients and load balancers use (60 s is
usual), so that they close it, not we: a request cannot arrive at the moment at which we close."""

FLUSH_S = 2.0
"""At shutdown, how long clients whose requests were aborted have to read the error."""

POLL_S = 0.02
"""During shutdown only. uvicorn signals neither the end of a connection nor the end of a request."""


class Shutdown:
    """What the signals asked for: ``requested`` is set by the first one, ``forced`` by the second one."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()
        self.signal_name = ""

    def signal(self, number: int) -> None:
        """Records a received signal."""
        if self.requested.is_set():
            self.forced.set()
        else:
            self.signal_name = signal.Signals(number).name
            self.requested.set()


class HttpServer(uvicorn.Server):
    """Serves until ``shutdown`` is requested; idle, the process sleeps.

    At shutdown the listening sockets are closed, and running requests have ``grace_s`` seconds. Then ``abort(reason)``
    is called, which must end every request with that reason: waiting ones get it as HTTP 503, streams as an error event
    before [DONE].

    It overrides ``capture_signals``, ``main_loop`` and ``shutdown`` of uvicorn.Server, which uvicorn does not document;
    pyproject.toml bounds uvicorn's version, tests/server/http/test_uvicorn_version.py says what to check on a new one.

    Args:
        app: the ASGI application.
        shutdown: set by signals.
        grace_s: seconds that running requests have at shutdown.
        abort: ends all requests.
        announce: called once connections are accepted.
        call_later: replaces the event loop's; for tests.
    """

    def __init__(
        self,
        app: ASGIApp,
        shutdown: Shutdown,
        grace_s: float,
        abort: Callable[[str], None],
        announce: Callable[[], None],
        call_later: CallLater | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(BoundedHttpProtocol, call_later=call_later),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._shutdown = shutdown
        self._grace_s = grace_s
        self._abort = abort
        self._announce = announce
        self._call_later = call_later

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to server.app, which handles them while the model loads, too."""
        yield

    async def main_loop(self) -> None:
        """Replaces uvicorn's, which wakes ten times a second."""
        self._announce()
        await self._shutdown.requested.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends all requests in order: wait for them, then abort them, then close their connections."""
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        tasks = self.server_state.tasks
        signal_name = self._shutdown.signal_name
        grace = f", with {self._grace_s:g} s to finish (a second signal aborts them at once)" if tasks else ""
        logger.info("%s: shutting down; running requests: %d%s", signal_name, len(tasks), grace)
        if await self._drained_within(self._grace_s, self._shutdown.forced):
            return
        if tasks:
            logger.warning("aborted incomplete requests: %d", len(tasks))
        reason = f"the server was shut down ({signal_name}) before this answer was complete"
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedHttpProtocol):
                connection.refuse_incoming(reason)
        self._abort(reason)
        if not await self._drained_within(FLUSH_S):
            for connection in list(self.server_state.connections):
                connection.transport.abort()  # its client does not read
            await self._drained_within(FLUSH_S)

    async def _drained_within(self, seconds: float, interrupt: asyncio.Event | None = None) -> bool:
        """Returns whether all responses were sent within ``seconds``; False at once when ``interrupt`` is set."""
        expired = asyncio.Event()
        timer = (self._call_later or asyncio.get_running_loop().call_later)(seconds, expired.set)
        try:
            while self.server_state.connections or self.server_state.tasks:
                if expired.is_set() or (interrupt is not None and interrupt.is_set()):
                    return False
                await asyncio.sleep(POLL_S)
        finally:
            timer.cancel()
        return True

"""uvicorn from its start to its end: no clock that ticks, and an end that every client hears of."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from anaphora.server.http.uvicorn_protocol import Protocol

logger = logging.getLogger("anaphora.server")

KEEP_ALIVE_S = 75
"""Longer than clients and load balancers keep idle connections (60 s is usual), so that they close them, not we."""

LAST_WORDS_S = 2.0
"""How long clients whose requests were aborted at the end may take to read that."""

LOOK_S = 0.02


class Ending:
    """When to end: ``told`` by the first signal, ``at_once`` by the second one."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.at_once = asyncio.Event()
        self.why = ""

    def signal(self, number: int) -> None:
        if self.told.is_set():
            self.at_once.set()
        else:
            self.why = signal.Signals(number).name
            self.told.set()


class Server(uvicorn.Server):
    """Serves until it is told to end; idle, the process sleeps.

    At the end nothing new is taken, and what runs has ``grace_s`` seconds. Then ``abort(reason)`` is called, which must
    end every request with that reason: those that wait get it as HTTP 503, streams as an error event before [DONE].
    """

    def __init__(
        self,
        app: ASGIApp,
        ending: Ending,
        grace_s: float,
        abort: Callable[[str], None],
        announce: Callable[[], None],
    ) -> None:
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
            )
        )
        self._ending = ending
        self._grace_s = grace_s
        self._abort = abort
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        self._announce()
        await self._ending.told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        tasks = self.server_state.tasks
        more = f", with {self._grace_s:g} s to finish (a second signal aborts them at once)" if tasks else ""
        logger.info("%s: ending; running requests: %d%s", self._ending.why, len(tasks), more)
        if await self._quiet(self._grace_s, self._ending.at_once):
            return
        if tasks:
            logger.warning("aborted incomplete requests: %d", len(tasks))
        reason = f"the server was told to end ({self._ending.why}) before this answer was complete"
        for connection in list(self.server_state.connections):
            if isinstance(connection, Protocol):
                connection.end_incoming(reason)
        self._abort(reason)
        if not await self._quiet(LAST_WORDS_S):
            for connection in list(self.server_state.connections):
                connection.transport.abort()  # its client does not read
            await self._quiet(LAST_WORDS_S)

    async def _quiet(self, seconds: float, hurry: asyncio.Event | None = None) -> bool:
        """Whether every answer was sent within that time. Looks again and again: a connection's end tells nobody."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.server_state.connections or self.server_state.tasks:
            if loop.time() >= deadline or (hurry is not None and hurry.is_set()):
                return False
            await asyncio.sleep(LOOK_S)
        return True

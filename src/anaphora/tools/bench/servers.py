"""The servers of a run, one per side: given by URL, or started when they are first needed."""

from __future__ import annotations

from collections.abc import Callable

from anaphora.tools.bench.client import Server
from anaphora.tools.bench.options import BenchOptions
from anaphora.tools.bench.own_server import OwnServer
from anaphora.tools.shared.machine import gpus

Say = Callable[[str], None]
_WORDS = {"off": "without prefix caching", "on": "with prefix caching"}


class Servers:
    """Connects to or starts the server of each side. On a GPU only one own server runs at a time."""

    def __init__(self, options: BenchOptions, say: Say) -> None:
        self.options = options
        self.say = say
        self.own: dict[str, OwnServer] = {}
        self._ready: dict[str, Server] = {}
        self._alone = bool(gpus())

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides to measure. A single URL has only ``on``: it is measured as it is."""
        return ("on",) if self.options.url else ("off", "on")

    async def get(self, side: str) -> Server:
        """Returns the server of a side, ready and warmed up."""
        if side not in self._ready:
            self._ready[side] = await (self._connect(side) if self.options.remote else self._start(side))
        return self._ready[side]

    async def close(self) -> None:
        """Closes all connections and stops the own servers."""
        for server in self._ready.values():
            await server.close()
        for own in self.own.values():
            own.stop()
        self._ready.clear()
        self.own.clear()

    async def _connect(self, side: str) -> Server:
        url = self.options.url or (self.options.off_url if side == "off" else self.options.on_url) or ""
        return await self._open(url, self.options.model)

    async def _start(self, side: str) -> Server:
        if self._alone:
            await self.close()
        self.say(f"starting a server {_WORDS[side]}")
        self.own[side] = OwnServer(self.options.model, side == "on", self.options.server_args)
        seconds = await self.own[side].ready()
        self.say(f"ready after {seconds:.0f} s; warming up")
        return await self._open(self.own[side].url, None)

    async def _open(self, url: str, model: str | None) -> Server:
        server = Server(url, model, self.options.api_key)
        try:
            await server.connect()
        except BaseException:
            await server.close()
            raise
        return server

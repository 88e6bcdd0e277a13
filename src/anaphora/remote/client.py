"""EngineClient: starts the engine process and talks to it from an asyncio program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from anaphora.config import EngineConfig
from anaphora.errors import AnaphoraError, ConfigError, EngineDead, InvalidRequest
from anaphora.remote import messages
from anaphora.remote.child import FINAL_OUTPUT_S, EngineProcess
from anaphora.remote.watchdog import Watchdog
from anaphora.types.outputs import EngineInfo, EngineStats, FinishReason, SequenceUpdate, StepResult
from anaphora.types.reports import CacheReport, PinReport, Prefix, PrefixList
from anaphora.types.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHUTDOWN_S = 5.0
"""Seconds in which the process may finish its step and end by itself."""


class _Stream:
    """A running request: its unfinished choices, and the updates that its reader has not taken yet."""

    def __init__(self, request: Request) -> None:
        self.number = 0
        self.choices = set(range(request.sampling.n))
        self._items: deque[SequenceUpdate | AnaphoraError | None] = deque()
        self._more = asyncio.Event()

    def put(self, item: SequenceUpdate | AnaphoraError | None) -> None:
        self._items.append(item)
        self._more.set()

    async def get(self) -> SequenceUpdate | AnaphoraError | None:
        """Return the next item. Every token passes here, and this takes a third of the time of an asyncio.Queue."""
        while not self._items:
            self._more.clear()
            await self._more.wait()
        return self._items.popleft()


class EngineClient:
    """An engine in a process of its own. Used only in the event loop in which it was started.

    ``info`` and ``stats`` (the latest) come from the engine; ``on_step`` functions are called with each StepResult.
    ``dead`` is the reason once the engine has ended, ``hung`` the reason while it hangs, and ``cache_fault`` the
    violated invariants that the engine has found while idle; each is None while all is well.
    """

    info: EngineInfo
    stats: EngineStats

    def __init__(self) -> None:
        self.on_step: list[Callable[[StepResult], None]] = []
        self.dead: str | None = None
        self.cache_fault: str | None = None
        self._sent = 0
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._final_message = asyncio.Event()
        self._child: EngineProcess | None = None
        self._watchdog: Watchdog | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.hwm = 0
        self._socket.linger = 0

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineClient:
        """Start the process and wait, without a limit, until its model is loaded.

        Raises the error that stopped the engine (ConfigError, ModelError), or EngineDead if it sent none.
        """
        client = cls()
        try:
            # Once the engine has sent a message, both ends are connected, and the socket's file is no longer needed.
            with tempfile.TemporaryDirectory(prefix="anaphora-") as folder:
                endpoint = client._bind(Path(folder, "engine"))
                client._child = await EngineProcess.spawn(config, endpoint)
                client._tasks = [
                    asyncio.create_task(client._receive()),
                    asyncio.create_task(client._watch(client._child)),
                ]
                await client._ready
                client._watchdog = Watchdog(client.pid, client._ping)
                client._tasks.append(asyncio.create_task(client._watchdog.run()))
        except BaseException:
            await client.close()
            raise
        return client

    def _bind(self, path: Path) -> str:
        endpoint = f"ipc://{path}"
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot create the engine's socket at {path}: {error.strerror}; "
                "set TMPDIR to a writable folder with a short name"
            ) from error
        return endpoint

    async def close(self) -> None:
        """End the engine process, by force if necessary, and everything that waits for it. May be called again."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        grace_s = 0.0
        if not self._ready.done():
            self._ready.cancel()
        elif self.dead is None and not self._ready.cancelled() and self._ready.exception() is None:
            self._send(messages.Shutdown())
            grace_s = SHUTDOWN_S
        self._die("the engine was closed")
        if self._child is not None:
            await self._child.stop(grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    @property
    def hung(self) -> str | None:
        """Why the engine counts as hung, or None. While it hangs, new requests and calls raise EngineDead."""
        return self._watchdog.fault if self._watchdog is not None else None

    def fail(self, reason: str) -> None:
        """End all requests, present and future, with EngineDead(reason). ``close`` ends the engine itself."""
        self._die(reason)

    def kill(self) -> None:
        """End the engine process at once."""
        if self._child is not None:
            self._child.kill()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._child is not None
        return self._child.pid

    # --- Requests -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[SequenceUpdate, None]:
        """Yield updates until all ``request.sampling.n`` choices have finished. Closing it early aborts the request.

        Raises InvalidRequest if the engine refuses the request or its id is running, and EngineDead. A failed step
        yields an update with ``error``.
        """
        stream = self._open(request)
        try:
            while stream.choices:
                item = await stream.get()
                if isinstance(item, AnaphoraError):
                    raise item
                if item is None or item.choice not in stream.choices:
                    continue
                if item.finish_reason is not None:
                    stream.choices.remove(item.choice)
                yield item
        finally:
            if self._streams.get(request.id) is stream:
                del self._streams[request.id]
                if stream.choices:
                    self._send(messages.Abort(request.id))

    async def abort(self, request_id: str) -> None:
        """Abort a running request. Its reader gets an update with ``FinishReason.ABORT`` for each unfinished choice."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        now = time.monotonic()
        for choice in sorted(stream.choices):
            stream.put(SequenceUpdate(request_id, choice, (), now, finish_reason=FinishReason.ABORT))
        self._send(messages.Abort(request_id))

    async def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice (its text contains a stop string). Its reader gets no more updates for it."""
        stream = self._streams.get(request_id)
        if stream is None or choice not in stream.choices:
            return
        stream.choices.remove(choice)
        stream.put(None)  # wakes a reader for which this was the last choice
        self._send(messages.FinishChoice(request_id, choice))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, and does nothing, while requests use blocks."""
        return await self._call(messages.Reset(), bool)

    async def pin(self, prefixes: Sequence[Prefix]) -> tuple[PinReport, ...]:
        """Pin prefixes, computed or not. Raises InvalidRequest, and pins none, if one cannot be pinned."""
        return await self._call(messages.Pin(tuple(prefixes)), tuple[PinReport, ...])

    async def unpin(self, prefixes: Sequence[Prefix] = (), ids: Sequence[str] = ()) -> tuple[PinReport, ...]:
        """Unpin prefixes, named by tokens or id. Raises NotFound, and unpins none, if one is not pinned."""
        return await self._call(messages.Unpin(tuple(prefixes), tuple(ids)), tuple[PinReport, ...])

    async def list_prefixes(self, cache_salt: str | None, limit: int) -> PrefixList:
        """Return the ``limit`` prefixes under a salt whose reuse saves most, and its pins."""
        return await self._call(messages.ListPrefixes(cache_salt, limit), PrefixList)

    async def explain(self, request: Request) -> CacheReport:
        """Return what the request's prompt would find in the cache now, and why the match ends there.

        Raises InvalidRequest if the engine refuses the request.
        """
        return await self._call(messages.Explain(request), CacheReport)

    async def check(self) -> None:
        """Check the cache's invariants. Raises CacheInvariantError if one is violated."""
        await self._call(messages.Check(), type(None))

    def _open(self, request: Request) -> _Stream:
        self._require_working()
        if request.id in self._streams:
            raise InvalidRequest(f"a request with the id {request.id!r} is running", param="request_id")
        stream = _Stream(request)
        stream.number = self._send(messages.Add(request))
        self._streams[request.id] = stream
        return stream

    async def _call(self, command: messages.Command, answer: type[T]) -> T:
        """Send a command and return the value of its Reply, of type ``answer``. Raises the error that it contains."""
        self._require_working()
        number = self._send(command)
        self._calls[number] = reply = asyncio.get_running_loop().create_future()
        return msgspec.convert(await reply, answer)

    async def _ping(self) -> None:
        await self._call(messages.Ping(), type(None))

    def _require_working(self) -> None:
        if self.hung is not None:
            raise EngineDead(self.hung)

    def _send(self, command: messages.Command) -> int:
        """Send a message without waiting (the queue is unlimited) and return its number. Raises EngineDead."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        self._socket.send(messages.encode(command))
        self._sent += 1
        return self._sent

    # --- The engine's side ----------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                self._handle(messages.decode_event(data))
            except Exception as error:  # without this, requests would wait forever
                logger.exception("cannot handle a message from the engine")
                self._die(f"cannot handle a message from the engine: {error}")

    def _handle(self, event: messages.Event) -> None:
        match event:
            case messages.Step():
                self._deliver(event)
            case messages.Reply():
                self._answer(event)
            case messages.Ready(info, stats):
                self.info, self.stats = info, stats
                self._ready.set_result(None)
            case messages.CheckFailed(failure):
                logger.error("the engine's cache check failed: %s", failure.message)
                self.cache_fault = failure.message
            case messages.StartFailed(failure):
                self._ready.set_exception(failure.error())
                self._final_message.set()
            case messages.Dead(reason):
                self._die(reason)
                self._final_message.set()

    def _deliver(self, step: messages.Step) -> None:
        self.stats = step.result.stats
        for callback in self.on_step:
            try:
                callback(step.result)
            except Exception:
                logger.exception("a function in on_step failed")
        for update in step.result.updates:
            stream = self._streams.get(update.request_id)
            # A step from before the request was added is about an earlier request with the same id.
            if stream is not None and stream.number <= step.handled:
                stream.put(update)

    def _answer(self, reply: messages.Reply) -> None:
        error = None if reply.failure is None else reply.failure.error()
        if (call := self._calls.pop(reply.number, None)) is not None:
            if call.done():
                return  # its caller was cancelled
            if error is None:
                call.set_result(reply.value)
            else:
                call.set_exception(error)
        elif error is not None:
            for request_id, stream in self._streams.items():
                if stream.number == reply.number:
                    del self._streams[request_id]
                    stream.put(error)
                    break
            else:
                logger.error("the engine refused message %d: %s", reply.number, error)

    async def _watch(self, child: EngineProcess) -> None:
        code = await child.exited()
        if code >= 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._final_message.wait(), FINAL_OUTPUT_S)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not self._ready.done():
            self._die(f"the engine process {how} before it was ready. Its last lines:\n{child.last_lines()}")
        self._die(f"the engine process {how}")

    def _die(self, reason: str) -> None:
        """Raise EngineDead in everything that waits. The first reason is kept."""
        if self.dead is not None:
            return
        self.dead = reason
        if not self._ready.done():
            self._ready.set_exception(EngineDead(reason))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(reason))
        self._calls.clear()
        for stream in self._streams.values():
            stream.put(EngineDead(reason))
        self._streams.clear()

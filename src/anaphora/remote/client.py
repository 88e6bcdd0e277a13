"""The engine seen from an asyncio program: starts the engine process and speaks with it."""

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
from anaphora.remote.child import LAST_WORDS_S, EngineProcess
from anaphora.remote.watchdog import Watchdog
from anaphora.types.outputs import EngineInfo, EngineStats, FinishReason, SequenceUpdate, StepResult
from anaphora.types.reports import CacheReport, PinReport, Prefix, PrefixList
from anaphora.types.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long the process may take to end by itself: it finishes its step.
SHUTDOWN_S = 5.0


class _Stream:
    """One request that runs: its unfinished choices and the updates that its reader has not taken yet."""

    def __init__(self, request: Request) -> None:
        self.number = 0
        self.choices = set(range(request.sampling.n))
        self._items: deque[SequenceUpdate | AnaphoraError | None] = deque()
        self._more = asyncio.Event()

    def put(self, item: SequenceUpdate | AnaphoraError | None) -> None:
        self._items.append(item)
        self._more.set()

    async def get(self) -> SequenceUpdate | AnaphoraError | None:
        """The next item. A token passes here: this costs a third of an asyncio.Queue."""
        while not self._items:
            self._more.clear()
            await self._more.wait()
        return self._items.popleft()


class EngineClient:
    """An engine in a process of its own. Belongs to the event loop in which it was started.

    ``info`` and ``stats`` (the latest) come from the engine; ``on_step`` functions are called with each StepResult.
    ``dead`` is the reason once the engine is gone, ``hung`` one while it hangs, ``cache_fault`` what the engine's idle
    check complained about.
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
        self._last_words = asyncio.Event()
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
        """Start the process and wait until its model is loaded, however long that takes.

        Raises what stopped the engine there (ConfigError, ModelError), EngineDead if it ended without saying why.
        """
        client = cls()
        try:
            # Both ends hold the channel once the engine has spoken through it; then its file is not needed any more.
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
                f"the engine's socket cannot be made at {path}: {error.strerror}; "
                "set TMPDIR to a folder with a short name that may be written to"
            ) from error
        return endpoint

    async def close(self) -> None:
        """End the engine process, by force if need be, and whatever waits for it. May be called again."""
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
        """What is wrong while the engine neither answers nor computes; then nothing new is taken."""
        return self._watchdog.complaint if self._watchdog is not None else None

    def fail(self, reason: str) -> None:
        """End every request, and all that come, with EngineDead(reason); the engine itself is ended by ``close``."""
        self._die(reason)

    def kill(self) -> None:
        """End the engine process at once."""
        if self._child is not None:
            self._child.kill()

    @property
    def pid(self) -> int:
        """Of the engine process."""
        assert self._child is not None
        return self._child.pid

    # --- Requests -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[SequenceUpdate, None]:
        """Yields updates until all ``request.sampling.n`` choices have finished; leaving early aborts the request.

        Raises InvalidRequest (the engine's refusal, or an id that is running) and EngineDead. A failed step is an
        update with ``error``.
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
        """End a running request: its reader gets an update with ``abort`` for each unfinished choice."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        now = time.monotonic()
        for choice in sorted(stream.choices):
            stream.put(SequenceUpdate(request_id, choice, (), now, finish_reason=FinishReason.ABORT))
        self._send(messages.Abort(request_id))

    async def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice, since a stop string completed its text: its reader gets no more updates of it."""
        stream = self._streams.get(request_id)
        if stream is None or choice not in stream.choices:
            return
        stream.choices.remove(choice)
        stream.put(None)  # wakes a reader that waits for this choice alone
        self._send(messages.FinishChoice(request_id, choice))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests use blocks."""
        return await self._call(messages.Reset(), bool)

    async def pin(self, prefixes: Sequence[Prefix]) -> tuple[PinReport, ...]:
        """Keep beginnings of prompts, what is computed and what will be; all or (InvalidRequest) none of them."""
        return await self._call(messages.Pin(tuple(prefixes)), tuple[PinReport, ...])

    async def unpin(self, prefixes: Sequence[Prefix] = (), ids: Sequence[str] = ()) -> tuple[PinReport, ...]:
        """Keep these no longer; NotFound, and nothing done, where one is not pinned."""
        return await self._call(messages.Unpin(tuple(prefixes), tuple(ids)), tuple[PinReport, ...])

    async def list_prefixes(self, cache_salt: str | None, limit: int) -> PrefixList:
        """What prompts of a salt share, and what is pinned of it."""
        return await self._call(messages.ListPrefixes(cache_salt, limit), PrefixList)

    async def explain(self, request: Request) -> CacheReport:
        """What the request's prompt would find in the cache now, and why not more. Raises the engine's refusal."""
        return await self._call(messages.Explain(request), CacheReport)

    async def check(self) -> None:
        """Check the cache's books; raises CacheInvariantError where they do not balance."""
        await self._call(messages.Check(), type(None))

    def _open(self, request: Request) -> _Stream:
        self._must_go_on()
        if request.id in self._streams:
            raise InvalidRequest(f"a request with the id {request.id!r} is running", param="request_id")
        stream = _Stream(request)
        stream.number = self._send(messages.Add(request))
        self._streams[request.id] = stream
        return stream

    async def _call(self, command: messages.Command, answer: type[T]) -> T:
        """Send a command that a Reply answers; its value, of type ``answer``. Raises the engine's refusal."""
        self._must_go_on()
        number = self._send(command)
        self._calls[number] = reply = asyncio.get_running_loop().create_future()
        return msgspec.convert(await reply, answer)

    async def _ping(self) -> None:
        await self._call(messages.Ping(), type(None))

    def _must_go_on(self) -> None:
        if self.hung is not None:
            raise EngineDead(self.hung)

    def _send(self, command: messages.Command) -> int:
        """Returns the number of the message; raises EngineDead. Never waits: the channel has no limit."""
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
            except Exception as error:  # whatever it is, nobody may wait for ever
                logger.exception("a message from the engine could not be taken")
                self._die(f"a message from the engine could not be taken: {error}")

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
                self._last_words.set()
            case messages.Dead(reason):
                self._die(reason)
                self._last_words.set()

    def _deliver(self, step: messages.Step) -> None:
        self.stats = step.result.stats
        for callback in self.on_step:
            try:
                callback(step.result)
            except Exception:
                logger.exception("a function in on_step failed")
        for update in step.result.updates:
            stream = self._streams.get(update.request_id)
            # A step from before the request was added speaks of an earlier one with the same id.
            if stream is not None and stream.number <= step.handled:
                stream.put(update)

    def _answer(self, reply: messages.Reply) -> None:
        error = None if reply.failure is None else reply.failure.error()
        if (call := self._calls.pop(reply.number, None)) is not None:
            if call.done():
                return  # its caller has left: what it would have heard is nobody's business
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
                await asyncio.wait_for(self._last_words.wait(), LAST_WORDS_S)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not self._ready.done():
            self._die(f"the engine process {how} before it was ready. Its last lines:\n{child.last_lines()}")
        self._die(f"the engine process {how}")

    def _die(self, reason: str) -> None:
        """Tell everybody who waits, once; the first reason stays."""
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

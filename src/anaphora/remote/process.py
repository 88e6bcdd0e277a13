"""The engine in a process of its own: ``python -m anaphora.remote.process``, started by EngineClient.

Its first input line is JSON with ``endpoint`` (the ZeroMQ address to connect to) and ``config`` (EngineConfig as a
dictionary). The parent writes nothing more; when the input ends, the parent is gone, and the process ends too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import zmq

from anaphora.config import EngineConfig, from_dict
from anaphora.core.engine import Engine
from anaphora.errors import AnaphoraError, CacheInvariantError, ConfigError, EngineDead
from anaphora.remote import messages
from anaphora.types.batch import Runner
from anaphora.types.outputs import StepResult

logger = logging.getLogger("anaphora.engine")

IDLE_BEFORE_CHECK_MS = 500
"""Idle milliseconds before the cache is checked. The check visits every block and should not delay a request."""
LINGER_MS = 2000
"""Milliseconds in which the last message may leave the process."""
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


class EngineHost:
    """Runs an engine: takes messages from one socket between steps, and sends results back."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._handled = 0
        self._idle_reported = True
        self._stopping = False

    def run(self) -> None:
        """Run until Shutdown. Raises what a step raises."""
        self._send(messages.Ready(self._engine.info, self._engine.stats()))
        while not self._stopping:
            if self._engine.has_work:
                self._idle_reported = False
                self._report(self._engine.step())
            else:
                self._wait()
            self._take_messages()

    def _wait(self) -> None:
        """Block until a message arrives. After work, first report the gauges and check the cache, once."""
        if not self._idle_reported:
            self._idle_reported = True
            self._report(StepResult((), self._engine.stats()))
            if self._socket.poll(IDLE_BEFORE_CHECK_MS):
                return
            try:
                self._engine.check()
            except CacheInvariantError as error:
                logger.error("the cache check of the idle engine failed: %s", error)
                self._send(messages.CheckFailed(messages.Failure.of(error)))
        self._socket.poll()

    def _take_messages(self) -> None:
        while not self._stopping:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handled += 1
            try:
                self._handle(messages.decode_command(data))
            except AnaphoraError as error:
                self._refuse(error)
            except Exception as error:
                logger.exception("a command failed")
                self._refuse(AnaphoraError(f"the engine failed: {describe(error)}"))

    def _handle(self, command: messages.Command) -> None:
        match command:
            case messages.Add(request):
                self._engine.add(request)
            case messages.Abort(request_id):
                self._engine.abort(request_id)
            case messages.FinishChoice(request_id, choice):
                self._engine.finish_choice(request_id, choice)
            case messages.Reset():
                self._reply_changed(self._engine.reset_prefix_cache())
            case messages.Pin(prefixes):
                self._reply_changed(self._engine.pin(prefixes))
            case messages.Unpin(prefixes, ids):
                self._reply_changed(self._engine.prefixes.unpin(prefixes, ids))
            case messages.ListPrefixes(cache_salt, limit):
                self._reply(self._engine.prefixes.list(cache_salt, limit))
            case messages.Explain(request):
                self._reply(self._engine.explain(request))
            case messages.Check():
                self._engine.check()
                self._reply()
            case messages.Ping():
                self._reply()
                return
            case messages.Shutdown():
                self._stopping = True
        self._idle_reported = False

    def _reply_changed(self, value: Any) -> None:
        """Reply to a message that has changed the cache, after sending the gauges that show the change."""
        self._report(StepResult((), self._engine.stats()))
        self._reply(value)

    def _reply(self, value: Any = None) -> None:
        """Answer the message that is being handled."""
        self._send(messages.Reply(self._handled, value))

    def _refuse(self, error: AnaphoraError) -> None:
        self._send(messages.Reply(self._handled, failure=messages.Failure.of(error)))

    def _report(self, result: StepResult) -> None:
        self._send(messages.Step(self._handled, result))

    def _send(self, event: messages.Event) -> None:
        self._socket.send(messages.encode(event))


def describe(error: BaseException) -> str:
    """Return an error's class and message for users."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def load_runner(config: EngineConfig) -> Runner:
    """Return the Runner that ``config.runner`` ("module:function") makes. Raises ConfigError if it does not exist."""
    module, _, name = config.runner.partition(":")
    try:
        load: Callable[[EngineConfig], Runner] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the engine ({config.runner}) needs the module {error.name!r}, which is not installed; "
            "run pip install '.[serve]' in Anaphora's folder"
        ) from error
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"{config.runner!r} is not a function that makes a runner: {error}") from error
    return load(config)


def build(settings: dict[str, Any]) -> Engine:
    """Return the loaded engine. Its objects are frozen: the garbage collector never visits them again."""
    config = from_dict(EngineConfig, settings)
    engine = Engine(config, load_runner(config))
    gc.collect()
    gc.freeze()
    return engine


def serve(settings: dict[str, Any], socket: zmq.Socket[bytes]) -> int:
    """Build the engine and run it; return the exit code. Sends the reason first, unless it ends by Shutdown."""
    try:
        engine = build(settings)
    except AnaphoraError as error:
        return _start_failed(socket, error)
    except Exception as error:
        logger.exception("the engine could not start")
        return _start_failed(socket, EngineDead(f"the engine could not start: {describe(error)}"))
    try:
        EngineHost(engine, socket).run()
    except SystemExit:
        socket.send(messages.encode(messages.Dead("the engine process received SIGTERM")))
    except Exception as error:
        logger.exception("the engine failed")
        socket.send(messages.encode(messages.Dead(f"the engine failed: {describe(error)}")))
        return EngineDead.exit_code
    return 0


def _start_failed(socket: zmq.Socket[bytes], error: AnaphoraError) -> int:
    socket.send(messages.encode(messages.StartFailed(messages.Failure.of(error))))
    return error.exit_code


def _follow_parent() -> None:
    """End with the parent, even if it is killed: by a signal of the kernel on Linux, else when our input ends."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_NAME, b"anaphora-engine", 0, 0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def wait() -> NoReturn:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def main() -> int:
    """Read the start line, connect, and serve until the end; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the server, which then ends this process
    signal.signal(signal.SIGTERM, _terminate)
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("anaphora").setLevel(logging.INFO)
    try:
        start = json.loads(sys.stdin.buffer.readline())
        endpoint, settings = start["endpoint"], start["config"]
    except (ValueError, KeyError, TypeError) as error:
        print(f"the first input line must be JSON with endpoint and config: {describe(error)}", file=sys.stderr)
        return ConfigError.exit_code
    _follow_parent()
    try:
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.hwm = 0
            socket.linger = LINGER_MS
            socket.connect(endpoint)
            return serve(settings, socket)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending already; do not interrupt the exit handlers


if __name__ == "__main__":
    sys.exit(main())

"""Starts the engine process as a child of this one, relays its output and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys

from anaphora.config import EngineConfig

TAIL_LINES = 20
"""Lines of output that are kept for error messages."""
TERMINATE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
FINAL_OUTPUT_S = 1.0
"""Seconds in which the last output and message of an ended process may still arrive."""


class EngineProcess:
    """The child process. Its output goes to our standard error; the last lines are kept for error messages."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._tail = ""
        self._relay = asyncio.create_task(self._relay_output())

    @classmethod
    async def spawn(cls, config: EngineConfig, endpoint: str) -> EngineProcess:
        """Start the process; it connects to ``endpoint`` (a ZeroMQ address) and loads the model of ``config``."""
        # -P: a file in the user's working directory must not be imported in place of a library.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "anaphora.remote.process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        child = cls(process)
        assert process.stdin is not None
        start = {"endpoint": endpoint, "config": dataclasses.asdict(config)}
        process.stdin.write(json.dumps(start).encode() + b"\n")
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def _relay_output(self) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(65536):
            text = data.decode(errors="replace")
            self._tail = "".join((self._tail + text).splitlines(keepends=True)[-TAIL_LINES:])[-8192:]
            sys.stderr.write(text)
            sys.stderr.flush()

    def last_lines(self) -> str:
        """Return the last lines of its output."""
        return self._tail.strip()

    async def exited(self) -> int:
        """Wait until the process and its output have ended. Returns the exit code (negative: the signal)."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # a grandchild may keep the output open
            await asyncio.wait_for(asyncio.shield(self._relay), FINAL_OUTPUT_S)
        return code

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """End the process: wait ``grace_s`` seconds, then send SIGTERM, then SIGKILL."""
        for force, patience_s in ((None, grace_s), (signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, None)):
            if force is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(force)
            try:
                await asyncio.wait_for(self._process.wait(), patience_s)
                break
            except TimeoutError:
                continue
        await self.exited()
        self._relay.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()

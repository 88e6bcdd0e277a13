"""The engine process as a child of this one: started, listened to, and ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys

from anaphora.config import EngineConfig

TAIL_LINES = 20
# How long it may take to end after SIGTERM, before SIGKILL.
TERMINATE_S = 3.0
# How long a process that ended by itself is given for its last output and message to arrive here.
LAST_WORDS_S = 1.0


class EngineProcess:
    """The child: its output goes to our standard error, and the last lines of it are kept for messages."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._tail = ""
        self._relay = asyncio.create_task(self._pass_output())

    @classmethod
    async def spawn(cls, config: EngineConfig, endpoint: str) -> EngineProcess:
        # -P: a file in the user's working directory that is named like a library must not take its place.
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
        return self._process.pid

    async def _pass_output(self) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(65536):
            text = data.decode(errors="replace")
            self._tail = "".join((self._tail + text).splitlines(keepends=True)[-TAIL_LINES:])[-8192:]
            sys.stderr.write(text)
            sys.stderr.flush()

    def last_lines(self) -> str:
        return self._tail.strip()

    async def exited(self) -> int:
        """Wait for the end of the process and of its output; returns the exit code (negative: the signal)."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # a child of the child could keep the output open
            await asyncio.wait_for(asyncio.shield(self._relay), LAST_WORDS_S)
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """End it for certain: wait ``grace_s``, then SIGTERM, then SIGKILL."""
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

"""Chat templates rendered in a process of their own, with bounded time, memory and output.

A template is a program that comes with a model file. Jinja's sandbox keeps it from the machine, but not from looping or
growing without end: ``'x' * 10**10``, loops in loops, a list that holds itself twice, thirty times over. So it runs
where the operating system can stop it, also within one long call of C code. The process starts with the first
rendering, serves all templates, one at a time, and ends with its parent.
"""

from __future__ import annotations

import atexit
import functools
import json
import signal
import subprocess
import sys
import threading
from datetime import datetime
from typing import Any

CPU_SECONDS = 2.0
"""The most that one rendering may take. CPU time, so that a busy machine fails nobody."""

STUCK_SECONDS = 60.0
"""Who has waited so long for others takes the process for one that was stopped, and starts another."""


class RenderError(Exception):
    """The rendering failed; the message says why. ``refused`` is set where the template itself raised it."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class TemplateSyntaxError(RenderError):
    """The template cannot be compiled."""


class Sandbox:
    """The rendering process as its parent sees it. Safe to use from several threads."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS, stuck_seconds: float = STUCK_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._stuck_seconds = stuck_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, source: str, variables: dict[str, Any], now: datetime | None = None) -> str:
        """Render a template, at ``now`` where it asks for the time.

        RenderError says why it cannot be; TypeError that the variables are no JSON values.
        """
        told = None if now is None else now.isoformat()
        line = json.dumps({"source": source, "variables": variables, "now": told}).encode() + b"\n"
        if not self._lock.acquire(timeout=self._stuck_seconds):
            self.kill()
            self._lock.acquire()
        try:
            answer = json.loads(self._exchange(line))
        finally:
            self._lock.release()
        if "text" in answer:
            return str(answer["text"])
        if answer.get("syntax"):
            raise TemplateSyntaxError(answer["error"])
        raise RenderError(answer["error"], refused=bool(answer.get("refused")))

    def kill(self) -> None:
        """End the process, also where another thread waits for it: that thread gets a RenderError."""
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _exchange(self, line: bytes) -> bytes:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # -P: a file named like a library in the caller's working directory must not be imported.
            command = [sys.executable, "-P", "-m", "anaphora.text.render_process", str(self._cpu_seconds)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # interrupted: the answer must not be taken for the next one's
            self.close()
            raise
        if answer.endswith(b"\n"):
            return answer
        process.wait()
        self.close()
        if process.returncode == -getattr(signal, "SIGPROF", 0):
            raise RenderError(f"it takes more than {self._cpu_seconds:g} s of computing time")
        raise RenderError(f"its process ended with exit code {process.returncode}")


@functools.cache
def shared() -> Sandbox:
    """The one rendering process of this program."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox

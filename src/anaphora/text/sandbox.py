"""Renders chat templates in a separate process with limited time, memory and output.

A template is a program that comes with a model file. Jinja's sandbox keeps it away from the machine, but does not limit
time and memory: ``'x' * 10**10``, nested loops, a list that doubles thirty times. In a separate process the operating
system can stop it, even during a long call of C code. The process starts with the first rendering, renders one template
at a time, and ends with its parent.
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
"""Limit for one rendering. CPU time, so that a busy machine does not fail requests."""

STUCK_SECONDS = 60.0
"""A caller that waits this long for its turn assumes that the process hangs, and replaces it."""


class RenderError(Exception):
    """The rendering failed; the message says why. ``refused``: the template itself raised the error."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class TemplateSyntaxError(RenderError):
    """The template cannot be compiled."""


class Sandbox:
    """Starts and uses the rendering process. Safe to use from several threads.

    ``cpu_seconds`` limits one rendering, ``stuck_seconds`` the wait for other threads' renderings.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS, stuck_seconds: float = STUCK_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._stuck_seconds = stuck_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, source: str, variables: dict[str, Any], now: datetime | None = None) -> str:
        """Renders a template; ``now`` replaces the current time.

        Raises RenderError if it fails, TypeError if the variables are not JSON values.
        """
        time = None if now is None else now.isoformat()
        line = json.dumps({"source": source, "variables": variables, "now": time}).encode() + b"\n"
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
        """Kills the process, even while another thread waits for it: that thread gets a RenderError."""
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Ends the process; the next rendering starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _exchange(self, line: bytes) -> bytes:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # -P: do not import files of the working directory that are named like a library.
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
        except BaseException:  # interrupted: the next call must not read this answer
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
    """Returns the rendering process that the whole program shares."""
    sandbox = Sandbox()
    atexit.register(sandbox.close)
    return sandbox

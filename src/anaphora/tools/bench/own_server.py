"""``anaphora serve`` as a subprocess: started for a benchmark on a free port, stopped at its end."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from anaphora.errors import AnaphoraError
from anaphora.observe import record

START_SECONDS = 600
LAST_LINES = 15


def free_port() -> int:
    """Returns a TCP port of this machine that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def end_on_terminate() -> None:
    """Makes SIGTERM cancel the running task, so that its servers are stopped too."""
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


class OwnServer:
    """``anaphora serve`` as a subprocess, with its output and its log of requests in a temporary folder."""

    def __init__(self, model: str | None, caching: bool, arguments: tuple[str, ...] = ()) -> None:
        self.caching = caching
        self.folder = Path(tempfile.mkdtemp(prefix="anaphora-bench-"))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = [sys.executable, "-m", "anaphora", "serve", *([model] if model else [])]
        self.command += ["--host", "127.0.0.1", "--port", str(port), "--record", str(self._log)]
        self.command += [*arguments, "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"]
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def _output(self) -> Path:
        return self.folder / "output.txt"

    @property
    def _log(self) -> Path:
        return self.folder / "requests.jsonl"

    async def ready(self) -> float:
        """Waits until /health is good and returns the seconds waited.

        Raises AnaphoraError with the last lines of the server's output if it ends or takes too long.
        """
        begun = time.perf_counter()
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while time.perf_counter() - begun < START_SECONDS:
                if self._process.poll() is not None:
                    raise AnaphoraError(f"the server ended with code {self._process.returncode}:\n{self._last_lines()}")
                try:
                    if (await client.get(f"{self.url}/health")).is_success:
                        return time.perf_counter() - begun
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.2)
        raise AnaphoraError(f"the server was not ready after {START_SECONDS} s:\n{self._last_lines()}")

    def prefill_times(self) -> list[float]:
        """Returns the prefill seconds of every request that has ended, in the order in which they ended."""
        return [entry.prefill_s for entry in record.read(self._log)] if self._log.exists() else []

    def stop(self) -> None:
        """Ends the process and deletes the folder."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _last_lines(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-LAST_LINES:]) or "  | (it wrote nothing)"

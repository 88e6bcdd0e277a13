"""Detects an engine process that hangs: it neither answers a ping nor uses CPU time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import psutil

from anaphora.errors import EngineDead

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 10.0
"""Seconds between two pings, and between two checks while a ping is not answered."""
MAX_IDLE_CHECKS = 3
"""After this many checks in a row without an answer and without CPU time, the process hangs: stopped, or deadlocked."""
MAX_STEP_S = 1800.0
"""A step that takes longer hangs too, even if it computes. On a CPU, prefill of a large model takes minutes."""
MIN_CPU_SHARE = 0.01
"""Share of one core below which a process counts as not computing."""


class Watchdog:
    """Pings the engine process ``pid`` at intervals. ``fault`` says what is wrong while it hangs, else it is None.

    Checks are counted, not seconds since the last answer: time in which the machine was suspended must not count.
    ``cpu_seconds`` returns the CPU time that the process has used (by default measured with psutil, children
    included); it raises psutil.Error once the process has ended. ``sleep`` waits for a number of seconds.
    """

    def __init__(
        self,
        pid: int,
        ping: Callable[[], Awaitable[object]],
        *,
        cpu_seconds: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.fault: str | None = None
        self._pid = pid
        self._ping = ping
        self._measure = cpu_seconds
        self._sleep = sleep

    async def run(self) -> None:
        """Watch until the engine process ends."""
        try:
            cpu_seconds = self._measure or partial(process_cpu_seconds, psutil.Process(self._pid))
            while True:
                await self._sleep(CHECK_INTERVAL_S)
                answer = asyncio.ensure_future(self._ping())
                try:
                    await self._wait_for(answer, cpu_seconds)
                finally:
                    answer.cancel()
                self._clear_fault()
        except (EngineDead, psutil.Error):
            return  # whoever waits for the process itself reports its end

    async def _wait_for(self, answer: asyncio.Future[object], cpu_seconds: Callable[[], float]) -> None:
        checks = idle = 0
        now = cpu_seconds()
        while not await self._answered(answer):
            checks += 1
            before, now = now, cpu_seconds()
            # The time of a child that has ended is gone from the sum, so a decrease is a sign of life too.
            idle = idle + 1 if abs(now - before) < MIN_CPU_SHARE * CHECK_INTERVAL_S else 0
            if idle >= MAX_IDLE_CHECKS:
                self._set_fault(f"it has neither answered nor computed for {idle * CHECK_INTERVAL_S:.0f} s")
            elif checks * CHECK_INTERVAL_S > MAX_STEP_S:
                self._set_fault(f"it has been in one step for {checks * CHECK_INTERVAL_S:.0f} s")
            else:
                self._clear_fault()
        answer.result()

    async def _answered(self, answer: asyncio.Future[object]) -> bool:
        """Wait for the answer, at most for one interval; return whether it has come."""
        pause = asyncio.ensure_future(self._sleep(CHECK_INTERVAL_S))
        try:
            await asyncio.wait((answer, pause), return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
        return answer.done()

    def _set_fault(self, what: str) -> None:
        if self.fault is None:
            logger.error("the engine process (%d) hangs: %s", self._pid, what)
        self.fault = f"the engine process hangs: {what}"

    def _clear_fault(self) -> None:
        if self.fault is not None:
            logger.warning("the engine process (%d) works again", self._pid)
            self.fault = None


def process_cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time used by a process and its children (compilers run as children).

    Raises psutil.NoSuchProcess once the process has ended.
    """
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            if member is process:
                raise
        else:
            total += times.user + times.system
    return total

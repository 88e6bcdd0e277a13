"""Whether the engine process still goes on: it answers between its steps, and within one its CPU time grows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import psutil

from anaphora.errors import EngineDead

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""Seconds between two questions, and between two looks while one is not answered."""
SILENT_LOOKS = 3
"""So many looks in a row without an answer and without work: the process hangs (it was stopped, or waits for ever)."""
LONGEST_STEP_S = 1800.0
"""A step that computes for longer than this hangs too. A prefill step of a large model on a CPU takes minutes."""
IDLE_SHARE = 0.01
"""Of one core: below it a process does not compute."""


class Watchdog:
    """Asks ``ping`` for ever; ``complaint`` says what is wrong while the engine hangs, and is None once it goes on.

    Looks are counted, not seconds since the last answer: a machine that slept proves nothing.
    """

    def __init__(self, pid: int, ping: Callable[[], Awaitable[object]]) -> None:
        self.complaint: str | None = None
        self._pid = pid
        self._ping = ping

    async def run(self) -> None:
        """Ends with the engine process."""
        try:
            process = psutil.Process(self._pid)
            while True:
                await asyncio.sleep(LOOK_S)
                answer = asyncio.ensure_future(self._ping())
                try:
                    await self._wait_for(answer, process)
                finally:
                    answer.cancel()
                self._goes_on()
        except (EngineDead, psutil.Error):
            return  # who watches the process itself tells of its end

    async def _wait_for(self, answer: asyncio.Future[object], process: psutil.Process) -> None:
        looks = silent = 0
        spent = _cpu_seconds(process)
        while not (await asyncio.wait((answer,), timeout=LOOK_S))[0]:
            looks += 1
            before, spent = spent, _cpu_seconds(process)
            # A child that has ended takes its seconds along: that is a change too.
            silent = silent + 1 if abs(spent - before) < IDLE_SHARE * LOOK_S else 0
            if silent >= SILENT_LOOKS:
                self._complain(f"it has neither answered nor computed for {silent * LOOK_S:.0f} s")
            elif looks * LOOK_S > LONGEST_STEP_S:
                self._complain(f"it has been in one step for {looks * LOOK_S:.0f} s")
            else:
                self._goes_on()
        answer.result()

    def _complain(self, what: str) -> None:
        if self.complaint is None:
            logger.error("the engine process (%d) hangs: %s", self._pid, what)
        self.complaint = f"the engine process hangs: {what}"

    def _goes_on(self) -> None:
        if self.complaint is not None:
            logger.warning("the engine process goes on")
            self.complaint = None


def _cpu_seconds(process: psutil.Process) -> float:
    """Of the process and those that it waits for: compilers run in processes of their own."""
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

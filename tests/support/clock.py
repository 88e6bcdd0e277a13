"""A clock that a test advances: timers fire when the test says so, whatever the machine's load."""

from __future__ import annotations

from collections.abc import Callable


class ManualTimer:
    """A callback at a time of a ManualClock."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualClock:
    """Has the event loop's ``call_later``; time passes only in ``advance``."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[ManualTimer] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(self.now + seconds, callback)
        self._timers.append(timer)
        return timer

    @property
    def waiting(self) -> int:
        """Timers that are neither cancelled nor fired."""
        self._timers = [timer for timer in self._timers if not timer.cancelled]
        return len(self._timers)

    def advance(self, seconds: float) -> None:
        """Let time pass; timers fire in order, those that fired callbacks have set included."""
        end = self.now + seconds
        while due := [timer for timer in self._timers if timer.when <= end and not timer.cancelled]:
            first = min(due, key=lambda timer: timer.when)
            self._timers.remove(first)
            self.now = first.when
            first.callback()
        self.now = end

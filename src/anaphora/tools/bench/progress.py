"""Progress bars: prompts being made, requests being sent."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from anaphora.tools.bench.client import RequestResult
from anaphora.tools.bench.workloads import Session

UNKNOWN_LENGTH = 100
"""Tokens assumed for an answer whose length the server chooses."""


def progress_bars(console: Console) -> Progress:
    """Returns the display that the bars are added to."""
    return Progress(
        TextColumn("{task.description:32}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,  # the servers that are measured may need the same processor
    )


class PromptProgress:
    """A bar for prompts that are being made."""

    def __init__(self, progress: Progress, title: str, total: int) -> None:
        self._progress, self._total, self._made = progress, total, 0
        self._task = progress.add_task(title, total=total, count=f"0/{total} prompts")

    def made(self, prompts: int) -> None:
        """Advances by ``prompts``."""
        self._made += prompts
        self._progress.update(self._task, completed=self._made, count=f"{self._made}/{self._total} prompts")


class RequestProgress:
    """A bar for requests in flight: it grows with each piece of text, and is corrected when a request ends."""

    def __init__(self, progress: Progress, title: str, sessions: Sequence[Session]) -> None:
        planned = [planned for session in sessions for planned in session.requests]
        self._progress, self._requests, self._ended = progress, len(planned), 0
        tokens = sum(one.out or UNKNOWN_LENGTH for one in planned)
        self._task = progress.add_task(title, total=tokens, count=f"0/{self._requests} requests")

    def on_text(self, _: str) -> None:
        """Advances by one token."""
        self._progress.advance(self._task)

    def on_end(self, result: RequestResult) -> None:
        """Counts a request that has ended, and prints its error if it failed."""
        self._ended += 1
        self._progress.update(
            self._task,
            advance=(result.request.out or UNKNOWN_LENGTH) - result.content_events,
            count=f"{self._ended}/{self._requests} requests",
        )
        if result.error:
            self._progress.console.print(f"[red]failed:[/red] {result.error}", highlight=False)

"""The progress bars of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from anaphora.tools.bench.client import Sample
from anaphora.tools.bench.workloads import Session

UNKNOWN_LENGTH = 100
"""Tokens that an answer counts for whose length is the server's to choose."""


def bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:32}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,  # the servers that are measured may need the same processor
    )


class Making:
    """Prompts that are being made."""

    def __init__(self, progress: Progress, title: str, total: int) -> None:
        self._progress, self._total, self._made = progress, total, 0
        self._task = progress.add_task(title, total=total, count=f"0/{total} prompts")

    def made(self, prompts: int) -> None:
        self._made += prompts
        self._progress.update(self._task, completed=self._made, count=f"{self._made}/{self._total} prompts")


class Sending:
    """Requests on their way: the bar grows with every piece of an answer, and is put right when a request ends."""

    def __init__(self, progress: Progress, title: str, sessions: Sequence[Session]) -> None:
        planned = [planned for session in sessions for planned in session.requests]
        self._progress, self._requests, self._ended = progress, len(planned), 0
        tokens = sum(one.out or UNKNOWN_LENGTH for one in planned)
        self._task = progress.add_task(title, total=tokens, count=f"0/{self._requests} requests")

    def heard(self, _: str) -> None:
        self._progress.advance(self._task)

    def done(self, sample: Sample) -> None:
        self._ended += 1
        self._progress.update(
            self._task,
            advance=(sample.planned.out or UNKNOWN_LENGTH) - sample.pieces,
            count=f"{self._ended}/{self._requests} requests",
        )
        if sample.error:
            self._progress.console.print(f"[red]failed:[/red] {sample.error}", highlight=False)

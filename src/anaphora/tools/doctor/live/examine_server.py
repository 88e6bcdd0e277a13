"""Examines a running server: from the options to the exit code."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from anaphora.tools.doctor.live import server_terminal
from anaphora.tools.doctor.live.next_steps import advise, judged
from anaphora.tools.doctor.live.scrape import scrape
from anaphora.tools.doctor.live.server_figures import figures
from anaphora.tools.doctor.options import DoctorOptions
from anaphora.tools.shared.console import LogConsole


def examine(options: DoctorOptions) -> tuple[dict[str, Any], int]:
    """Watches a server and prints its figures; returns them and the exit code.

    The code is 1 if the hit rate is below ``min_hit_rate`` or unknown, 2 if the server stopped answering, else 0.
    """
    assert options.log is not None
    with Progress(
        TextColumn("watching"), BarColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("watching", total=options.sample)
        server = scrape(
            options.log, options.api_key, options.sample, lambda done: progress.update(task, completed=done)
        )
    data = figures(server)
    data["advice"] = advise(data)
    console = LogConsole()
    server_terminal.show(data, console)
    low = options.min_hit_rate is not None and not _reaches(data, options.min_hit_rate, console)
    return data, 2 if server.unreachable else 1 if low else 0


def _reaches(data: dict[str, Any], wanted: float, console: Console) -> bool:
    rate = judged(data)["hit_rate"]
    if rate is None:
        console.print(f"\nthe hit rate is unknown, so it is not shown to reach {wanted:.1%}", style="red")
    return rate is not None and rate >= wanted

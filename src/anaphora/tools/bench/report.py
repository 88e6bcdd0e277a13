"""The report of a run: its figures as a table, as JSON and for the page."""

from __future__ import annotations

import math
import time
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from anaphora.tools.bench import run_checks
from anaphora.tools.bench.client import Server
from anaphora.tools.bench.figures import (
    PER,
    Figures,
    Load,
    Round,
    errors_of,
    figures_of,
    medians,
    not_none,
    peak_in_flight,
    token_hit_rate,
    ttft,
)
from anaphora.tools.bench.options import BenchOptions
from anaphora.tools.bench.workloads import shape_of
from anaphora.tools.shared.machine import commit, machine, versions

SECONDS, RATE, SHARE, HOURS, PRICE = "s", "rate", "share", "hours", "price"

# key, label, unit
ROWS = (
    ("prefill_mean_s", "prefill, mean", SECONDS),
    ("prefill_share", "prefill share", SHARE),
    ("ttft_mean_s", "TTFT mean", SECONDS),
    ("ttft_p50_s", "TTFT p50", SECONDS),
    ("ttft_p99_s", "TTFT p99", SECONDS),
    ("itl_p50_s", "ITL p50", SECONDS),
    ("requests_per_s", "requests/s", RATE),
    ("output_tokens_per_s", "output tokens/s", RATE),
    ("hit_rate", "hit rate, tokens", SHARE),
    ("hit_rate_requests", "hit rate, requests", SHARE),
    ("gpu_hours_per_100k", "", HOURS),
    ("busy_hours_per_day", "", HOURS),
    ("price_per_100k", "price per 100,000", PRICE),
    ("price_per_day", "price a day", PRICE),
    ("price_per_month", "price a month", PRICE),
)


class Report:
    """Collects the rounds; all that is shown is computed from them."""

    def __init__(self, options: BenchOptions, seed: int) -> None:
        self.options = options
        self.seed = seed
        self.rounds: dict[str, list[Round]] = {"off": [], "on": []}
        self.sweep: dict[int, dict[str, Round]] = {}
        self.servers: dict[str, dict[str, Any]] = {}
        self.model = options.model
        self.skipped = 0
        self.salted = True
        self.counted = True
        self.machine = machine()
        self._warnings: list[str] = []

    def learn(self, server: Server, side: str | None = None) -> None:
        """Notes a server's model and capabilities. Called before each use, since it may be another process by then."""
        self.model = server.model
        self.salted = self.salted and server.capabilities.salt
        self.counted = self.counted and server.capabilities.tokenize
        for note in server.capabilities.notes:
            self.warn(note)
        if side:
            self.servers[side] = {"url": server.url, "version": server.version, "model": server.model}

    def warn(self, text: str) -> None:
        """Adds a warning once."""
        if text not in self._warnings:
            self._warnings.append(text)

    @property
    def load(self) -> Load:
        """What hours and prices are computed for."""
        return Load(self.options.per_day, self.options.gpu_hour_price)

    @property
    def on_cpu(self) -> bool:
        """Whether own servers ran on a machine without a GPU. The machine behind a URL is unknown."""
        return not self.options.remote and not self.machine["gpus"]

    @property
    def failed(self) -> int:
        """Requests that failed, of all sides and of the sweep."""
        every = [seen for rounds in self.rounds.values() for seen in rounds]
        every += [seen for sides in self.sweep.values() for seen in sides.values()]
        return sum(len(seen.results) - len(seen.good) for seen in every)

    def figures(self, side: str) -> tuple[Figures, dict[str, tuple[float, float]], list[Figures]]:
        """Returns the medians, the spread, and the figures of each round."""
        each = [figures_of(seen, self.load) for seen in self.rounds[side]]
        return *medians(each), each

    @property
    def cost_ratio(self) -> float | None:
        """Hours without the cache over hours with it for the same requests: 6.3 means 6.3 times cheaper."""
        off, on = (self.figures(side)[0].get("gpu_hours_per_100k") for side in ("off", "on"))
        return off / on if off is not None and on else None

    @property
    def warnings(self) -> list[str]:
        """All that limits how far the figures can be trusted."""
        found = [*self._warnings]
        if not self.counted:
            found.append("the server has no /tokenize, so the prompt lengths are estimates")
        if self.skipped:
            found.append(f"{self.skipped} requests a round were left out: too long for the server's window")
        for side, rounds in self.rounds.items():
            found += run_checks.warnings_about(side, rounds, alone=self.options.url is not None)
        return found

    def notes(self) -> list[str]:
        """Returns what the figures mean in this run, for below the table and for the page."""
        found = [run_checks.CPU_NOTE] if self.on_cpu else []
        hours = [self.figures(side)[0].get("busy_hours_per_day") for side in ("off", "on") if self.rounds[side]]
        full = f"Hours at full load are those of {PER:,} requests at the measured rate, without a pause"
        if self._day_is_full_load:
            day = f"{full}; for as many requests a day (--per-day) they are the busy hours of a day too"
        else:
            found += [f"{full}."] if self.closed else []
            day = f"Busy hours are for {self.options.per_day:,} requests a day"
        if any(hour is not None and hour > 24 for hour in hours):
            machines = " and ".join("?" if hour is None else f"{math.ceil(hour / 24)}" for hour in hours)
            day += f"; above 24 they need several machines, at least {machines} here"
        return [*found, day + "."]

    def sweep_rows(self) -> list[dict[str, Any]]:
        """Returns prefill and time to first token at each concurrency, by side."""
        keys = ("prefill_p50_s", "prefill_mean_s", "ttft_p50_s", "requests_per_s")
        rows: list[dict[str, Any]] = []
        for concurrency, sides in self.sweep.items():
            row: dict[str, Any] = {"concurrency": concurrency}
            for side, seen in sides.items():
                figures = figures_of(seen, self.load)
                row[side] = {key: figures.get(key) for key in keys}
            rows.append(row)
        return rows

    def growth(self, key: str = "prefill_p50_s") -> dict[str, float | None]:
        """Returns by side the figure at the sweep's last concurrency over that at its first; 1 is flat."""
        rows = self.sweep_rows()
        if len(rows) < 2:
            return {}
        ends = {side: (rows[0][side][key], rows[-1][side][key]) for side in rows[0] if side != "concurrency"}
        return {side: last / first if first and last is not None else None for side, (first, last) in ends.items()}

    def as_json(self) -> dict[str, Any]:
        """Returns the report as written by --json."""
        options = self.options
        return {
            "workload": options.workload_name,
            "model": self.model,
            "machine": self.machine,
            "versions": versions(),
            "commit": commit(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seed": self.seed,
            "sizes": None if options.replay else _sizes(options),
            "server_args": list(options.server_args),
            "per_day": options.per_day,
            "gpu_hour_price": options.gpu_hour_price,
            "off": self._side("off"),
            "on": self._side("on"),
            "cost_ratio": self.cost_ratio,
            "sweep": self.sweep_rows(),
            "sweep_growth": self.growth(),
            "failed": self.failed,
            "skipped": self.skipped,
            "lengths_exact": self.counted,
            "warnings": self.warnings,
        }

    def _side(self, side: str) -> dict[str, Any] | None:
        rounds = self.rounds[side]
        if not rounds:
            return None
        middle, spread, each = self.figures(side)
        results = [result for seen in rounds for result in seen.results]
        return {
            "requests": len(rounds[0].results),
            "concurrency": self.options.concurrency if self.closed else peak_in_flight(rounds[0].results),
            "rate": self.options.rate,
            **middle,
            "hit_rate_source": token_hit_rate(rounds[-1])[1],
            "cached_tokens": sum(result.cached_tokens or 0 for result in results),
            "failed": sum(result.error is not None for result in results),
            "errors": errors_of(rounds),
            "spread": spread,
            "rounds": each,
            "ttft_s": [round(value, 6) for value in sorted(not_none([ttft(s) for seen in rounds for s in seen.good]))],
            "server": self.servers.get(side),
        }

    @property
    def closed(self) -> bool:
        """Whether a fixed number of requests was in flight (no arrival times)."""
        return self.options.rate is None and not self.options.timing

    @property
    def _day_is_full_load(self) -> bool:
        """Whether the hours of a day equal those at full load."""
        return self.closed and self.options.per_day == PER

    def label(self, key: str, label: str) -> str:
        """Returns the row's label; those of hours depend on the run."""
        hours = "machine hours" if self.on_cpu else "hours"
        if key == "gpu_hours_per_100k":
            return f"{hours} at full load" if self.closed else f"busy {hours} per 100,000"
        if key == "busy_hours_per_day":
            return f"busy {hours} a day"
        return label

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Returns (label, off, on, change) for each row of the table."""
        (off, off_spread, _), (on, on_spread, _) = self.figures("off"), self.figures("on")
        found = []
        for key, label, unit in ROWS:
            if off.get(key) is None and on.get(key) is None and unit == PRICE:
                continue
            if key == "busy_hours_per_day" and self._day_is_full_load:
                continue
            before = _cell(off.get(key), off_spread.get(key), unit)
            after = _cell(on.get(key), on_spread.get(key), unit)
            found.append((self.label(key, label), before, after, _change(off.get(key), on.get(key), unit)))
        ratio = self.cost_ratio
        if ratio:
            found.append(("cost ratio, off / on", "", "", f"{ratio:.2f} times"))
        return found


def _sizes(options: BenchOptions) -> dict[str, Any]:
    shape = shape_of(options)
    return {"shared": shape.shared, "own": shape.own, "out": shape.out, "turns": list(shape.turns)} | (
        {"tenants": shape.tenants} if shape.fresh is None else {"fresh_share": shape.fresh}
    )


def number(value: float, unit: str) -> str:
    """Returns a figure with its unit."""
    return f"{_digits(value, unit, value)}{_unit_sign(unit, value)}"


def _unit_sign(unit: str, middle: float) -> str:
    if unit == SECONDS:
        return " ms" if middle < 1 else " s"
    return {SHARE: "%", HOURS: " h"}.get(unit, "")


def _digits(value: float, unit: str, middle: float) -> str:
    """Returns ``value`` in the unit that fits ``middle``."""
    if unit == SHARE:
        return f"{value * 100:.1f}"
    if unit == SECONDS:
        return f"{value * 1000:.0f}" if middle < 1 else f"{value:.2f}"
    if unit == HOURS:
        return f"{value:,.1f}"
    return f"{value:,.2f}" if middle < 100 else f"{value:,.0f}"


def _cell(value: float | None, spread: tuple[float, float] | None, unit: str) -> str:
    """Returns a figure with its unit, and the smallest and largest value if they differ."""
    if value is None:
        return "unknown"
    ends = [_digits(end, unit, value) for end in spread or (value, value)]
    return number(value, unit) + (f" ({ends[0]}–{ends[1]})" if ends[0] != ends[1] else "")


def _change(off: float | None, on: float | None, unit: str) -> str:
    if off is None or on is None:
        return ""
    if unit == SHARE:
        return f"{(on - off) * 100:+.1f} points"
    if not off:
        return ""
    return f"{on / off:.2f} times" if unit == RATE else f"{on / off - 1:+.0%}"


def print_report(report: Report, console: Console) -> None:
    """Prints the table, the sweep, the notes and the warnings."""
    options = report.options
    alone = options.url is not None
    first = next((seen for rounds in report.rounds.values() for seen in rounds), None)
    requests = len(first.results) if first else 0
    load = f"{options.rate:g} requests/s" if options.rate else f"concurrency {options.concurrency}"
    load = "the log's own times" if options.timing else load
    rounds = len(report.rounds["on"])
    console.print(
        f"{options.workload_name} on {report.model}: {requests} requests, {load}; "
        + ("1 round" if rounds == 1 else f"median of {rounds} rounds (smallest–largest)"),
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title in ("server",) if alone else ("off", "on", "change"):
        table.add_column(title, justify="right", no_wrap=True)
    for label, off, on, change in report.rows():
        table.add_row(label, *((on,) if alone else (off, on, change)))
    console.print(table)
    if report.sweep:
        console.print(_sweep_table(report))
    for note in report.notes():
        console.print(note, highlight=False)
    for warning in report.warnings:
        console.print(f"[bold yellow]![/bold yellow] {warning}", highlight=False)


def _sweep_table(report: Report) -> Table:
    table = Table(
        title="prefill p50 (time to first token p50) by concurrency", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("concurrency", justify="right")
    sides = [side for side in ("off", "on") if any(side in sides for sides in report.sweep.values())]
    for side in sides:
        table.add_column(side, justify="right")
    for row in report.sweep_rows():
        cells = [[row[side][key] for key in ("prefill_p50_s", "ttft_p50_s")] for side in sides]
        table.add_row(
            str(row["concurrency"]), *(f"{_cell(a, None, SECONDS)} ({_cell(b, None, SECONDS)})" for a, b in cells)
        )
    growths = [report.growth(key) for key in ("prefill_p50_s", "ttft_p50_s")]
    if growths[0]:
        cells = [[growth[side] for growth in growths] for side in sides]
        table.add_row(
            "last / first", *(" (".join(f"{g:.2f}" if g else "unknown" for g in pair) + ")" for pair in cells)
        )
    return table

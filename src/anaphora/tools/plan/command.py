"""``anaphora plan``: reads the calibration, prints the estimate without and with the cache."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from anaphora.errors import ConfigError
from anaphora.tools.plan.calibration import Calibration, read
from anaphora.tools.plan.estimate import Estimate, Workload, cost, estimate
from anaphora.tools.plan.options import PlanOptions

MEASURED, COMPUTED, EXTRAPOLATED = "measured", "computed", "extrapolated"


def run(options: PlanOptions) -> int:
    """Prints the estimate and returns the exit code. Raises ConfigError if nothing can be computed."""
    published = read()
    if options.card not in published["calibration"]:
        there = " and ".join(published["calibration"])
        raise ConfigError(f"{published['source']} has no calibration of card {options.card}, but {there}", param="card")
    found = figures(published, options)
    if options.json is not None:
        try:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write --json {options.json}: {error}", param="json") from error
    _show(found, options)
    return 0


def figures(published: dict[str, Any], options: PlanOptions) -> dict[str, Any]:
    """Returns all that is printed. ``off`` and ``on`` hold the figures and, in ``basis``, where each comes from."""
    calibration = Calibration.of(published["calibration"][options.card])
    workload = Workload(options.shared, options.own, options.out)
    sides = {
        name: _side(published, options, caching, estimate(calibration, workload, caching=caching))
        for name, caching in (("off", False), ("on", True))
    }
    return {
        "workload": asdict(workload) | {"per_day": options.per_day, "peak_factor": options.peak_factor},
        "card": options.card,
        "device": published["machine"]["device"],
        "source": published["source"],
        **sides,
        "cost_ratio": round(sides["off"]["gpu_hours_a_day"] / sides["on"]["gpu_hours_a_day"], 2),
    }


def _side(published: dict[str, Any], options: PlanOptions, caching: bool, found: Estimate) -> dict[str, Any]:
    """Figures of one side; measured ones if a row of the benchmark had the same workload."""
    rate, hit_rate, sequences = found.requests_per_s, found.hit_rate, found.sequences
    asked = [options.card, options.shared, options.own, options.out, caching]
    rows = [row for row in published["measured"] if [row[name] for name in _SAME] == asked]
    if rows:
        best = max(rows, key=lambda row: row["requests_per_s"])
        rate, hit_rate = best["requests_per_s"], best["hit_rate"]
        sequences = min(best["requests"], sequences)  # the row sent no more requests than that
    rest = COMPUTED if rows or found.within else EXTRAPOLATED
    spent = cost(rate, options.per_day, options.peak_factor, options.gpu_hour_price)
    return {
        "hit_rate": round(hit_rate, 4),
        "sequences": sequences,
        "requests_per_s": round(rate, 3),
        **asdict(spent),
        "basis": {
            "hit_rate": MEASURED if rows else COMPUTED,
            "requests_per_s": MEASURED if rows else rest,
            "the rest": rest,
        },
    }


_SAME = ("card", "shared", "own", "out", "caching")


def _show(found: dict[str, Any], options: PlanOptions) -> None:
    console = Console(highlight=False)
    held = ", held to 24 GiB" if options.card == "24g" else ""
    console.print(
        f"{options.shared:,} shared + {options.own:,} own tokens, answers of {options.out:,}, "
        f"{options.per_day:,} requests a day\n"
        f"one {found['device']}{held}, a model of Qwen3-8B's shape in bfloat16\n"
        f"calibrated by {found['source']}"
    )
    table = Table(box=None, pad_edge=False)
    for name, justify in (("", "left"), ("off", "right"), ("on", "right"), ("off / on", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for title, name, show in _lines(options):
        cells = [show(found[side][name]) for side in ("off", "on")]
        bases = [found[side]["basis"].get(name, found[side]["basis"]["the rest"]) for side in ("off", "on")]
        table.add_row(title, *cells, bases[0] if bases[0] == bases[1] else " / ".join(bases))
    console.print(table)
    console.print(f"cost ratio {found['cost_ratio']:.1f}: that many times cheaper with the cache")


def _lines(options: PlanOptions) -> list[tuple[str, str, Any]]:
    lines: list[tuple[str, str, Any]] = [
        ("hit rate in tokens", "hit_rate", lambda x: f"{x:.1%}"),
        ("requests at once", "sequences", lambda x: f"{x:,}"),
        ("requests/s of one GPU", "requests_per_s", lambda x: f"{x:,.2f}"),
        ("GPU hours a day", "gpu_hours_a_day", _amount),
    ]
    if options.gpu_hour_price is not None:
        lines += [
            ("price a day", "price_a_day", _amount),
            ("price a month", "price_a_month", _amount),
        ]
    return [*lines, (f"GPUs at the peak ({options.peak_factor:g} × the mean)", "gpus_at_peak", lambda x: f"{x:,}")]


def _amount(value: float) -> str:
    """Formats with two decimals, small amounts with two significant digits."""
    return f"{value:.2g}" if 0 < value < 0.1 else f"{value or 0:,.2f}"

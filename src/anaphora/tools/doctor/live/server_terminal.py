"""Prints a server's figures at a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

UNKNOWN = "unknown"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.2f} s"


def _range(value: dict[str, float]) -> str:
    least, most = value["at_least"], value["at_most"]
    return _share(least) if most - least < 0.0005 else f"{least:.1%} to {most:.1%}"


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("requests scheduled", "requests_scheduled", _count),
    ("requests ended", "requests", _count),
    ("prompt tokens", "prompt_tokens", _count),
    ("prompt, mean", "mean_prompt", _count),
    ("hit rate, {unit}", "hit_rate", _share),
    ("more from external caches", "external_rate", _share),
    ("hit rate, requests", "requests_hit", _range),
    ("prefill, mean", "prefill_s", _seconds),
    ("prefill's share of the latency", "prefill_share", _share),
    ("queue, mean", "queue_s", _seconds),
    ("time to first token, mean", "ttft_s", _seconds),
    ("latency, mean", "latency_s", _seconds),
    ("preemptions", "preemptions", _count),
)
_PER_REQUEST = {"mean_prompt", "hit_rate", "requests_hit", "prefill_s", "prefill_share", "queue_s", "ttft_s"}
_PER_REQUEST |= {"latency_s", "external_rate"}
_OPTIONAL = {"requests_scheduled", "external_rate"}
"""Rows that are left out if the server does not report them."""


def show(data: dict[str, Any], console: Console) -> None:
    """Prints the values of ``server_figures.figures`` with the advice."""
    console.print(Text(_title(data), style="bold"))
    console.print(_line("caching", _caching(data)))
    if data["old"]["because"]:
        word = {True: "too old: ", False: "", None: "unknown: "}[data["old"]["too_old"]]
        console.print(_line("version", word + data["old"]["because"]))
    console.print(_line("KV cache", _cache(data["cache"])))
    for name in ("running", "waiting"):
        load = data["load"][name]
        said = UNKNOWN if load is None else f"{load['mean']:,.1f} on average, {load['most']:,.0f} at most"
        console.print(_line(name, said))
    console.print()
    console.print(_table(data))
    for part in data["parts"]:
        rate = UNKNOWN if part["hit_rate"] is None else _share(part["hit_rate"])
        name = f"{part['model']} {'engine ' + part['engine'] if part['engine'] else ''}".strip()
        console.print(_line(f"  {name}", f"hit rate {rate}"))
    if data["misses"]:
        why = ", ".join(f"{count:,} {reason}" for reason, count in data["misses"].items())
        console.print(_line("why not more", f"{why} (of the requests scheduled)"))
    if data["sizes"]:
        rates = ", ".join(f"{rate:.1%} at {size:g} times its size" for size, rate in data["sizes"].items())
        console.print(_line("the cache", f"hit rate since the start {rates}"))
    for note in data["notes"]:
        console.print(Text(f"note: {note}", style="yellow"))
    _show_advice(data["advice"], console)


def _title(data: dict[str, Any]) -> str:
    engines = f", {data['engines']} engines" if data["engines"] > 1 else ""
    models = ", ".join(data["models"]) or "a model without a name"
    return f"{data['engine']} {data['version'] or '(version unknown)'} at {data['url']}: {models}{engines}"


def _line(name: str, text: str) -> Text:
    return Text(f"{name:13}", style="dim") + Text(text)


def _caching(data: dict[str, Any]) -> str:
    word = {True: "on", False: "OFF", None: UNKNOWN}[data["caching"]["on"]]
    return f"{word} ({data['caching']['because']})"


def _cache(cache: dict[str, Any]) -> str:
    parts = []
    if cache["blocks"] is not None and cache["block_size"] is not None:
        parts.append(f"{cache['blocks']:,} blocks of {cache['block_size']:,} tokens")
    elif cache["block_size"] is not None:
        parts.append(f"blocks of {cache['block_size']:,} tokens, their number unknown")
    else:
        parts.append("blocks and their size unknown")
    if cache["tokens"] is not None:
        parts.append(f"{cache['tokens']:,} tokens in all")
    if cache["dtype"]:
        parts.append("in the model's own data type" if cache["dtype"] == "auto" else f"in {cache['dtype']}")
    if cache["used_mean"] is None:
        parts.append("use unknown")
    else:
        parts.append(
            f"{cache['used_mean']:.0%} in use by running requests on average, {cache['used_most']:.0%} at most"
        )
    return ", ".join(parts)


def _table(data: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("")
    windows = [(f"in {data['seconds']:.0f} s", data["sample"]), ("since its start", data["since_start"])]
    windows = [(name, window) for name, window in windows if window is not None]
    for name, _ in windows:
        table.add_column(name, justify="right")
    unit = next((window["unit"] for _, window in windows if window["unit"]), "tokens")
    for title, key, form in _ROWS:
        if key in _OPTIONAL and not any(window[key] for _, window in windows):
            continue
        table.add_row(title.format(unit=unit), *(_cell(window, key, form) for _, window in windows))
    return table


def _cell(window: dict[str, Any], key: str, form: Callable[[Any], str]) -> str:
    if window[key] is not None:
        return form(window[key])
    nothing = window["requests"] == 0 or window["looked_up"] == 0
    return "–" if key in _PER_REQUEST and nothing else UNKNOWN


def _show_advice(advice: list[dict[str, str]], console: Console) -> None:
    if not advice:
        console.print("\nNothing to do.")
        return
    console.print("\nWhat to do next:", style="bold")
    for number, step in enumerate(advice, 1):
        console.print(Text(f"{number}. {step['title']}", style="bold") + Text(f": {step['why']}", style="not bold"))
        console.print(Text(f"   {step['do']}"))

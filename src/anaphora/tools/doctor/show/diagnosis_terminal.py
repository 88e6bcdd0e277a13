"""Prints the diagnosis at a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from anaphora.tools.doctor.show.marked_text import marked

_LIMITS = {
    "cold": "first of their kind: nothing like them came before",
    "ended": "reuse ends where their own new text begins",
    "block_too_large": "share less than one block",
    "cache_too_small": "would hit more in a larger cache",
    "routing_key": "match only another model, salt or cache key",
}
_COSTLESS = {
    "suspected": "Changes, but mending it saves nothing in this log:",
    "latent": "Has not changed in this log, but will:",
}


def counted(number: int, noun: str) -> str:
    """Returns "1 request", "2,000 requests"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def show(data: dict[str, Any], console: Console) -> None:
    """Prints the values of ``diagnosis_json.as_json``."""
    console.print(
        f"{counted(data['requests'], 'request')} in {counted(data['conversations'], 'conversation')}, "
        f"{data['prompt_tokens']:,} prompt tokens (by {data['tokenizer']})",
        highlight=False,
    )
    line = f"hit rate {data['hit_rate']:.1%}"
    if data["best_hit_rate"] > data["hit_rate"] + 0.0005:
        line += f", {data['best_hit_rate']:.1%} with the repairs below"
    console.print(Text(line + " (unlimited cache)", style="bold"))
    if limited := data.get("limited"):
        console.print(f"hit rate {limited['hit_rate']:.1%} with a cache of {limited['cache_tokens']:,} tokens")
    if baseline := data.get("baseline"):
        _show_baseline(baseline, data, console)
    if reported := data["reported"]:
        _show_reported(reported, console)
    for warning in data["warnings"]:
        console.print(Text(f"note: {warning}", style="yellow"))
    breaks = data["breaks"]
    confirmed = [item for item in breaks if item["status"] == "confirmed"]
    if not confirmed:
        console.print("nothing to mend")
    for number, item in enumerate(confirmed, 1):
        show_break(number, item, data, console)
    for status, title in _COSTLESS.items():
        if items := [item for item in breaks if item["status"] == status]:
            console.print(f"\n{title}", highlight=False)
        for item in items:
            console.print(Text(f"  {item['class']} in {_where(item)}: ") + _context(item, console), highlight=False)
            console.print(f"    {item['varies']}; {item['repair']}", highlight=False, markup=False)
    limits = ", ".join(f"{count} {_LIMITS[name]}" for name, count in data["limits"].items() if count)
    console.print(f"\nOther requests: {limits or 'none'}", highlight=False)


def _show_baseline(baseline: dict[str, Any], data: dict[str, Any], console: Console) -> None:
    for route in baseline["routes"]:
        change = f"{route['hit_rate_before']:.1%} in the earlier log, {route['hit_rate']:.1%} now"
        text = Text(f"{route['route']}: {change}" + (": a regression" if route["regression"] else ""))
        console.print(text, style="bold red" if route["regression"] else "none", highlight=False)
    for index in baseline["new_breaks"]:
        item = data["breaks"][index]
        console.print(f"  new since then: {item['class']} in {_where(item)}", highlight=False, markup=False)


def _show_reported(reported: dict[str, Any], console: Console) -> None:
    rate = "no cached tokens told" if reported["hit_rate"] is None else f"hit rate {reported['hit_rate']:.1%}"
    price = "" if reported["price"] is None else f", price {reported['price']:,.4f}"
    console.print(
        f"the log itself reports: {reported['prompt_tokens']:,} prompt tokens, {rate}{price}", highlight=False
    )


def _where(item: dict[str, Any]) -> str:
    if item["message"] < 0:
        return f"{item['path']} (in the template)" if item["role"] == "template" else str(item["path"])
    return f"message {item['message']} ({item['role']}), characters {item['start']} to {item['end']}"


def _context(item: dict[str, Any], console: Console) -> Text:
    return marked(((part["text"], part["changes"]) for part in item["context"]), console)


def show_break(number: int, item: dict[str, Any], data: dict[str, Any], console: Console) -> None:
    """Prints one of the JSON's ``breaks`` with its cost and repair; ``number`` is shown before it."""
    share = item["tokens_lost"] / max(1, data["prompt_tokens"])
    head = Text(f"\n{number}. {item['class']}", style="bold red")
    head.append(f" in {_where(item)}", style="bold")
    console.print(head)
    console.print(Text("   ") + _context(item, console))
    note = f"; {item['note']}" if item["note"] else ""
    console.print(f"   {item['varies']}{note}", highlight=False, markup=False)
    cost = f"   costs {item['tokens_lost']:,} tokens ({share:.1%}) in {counted(item['requests'], 'request')}"
    if item["seconds_lost"] is not None:
        cost += f", {item['seconds_lost']:,.1f} s of prefill"
    if "tokens_a_day" in item:
        cost += f"; {item['tokens_a_day']:,.0f} tokens a day"
    if "seconds_a_day" in item:
        cost += f", {item['seconds_a_day']:,.0f} s a day"
    if "cost_a_day" in item:
        cost += f", {item['cost_a_day']:,.2f} a day"
    console.print(cost, highlight=False)
    console.print(
        f"   repair: {item['repair']} (hit rate then {item['predicted_hit_rate']:.1%})", highlight=False, markup=False
    )


def show_fix(name: str, fixed: dict[str, Any], console: Console) -> None:
    """Prints what ``--fix`` wrote to the file ``name``, and what moved in it."""
    console.print(
        f"\n{name}: {counted(fixed['requests'], 'request')}, {fixed['changed']:,} of them changed", highlight=False
    )
    for move in fixed["moved"]:
        what = ", ".join(repr(sample) for sample in move["samples"])
        console.print(
            f"  {move['class']} ({counted(move['requests'], 'request')}): {what}: {move['from']} -> {move['to']}",
            highlight=False,
            markup=False,
        )
    for left in fixed["left"]:
        rest = f"  {left['class']} in {left['place']} is still there: mend it where the request is made"
        console.print(rest, highlight=False, markup=False)
    for template in fixed["templates"]:
        console.print(f"  {template}: the prompt with placeholders", highlight=False)

"""Turns the diagnosis into plain values, which the JSON file, the terminal and the page show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anaphora.tools.doctor.options import DoctorOptions
from anaphora.tools.doctor.price.breaks import Break
from anaphora.tools.doctor.price.diagnose import Diagnosis
from anaphora.tools.doctor.read.prompts import Prompt
from anaphora.tools.shared.money import TokenPrices

NO_GAIN = (
    "leave it: mending it would save nothing here, since an automatic prefix cache reuses all that stands before it "
    "(only providers with explicit cache marks lose that too)"
)


def as_json(diagnosis: Diagnosis, options: DoctorOptions, prices: dict[str, TokenPrices]) -> dict[str, Any]:
    """Returns all figures: tokens, seconds, rates from 0 to 1, money in the currency of ``prices``."""
    log, before = diagnosis.log, diagnosis.before
    rate = options.prefill_rate or measured_rate(log.prompts, before.tokens)
    data: dict[str, Any] = {
        "requests": len(log.prompts),
        "conversations": diagnosis.conversations,
        "prompt_tokens": before.total,
        "hit_rate": before.hit_rate,
        "best_hit_rate": diagnosis.best.hit_rate,
        "tokenizer": log.model.name,
        "block_size": options.block_size,
        "prefill_tokens_per_s": rate,
        "breaks": [_break(item, diagnosis, options, rate) for item in diagnosis.breaks],
        "limits": dict(diagnosis.limits),
        "reported": reported(log.prompts, prices),
        "bad_lines": {"count": log.bad_lines, "first": [{"line": n, "why": why} for n, why in log.bad]},
        "warnings": _warnings(diagnosis, options, rate),
    }
    if diagnosis.limited is not None:
        data["limited"] = {"cache_tokens": options.cache_tokens, "hit_rate": diagnosis.limited.hit_rate}
    return data


def _break(item: Break, diagnosis: Diagnosis, options: DoctorOptions, rate: float | None) -> dict[str, Any]:
    finding = item.finding
    seconds = None if rate is None else item.tokens_lost / rate
    advice = item.repair.advice if item.repair else finding.repairs[0].advice if finding.seen == 0 else NO_GAIN
    data = {
        "class": finding.kind,
        "status": item.status,
        "message": finding.location.message,
        "role": finding.location.role,
        "path": finding.location.path,
        "start": finding.location.start,
        "end": finding.location.end,
        "line": finding.line,
        "samples": finding.samples,
        "context": [{"text": text, "changes": changes} for text, changes in finding.location.context],
        "varies": finding.varies,
        "note": finding.note,
        "requests": item.requests,
        "seen": finding.seen,
        "tokens_lost": item.tokens_lost,
        "seconds_lost": seconds,
        "predicted_hit_rate": item.predicted_hit_rate,
        "place": item.repair.destination if item.repair else None,
        "repair": advice,
    }
    if options.per_day:
        days = options.per_day / len(diagnosis.log.prompts)
        data["tokens_a_day"] = item.tokens_lost * days
        if seconds is not None:
            data["seconds_a_day"] = seconds * days
            if options.gpu_hour_price:
                data["cost_a_day"] = seconds * days / 3600 * options.gpu_hour_price
    return data


def measured_rate(prompts: Sequence[Prompt], tokens: Sequence[int]) -> float | None:
    """Returns the prompt tokens computed per second of prefill according to the log; None if it has no times."""
    computed = seconds = 0.0
    for prompt, length in zip(prompts, tokens, strict=True):
        if prompt.prefill_s:
            seconds += prompt.prefill_s
            usage = prompt.usage
            computed += usage.prompt - (usage.cached or 0) if usage else length
    return computed / seconds if seconds > 0 and computed > 0 else None


def reported(prompts: Sequence[Prompt], prices: dict[str, TokenPrices]) -> dict[str, Any] | None:
    """Sums up the log's own usage records; None if it has none."""
    used = [(prompt, prompt.usage) for prompt in prompts if prompt.usage is not None]
    if not used:
        return None
    known = [usage for _, usage in used if usage.cached is not None]
    total = sum(usage.prompt for _, usage in used)
    cached = sum(usage.cached or 0 for usage in known)
    asked = sum(usage.prompt for usage in known)
    priced = [(usage, prices.get(prompt.model, prices.get("*"))) for prompt, usage in used]
    price = sum(entry.price(usage) for usage, entry in priced if entry is not None)
    return {
        "requests": len(used),
        "prompt_tokens": total,
        "cached_tokens": cached if known else None,
        "hit_rate": cached / asked if asked else None,
        "price": price if any(entry is not None for _, entry in priced) else None,
        "unpriced_requests": sum(entry is None for _, entry in priced) if prices else 0,
    }


def _warnings(diagnosis: Diagnosis, options: DoctorOptions, rate: float | None) -> list[str]:
    log = diagnosis.log
    found = []
    if options.gpu_hour_price and not options.per_day:
        found.append("--gpu-hour-price needs --per-day: without it there is no cost of a day")
    elif options.per_day and rate is None:
        found.append(
            "what breaks cost a day is told in tokens only, since the log has no times of prefill: "
            "say with --prefill-rate how many prompt tokens the machine computes in a second"
        )
    if log.dropped_tools:
        found.append(
            f"the chat template does not show the tools of {log.dropped_tools} requests: "
            "name the model's own with --model or --chat-template"
        )
    if log.bad_lines:
        number, why = log.bad[0]
        found.append(f"lines that could not be used: {log.bad_lines}; the first is line {number}: {why}")
    return found

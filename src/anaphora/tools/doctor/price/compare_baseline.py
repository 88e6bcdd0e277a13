"""Compares a log with an earlier one of the same application: which routes have become worse, and by which break."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from anaphora.tools.doctor.price.breaks import Break
from anaphora.tools.doctor.price.diagnose import Diagnosis

MIN_FALL = 0.02
"""A smaller fall of the hit rate may be chance."""


def compare(before: Diagnosis, after: Diagnosis) -> dict[str, Any]:
    """Returns the hit rates of both logs, in all and by route (path and model), and the breaks that are new.

    ``new_breaks`` are indices into the later log's breaks. Routes that only one log has are not compared.
    """
    old, new = _routes(before), _routes(after)
    known = {_identity(item) for item in before.breaks if item.status == "confirmed"}
    routes = [
        {
            "route": " ".join(part for part in route if part) or "all",
            "requests": new[route][2],
            "hit_rate_before": _rate(old[route]),
            "hit_rate": _rate(new[route]),
            "regression": _rate(new[route]) < _rate(old[route]) - MIN_FALL,
        }
        for route in sorted(new.keys() & old.keys())
    ]
    return {
        "requests": len(before.log.prompts),
        "hit_rate": before.before.hit_rate,
        "best_hit_rate": before.best.hit_rate,
        "regression": any(route["regression"] for route in routes),
        "routes": routes,
        "new_breaks": [
            index
            for index, item in enumerate(after.breaks)
            if item.status == "confirmed" and _identity(item) not in known
        ],
    }


def _routes(diagnosis: Diagnosis) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Returns (cached tokens, tokens, requests) by (path, model)."""
    found: dict[tuple[str, str], tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    outcome = diagnosis.before
    for prompt, tokens, cached in zip(diagnosis.log.prompts, outcome.tokens, outcome.cached, strict=True):
        hits, total, count = found[prompt.route, prompt.model]
        found[prompt.route, prompt.model] = hits + cached, total + tokens, count + 1
    return found


def _rate(sums: tuple[int, int, int]) -> float:
    return sums[0] / max(1, sums[1])


def _identity(item: Break) -> tuple[str, int, str]:
    return item.finding.kind, item.finding.location.message, item.finding.location.role

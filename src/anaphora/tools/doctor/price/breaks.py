"""Breaks: findings with what mending them saves, and the rules for when a saving counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.tools.doctor.find.findings import Finding, Repair
from anaphora.tools.doctor.price.rerun_log import Outcome

MIN_SHARE = 0.004
"""A repair must save at least this share of all prompt tokens …"""
MIN_TOKENS = 8
"""… and on average at least this many tokens in each request that gains."""
NOISE_TOKENS = 2
"""Repairs whose savings differ by at most this many tokens a request count as equal; the first of them is proposed."""
FEW_REQUESTS = 20
"""In a log of at least this length, a repair that helps one request only may be chance."""
_COMES_AGAIN = ("date", "clock_time", "version")
"""Classes of values that are certain to change again, even if this log shows only one change."""


@dataclass(slots=True)
class Break:
    """A finding with its price.

    ``repair`` is the best of the finding's repairs, or None if none is worth it. ``tokens_lost`` is what it saves once
    the breaks at earlier positions of the prompt are mended, in ``requests`` requests. ``status`` is ``confirmed`` if
    the log shows the change and the repaired log shows the saving; ``suspected`` if mending saves nothing here, or in
    one request only; ``latent`` if the value has not changed yet.
    """

    finding: Finding
    repair: Repair | None
    tokens_lost: int
    requests: int
    predicted_hit_rate: float
    status: str


def without_price(finding: Finding, before: Outcome, status: str) -> Break:
    """Returns a break whose repair saves nothing in the log as it is (``before``)."""
    return Break(finding, None, 0, 0, before.hit_rate, status)


def num_gaining(findings: Sequence[Finding], before: Outcome, current: Outcome, after: Outcome) -> int:
    """Counts the requests that gain when ``current`` becomes ``after`` by mending ``findings``.

    Returns 0 if they save too little or the saving may be chance. ``before`` is the log as it is.
    """
    saved = current.computed - after.computed
    gaining = sum(
        (n - c) - (m - d) >= MIN_TOKENS
        for n, c, m, d in zip(current.tokens, current.cached, after.tokens, after.cached, strict=True)
    )
    certain = any(finding.kind in _COMES_AGAIN for finding in findings)
    if gaining <= 1 and len(before.tokens) >= FEW_REQUESTS and not certain:
        return 0
    return gaining if saved >= max(MIN_SHARE * before.total, MIN_TOKENS * gaining) else 0


def noise(before: Outcome) -> int:
    """Returns the tokens by which equally good repairs may differ, such as for a line break in one of them only."""
    return NOISE_TOKENS * len(before.tokens)


def predicted_rate(before: Outcome, saved: int, longer: int) -> float:
    """Returns the hit rate if ``saved`` fewer tokens are computed and prompts grow by ``longer`` tokens in all."""
    return 1 - (before.computed - saved) / max(1, before.total + longer)

"""A running server's /metrics page: one figure under the names that each engine and each of its versions gives it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]

ENGINES = ("anaphora", "vllm", "sglang", "llamacpp")
"""Beginnings of metric names, the most telling first: Anaphora has vLLM's names too."""

_RENAMED = re.compile(r"^(?:ray_)?(vllm|sglang|llamacpp|anaphora)[:_]")
"""Ray cannot have colons in names."""

HIT_PAIRS = (
    ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    ("vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total"),
    ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total"),
    ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
)
"""(looked up, found), today's names first; a rate is taken from one pair, never across two."""

MOST = 1e30
"""No counter and no gauge is larger."""

HIT_RATE_GAUGE = "vllm:gpu_prefix_cache_hit_rate"
"""vLLM's V0 engine: a share since the start, below 0 where caching is off."""


@dataclass(frozen=True, slots=True)
class Page:
    """Samples by name and labels, and the help text of each family. A family may be declared without a sample."""

    samples: Mapping[str, Mapping[Labels, float]]
    help: Mapping[str, str] = field(default_factory=dict)

    def engine(self) -> str | None:
        """Which of ENGINES this is a page of."""
        known = {name.partition(":")[0] for name in (*self.samples, *self.help)}
        return next((engine for engine in ENGINES if engine in known), None)

    def has(self, name: str) -> bool:
        return name in self.samples or name.removesuffix("_total") in self.help

    def series(self, name: str) -> Mapping[Labels, float]:
        return self.samples.get(name, {})

    def total(self, *names: str) -> float | None:
        """Sum over all label sets of the first of ``names`` that is there; None where none is."""
        name = self.first(*names)
        return None if name is None else math.fsum(self.series(name).values())

    def most(self, *names: str) -> float | None:
        """The largest value over all label sets of the first of ``names`` that is there."""
        name = self.first(*names)
        return max(self.series(name).values(), default=None) if name is not None else None

    def first(self, *names: str) -> str | None:
        return next((name for name in names if self.has(name)), None)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for labels in self.series(name)]


def parse(text: str) -> Page:
    """A page in Prometheus' text format. ValueError where it is none.

    Samples with a value that nothing counted can have, and buckets without a bound, are left out.
    """
    samples: dict[str, dict[Labels, float]] = {}
    texts: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        texts[_RENAMED.sub(r"\1:", family.name)] = family.documentation
        for sample in family.samples:
            bounded = not sample.name.endswith("_bucket") or number(sample.labels.get("le")) is not None
            if abs(sample.value) <= MOST and bounded:
                named = samples.setdefault(_RENAMED.sub(r"\1:", sample.name), {})
                named[tuple(sorted(sample.labels.items()))] = sample.value
    return Page(samples, texts)


def number(text: str | None) -> float | None:
    """What a label says; None where it is no number."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return None if math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class Growth:
    """What a page's counters have gained over an earlier page; over none: since the server's start.

    A counter below its earlier value was reset: then all that it shows was gained since. One that the earlier page
    lacked began at 0.
    """

    after: Page
    before: Page | None = None

    def total(self, *names: str) -> float | None:
        name = self.after.first(*names)
        return None if name is None else math.fsum(value for _, value in self.by_labels(name))

    def by_labels(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        earlier = self.before.series(name) if self.before is not None else {}
        for labels, value in self.after.series(name).items():
            start = earlier.get(labels, 0.0)
            yield dict(labels), value - start if value >= start else value

    def mean(self, *histograms: str, **where: str) -> float | None:
        """Mean of the first histogram that is there, of its series with the labels ``where``; None without samples."""
        name = next((name for name in histograms if self.after.has(f"{name}_count")), None)
        count, sum_ = (
            math.fsum(value for labels, value in self.by_labels(f"{name}_{part}") if where.items() <= labels.items())
            for part in ("count", "sum")
        )
        return sum_ / count if count else None

    def at_most(self, histogram: str) -> dict[float, float]:
        """Observations up to each bucket's bound, over all label sets."""
        found: dict[float, float] = {}
        for labels, value in self.by_labels(f"{histogram}_bucket"):
            bound = float(labels["le"])
            found[bound] = found.get(bound, 0.0) + value
        return found

    def resets(self) -> bool:
        """Whether a counter fell in between: the server was started anew."""
        if self.before is None:
            return False
        counters = (name for name in self.after.samples if name.endswith(("_total", "_count")))
        return any(
            value < self.before.series(name).get(labels, 0.0)
            for name in counters
            for labels, value in self.after.series(name).items()
        )


@dataclass(frozen=True, slots=True)
class Hits:
    """``unit`` is "tokens" or "blocks". ``found`` is None where only the number looked up is told."""

    looked_up: float
    found: float | None
    unit: str

    @property
    def rate(self) -> float | None:
        return self.found / self.looked_up if self.found is not None and self.looked_up else None


def hits(growth: Growth) -> Hits | None:
    """What was looked up in the prefix cache and found, by the first pair of counters that the server has."""
    page = growth.after
    for queries, found in HIT_PAIRS:
        if page.has(queries) and page.has(found):
            told = page.help.get(queries.removesuffix("_total"), "")
            return Hits(growth.total(queries) or 0.0, growth.total(found), "blocks" if "blocks" in told else "tokens")
    prompt = growth.total("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
    return None if prompt is None else Hits(prompt, None, "tokens")

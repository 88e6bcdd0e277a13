"""Parses a running server's /metrics page: one figure under the names of each engine and version."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]

ENGINES = ("anaphora", "vllm", "sglang", "llamacpp")
"""Prefixes of metric names. Anaphora is first because it exports vLLM's names too."""

_RENAMED = re.compile(r"^(?:ray_)?(vllm|sglang|llamacpp|anaphora)[:_]")
"""Ray replaces the colons in names."""

HIT_PAIRS = (
    ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    ("vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total"),
    ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total"),
    ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
)
"""(looked up, found), current names first; a rate is computed within one pair, never across two."""

MOST = 1e30
"""Larger values are not counts: they are ignored."""

HIT_RATE_GAUGE = "vllm:gpu_prefix_cache_hit_rate"
"""vLLM's V0 engine: hit rate since the start, below 0 if caching is off."""


@dataclass(frozen=True, slots=True)
class Page:
    """Samples by name and labels, and the help text of each family, which may have no samples."""

    samples: Mapping[str, Mapping[Labels, float]]
    help: Mapping[str, str] = field(default_factory=dict)

    def engine(self) -> str | None:
        """Returns which of ENGINES wrote the page; None if it is another."""
        known = {name.partition(":")[0] for name in (*self.samples, *self.help)}
        return next((engine for engine in ENGINES if engine in known), None)

    def has(self, name: str) -> bool:
        """Returns whether the metric is there, with or without samples."""
        return name in self.samples or name.removesuffix("_total") in self.help

    def series(self, name: str) -> Mapping[Labels, float]:
        """Returns the values of a metric by their labels."""
        return self.samples.get(name, {})

    def total(self, *names: str) -> float | None:
        """Returns the sum over all label sets of the first of ``names`` that is there; None if none is."""
        name = self.first(*names)
        return None if name is None else math.fsum(self.series(name).values())

    def most(self, *names: str) -> float | None:
        """Returns the largest value over all label sets of the first of ``names`` that is there."""
        name = self.first(*names)
        return max(self.series(name).values(), default=None) if name is not None else None

    def first(self, *names: str) -> str | None:
        """Returns the first of ``names`` that is there."""
        return next((name for name in names if self.has(name)), None)

    def labels(self, name: str) -> list[dict[str, str]]:
        """Returns all label sets of a metric."""
        return [dict(labels) for labels in self.series(name)]


def parse(text: str) -> Page:
    """Parses a page in Prometheus' text format. Raises ValueError if it is not one.

    Samples above MOST and buckets without a bound are left out.
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
    """Parses a number in a label; None if it is not one."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return None if math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class Growth:
    """How much counters grew between an earlier page and a later one, or since the server's start.

    A counter below its earlier value was reset, so all of its value is growth. A counter that the earlier page lacks
    started at 0.
    """

    after: Page
    before: Page | None = None

    def total(self, *names: str) -> float | None:
        """Returns the growth over all label sets of the first of ``names`` that is there."""
        name = self.after.first(*names)
        return None if name is None else math.fsum(value for _, value in self.by_labels(name))

    def by_labels(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yields the growth of each label set."""
        earlier = self.before.series(name) if self.before is not None else {}
        for labels, value in self.after.series(name).items():
            start = earlier.get(labels, 0.0)
            yield dict(labels), value - start if value >= start else value

    def mean(self, *histograms: str, **where: str) -> float | None:
        """Returns the mean of the first histogram that is there, over series with the labels ``where``."""
        name = next((name for name in histograms if self.after.has(f"{name}_count")), None)
        count, sum_ = (
            math.fsum(value for labels, value in self.by_labels(f"{name}_{part}") if where.items() <= labels.items())
            for part in ("count", "sum")
        )
        return sum_ / count if count else None

    def at_most(self, histogram: str) -> dict[float, float]:
        """Returns the number of observations up to each bucket's bound, over all label sets."""
        found: dict[float, float] = {}
        for labels, value in self.by_labels(f"{histogram}_bucket"):
            bound = float(labels["le"])
            found[bound] = found.get(bound, 0.0) + value
        return found

    def resets(self) -> bool:
        """Returns whether a counter fell in between: the server was restarted."""
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
    """Prefix cache lookups in ``unit`` "tokens" or "blocks". ``found`` is None if only lookups are reported."""

    looked_up: float
    found: float | None
    unit: str

    @property
    def rate(self) -> float | None:
        """Found over looked up."""
        return self.found / self.looked_up if self.found is not None and self.looked_up else None


def hits(growth: Growth) -> Hits | None:
    """Returns prefix cache lookups and hits, from the first pair of counters that the server has."""
    page = growth.after
    for queries, found in HIT_PAIRS:
        if page.has(queries) and page.has(found):
            text = page.help.get(queries.removesuffix("_total"), "")
            return Hits(growth.total(queries) or 0.0, growth.total(found), "blocks" if "blocks" in text else "tokens")
    prompt = growth.total("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
    return None if prompt is None else Hits(prompt, None, "tokens")

"""Metrics read from the engine's statistics when a scraper asks: their table, and totals that survive a restart."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anaphora.types.outputs import GAUGE_FIELDS, EngineStats
from anaphora.types.reports import HIT_TOKENS, Reason

logger = logging.getLogger("anaphora.metrics")

_MISS_REASONS = (Reason.COLD, Reason.DIVERGED, Reason.EVICTED, Reason.BYPASSED)


class EngineMetric(NamedTuple):
    """One metric. ``value`` returns a number, or a number for each value of ``label``."""

    name: str
    help: str
    value: Callable[[EngineStats], float | dict[str, float]]
    label: str = ""


def _usage(stats: EngineStats) -> float:
    return stats.referenced_blocks / stats.total_blocks if stats.total_blocks else 0.0


def _waiting_by_reason(stats: EngineStats) -> dict[str, float]:
    return {"capacity": stats.waiting - stats.waiting_for_prefix, "deferred": stats.waiting_for_prefix}


def _misses(stats: EngineStats) -> dict[str, float]:
    return {reason.value: stats.reasons.get(reason, 0) for reason in _MISS_REASONS}


def hits_at_sizes(stats: EngineStats) -> dict[str, float]:
    """Returns the prompt tokens that a cache of 0.5, 1, 2 and 4 times the size would have found."""
    return {"0.5": stats.hits_half, "1": stats.hits, "2": stats.hits_twice, "4": stats.hits_four_times}


GAUGES = (
    EngineMetric("vllm:num_requests_running", "Requests in the running batch.", lambda s: s.running),
    EngineMetric("vllm:num_requests_waiting", "Requests waiting to be scheduled.", lambda s: s.waiting),
    EngineMetric(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests: for free blocks (capacity), or for a prefix that another request computes (deferred).",
        _waiting_by_reason,
        "reason",
    ),
    EngineMetric("vllm:kv_cache_usage_perc", "Share of the KV blocks held by running requests, 0 to 1.", _usage),
    EngineMetric(
        "anaphora:requests_waiting_for_prefix",
        "Requests waiting for a prefix that another request computes.",
        lambda s: s.waiting_for_prefix,
    ),
    EngineMetric("anaphora:kv_blocks", "KV blocks in the pool.", lambda s: s.total_blocks),
    EngineMetric("anaphora:kv_blocks_free", "Free KV blocks.", lambda s: s.free_blocks),
    EngineMetric("anaphora:kv_blocks_cached", "Idle KV blocks kept for reuse.", lambda s: s.idle_cached_blocks),
    EngineMetric("anaphora:kv_blocks_pinned", "Pinned KV blocks, which are never evicted.", lambda s: s.pinned_blocks),
    EngineMetric("anaphora:free_memory_bytes", "Free memory of the engine's device.", lambda s: s.free_memory_bytes),
)

COUNTERS = (
    EngineMetric("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.queries),
    EngineMetric("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.hits),
    EngineMetric("vllm:prompt_tokens", "Prompt tokens of the requests scheduled.", lambda s: s.prompt_tokens),
    EngineMetric("vllm:prompt_tokens_cached", "Prompt tokens reused instead of computed.", lambda s: s.hits),
    EngineMetric(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by the source of their keys and values.",
        lambda s: {"local_compute": max(0, s.prompt_tokens - s.hits), "local_cache_hit": s.hits},
        "source",
    ),
    EngineMetric(
        "vllm:prompt_tokens_cached_by_source",
        "Reused prompt tokens by the tier that held them.",
        lambda s: {"device": s.hits},
        "source",
    ),
    EngineMetric("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    EngineMetric(
        "vllm:num_preemptions", "Preemptions: a running request lost its blocks to others.", lambda s: s.preemptions
    ),
    EngineMetric("anaphora:requests_scheduled", "Requests scheduled for the first time.", lambda s: s.requests),
    EngineMetric(
        "anaphora:requests_hit",
        f"Requests that reused at least {HIT_TOKENS} tokens, or all but the last token of a shorter prompt.",
        lambda s: s.requests_hit,
    ),
    EngineMetric("anaphora:cache_misses", "Requests by the reason why not more was reused.", _misses, "reason"),
    EngineMetric(
        "anaphora:requests_isolated",
        "Requests that found nothing and whose first block is cached under another salt.",
        lambda s: s.isolated,
    ),
    EngineMetric(
        "anaphora:prefix_cache_hits_at_size",
        "Prompt tokens that a cache of this many times the size would have found.",
        hits_at_sizes,
        "size",
    ),
    EngineMetric("anaphora:evicted_blocks", "Cached KV blocks evicted.", lambda s: s.evicted_blocks),
    EngineMetric(
        "anaphora:computed_prompt_tokens",
        "Prompt tokens computed, including recomputation after a preemption.",
        lambda s: s.computed_prompt_tokens,
    ),
    EngineMetric("anaphora:prefill_seconds", "Seconds spent computing prompts.", lambda s: s.prefill_seconds),
    EngineMetric(
        "anaphora:prefill_seconds_saved",
        "Seconds of prefill saved by reuse, from the measured cost of a token at its position.",
        lambda s: s.prefill_seconds_saved,
    ),
    EngineMetric("anaphora:engine_steps", "Steps of the engine.", lambda s: s.steps),
    EngineMetric("anaphora:failed_steps", "Steps that failed.", lambda s: s.failed_steps),
)


class Totals:
    """EngineStats whose counters never decrease, also when the engine restarts.

    If ``steps`` decreases, the engine is new, and its counters are added to the old ones. Any other counter that
    decreases is a fault of the engine: its last value is kept, and an error is logged.
    """

    _COUNTERS = tuple(
        field.name
        for field in dataclasses.fields(EngineStats)
        if field.name not in GAUGE_FIELDS and field.name != "reasons"
    )

    def __init__(self) -> None:
        self._base = EngineStats()
        self._last = EngineStats()

    def update(self, stats: EngineStats) -> bool:
        """Takes the engine's latest statistics; returns whether it has made a step since the last ones."""
        last = self._last
        if stats.steps < last.steps:
            self._base = self.read()
        else:
            for name in self._COUNTERS:
                if getattr(stats, name) < getattr(last, name):
                    logger.error(
                        "%s fell from %s to %s; the last value is kept", name, getattr(last, name), getattr(stats, name)
                    )
                    stats = dataclasses.replace(stats, **{name: getattr(last, name)})
        self._last = stats
        return stats.steps != last.steps

    def read(self) -> EngineStats:
        """Returns the totals over all engines so far, with the latest gauges."""
        base, last = self._base, self._last
        sums = {name: getattr(base, name) + getattr(last, name) for name in self._COUNTERS}
        reasons = base.reasons.keys() | last.reasons.keys()
        counts = {reason: base.reasons.get(reason, 0) + last.reasons.get(reason, 0) for reason in sorted(reasons)}
        return dataclasses.replace(last, reasons=counts, **sums)


class EngineCollector(Collector):
    """Exports GAUGES and COUNTERS of the totals.

    Args:
        totals: read at each scrape.
        labels: on every metric.
    """

    def __init__(self, totals: Totals, labels: dict[str, str]) -> None:
        self._totals = totals
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yields a family for each metric."""
        stats = self._totals.read()
        for family, metrics in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for entry in metrics:
                names = [*self._labels, *([entry.label] if entry.label else [])]
                metric = family(entry.name, entry.help, labels=names)
                value = entry.value(stats)
                samples = value.items() if isinstance(value, dict) else [("", value)]
                for key, number in samples:
                    metric.add_metric([*self._labels.values(), *([key] if entry.label else [])], number)
                yield metric

    def describe(self) -> Iterator[Metric]:
        """Yields nothing: at registration there are no statistics yet."""
        return iter(())

"""/metrics: vLLM's names where the same thing exists here, ``anaphora:`` for what vLLM lacks.

All carry ``model_name`` and, as vLLM's do, ``engine="0"``. Counters and gauges are read from the engine's latest
EngineStats when a scraper asks; histograms are fed by finished requests.

============================================  =======================================================================
vLLM's name                                   here
============================================  =======================================================================
vllm:num_requests_waiting_by_reason           ``capacity``; ``deferred`` = waits for another's prefix
vllm:kv_cache_usage_perc                      blocks that running requests hold, over all; blocks kept for reuse are
                                              free to them and do not count
vllm:prompt_tokens_total                      of prompts scheduled for the first time
vllm:prompt_tokens_by_source_total            ``local_compute``, ``local_cache_hit``
vllm:prompt_tokens_cached_by_source_total     ``device`` alone
vllm:external_prefix_cache_*, vllm:mm_cache_* left out: there is no external and no multimodal cache
vllm:engine_sleep_state                       left out: the engine does not sleep
vllm:admission_rejections_total               left out: the queue has no limit that could reject
vllm:estimated_*_per_gpu_total                left out: nothing here estimates them
vllm:request_num_preemptions                  left out: preemptions are known in all (vllm:num_preemptions_total),
                                              not by request
============================================  =======================================================================
"""

from __future__ import annotations

import dataclasses
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from anaphora.observe.record import RequestRecord
from anaphora.types.outputs import EngineInfo, EngineStats, StepResult
from anaphora.types.reports import HIT_TOKENS, Reason

logger = logging.getLogger("anaphora.metrics")

_OPENMETRICS = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"
"""Asked of prometheus_client in place of what the scraper wrote: without the last part it turns the colon of sample
names, which is legal in every format, into an underscore."""

_LABELS = ("model_name", "engine")
_TTFT: tuple[float, ...] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_TOKEN_TIME: tuple[float, ...] = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_TIME: tuple[float, ...] = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
_MISS_REASONS = (Reason.COLD, Reason.DIVERGED, Reason.EVICTED, Reason.BYPASSED)


class Reading(NamedTuple):
    """One metric read from EngineStats. ``value`` gives a number, or a number for each value of ``label``."""

    name: str
    help: str
    value: Callable[[EngineStats], float | dict[str, float]]
    label: str = ""


def _usage(stats: EngineStats) -> float:
    return stats.referenced_blocks / stats.total_blocks if stats.total_blocks else 0.0


def _waiting_by_reason(stats: EngineStats) -> dict[str, float]:
    return {"capacity": stats.waiting - stats.waiting_for_prefix, "deferred": stats.waiting_for_prefix}


def _misses(stats: EngineStats) -> dict[str, float]:
    return {reason.value: stats.misses.get(reason, 0) for reason in _MISS_REASONS}


def hits_at_sizes(stats: EngineStats) -> dict[str, float]:
    """Prompt tokens found, in all, by a cache of so many times the size."""
    return {"0.5": stats.hits_half, "1": stats.hits, "2": stats.hits_twice, "4": stats.hits_four_times}


GAUGES = (
    Reading("vllm:num_requests_running", "Requests in the running batch.", lambda s: s.running),
    Reading("vllm:num_requests_waiting", "Requests that wait to be scheduled.", lambda s: s.waiting),
    Reading(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait: for room (capacity) or for a prefix that another computes (deferred).",
        _waiting_by_reason,
        "reason",
    ),
    Reading("vllm:kv_cache_usage_perc", "Share of the KV blocks that running requests hold; 1 is all.", _usage),
    Reading(
        "anaphora:requests_waiting_for_prefix",
        "Requests that wait while another computes the prefix that they share.",
        lambda s: s.waiting_for_prefix,
    ),
    Reading("anaphora:kv_blocks", "KV blocks of the pool.", lambda s: s.total_blocks),
    Reading("anaphora:kv_blocks_free", "KV blocks that hold nothing.", lambda s: s.free_blocks),
    Reading("anaphora:kv_blocks_cached", "Idle KV blocks kept for reuse.", lambda s: s.idle_cached_blocks),
    Reading("anaphora:kv_blocks_pinned", "KV blocks that are never evicted.", lambda s: s.pinned_blocks),
    Reading("anaphora:free_memory_bytes", "Free memory of the engine's device.", lambda s: s.free_memory_bytes),
)

COUNTERS = (
    Reading("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.queries),
    Reading("vllm:prefix_cache_hits", "Of those, the tokens that were found.", lambda s: s.hits),
    Reading("vllm:prompt_tokens", "Prompt tokens of the requests scheduled.", lambda s: s.prompt_tokens),
    Reading("vllm:prompt_tokens_cached", "Prompt tokens that were not computed but reused.", lambda s: s.hits),
    Reading(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their keys and values came from.",
        lambda s: {"local_compute": max(0, s.prompt_tokens - s.hits), "local_cache_hit": s.hits},
        "source",
    ),
    Reading(
        "vllm:prompt_tokens_cached_by_source",
        "Reused prompt tokens by the place that kept them.",
        lambda s: {"device": s.hits},
        "source",
    ),
    Reading("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    Reading("vllm:num_preemptions", "Times that a running request had to give up its blocks.", lambda s: s.preemptions),
    Reading("anaphora:requests_scheduled", "Requests scheduled for the first time.", lambda s: s.requests),
    Reading(
        "anaphora:requests_hit",
        f"Of those, the ones that reused at least {HIT_TOKENS} tokens, or a shorter prompt but for its last token.",
        lambda s: s.requests_hit,
    ),
    Reading("anaphora:cache_misses", "Requests by the reason why no more was reused.", _misses, "reason"),
    Reading(
        "anaphora:requests_isolated",
        "Requests that found no block of theirs, and whose first block is cached under another salt.",
        lambda s: s.isolated,
    ),
    Reading(
        "anaphora:prefix_cache_hits_at_size",
        "Prompt tokens that a cache of so many times the size would have found.",
        hits_at_sizes,
        "size",
    ),
    Reading("anaphora:evicted_blocks", "Cached KV blocks given up for others.", lambda s: s.evicted_blocks),
    Reading(
        "anaphora:computed_prompt_tokens",
        "Prompt tokens that the model ran through, recomputation after a preemption included.",
        lambda s: s.computed_prompt_tokens,
    ),
    Reading("anaphora:prefill_seconds", "Seconds spent on computing prompts.", lambda s: s.prefill_seconds),
    Reading(
        "anaphora:prefill_seconds_saved",
        "Seconds of prefill that reuse saved, by the measured cost of a token at its place.",
        lambda s: s.prefill_seconds_saved,
    ),
    Reading("anaphora:engine_steps", "Steps of the engine.", lambda s: s.steps),
    Reading("anaphora:failed_steps", "Steps that failed.", lambda s: s.failed_steps),
)


class Totals:
    """EngineStats whose counters never fall: over restarts of the engine they go on from where they were.

    A fallen ``steps`` means a new engine, whose counters are added to those of the old. Any other counter that falls
    is a fault of the engine's books: it is held at its former value, and that is logged.
    """

    _COUNTERS = (
        *("queries", "hits", "requests", "requests_hit", "prompt_tokens", "computed_prompt_tokens", "isolated"),
        *("hits_half", "hits_twice", "hits_four_times"),
        *("generation_tokens", "preemptions", "evicted_blocks", "failed_steps", "steps"),
        *("prefill_seconds", "prefill_seconds_saved"),
    )

    def __init__(self) -> None:
        self._base = EngineStats()
        self._last = EngineStats()

    def update(self, stats: EngineStats) -> bool:
        """Take over the engine's newest numbers; says whether the engine has made a step since."""
        last = self._last
        if stats.steps < last.steps:
            self._base = self.read()
        else:
            for name in self._COUNTERS:
                if getattr(stats, name) < getattr(last, name):
                    logger.error("%s fell from %s to %s; held", name, getattr(last, name), getattr(stats, name))
                    stats = dataclasses.replace(stats, **{name: getattr(last, name)})
        self._last = stats
        return stats.steps != last.steps

    def read(self) -> EngineStats:
        base, last = self._base, self._last
        sums = {name: getattr(base, name) + getattr(last, name) for name in self._COUNTERS}
        reasons = base.misses.keys() | last.misses.keys()
        misses = {reason: base.misses.get(reason, 0) + last.misses.get(reason, 0) for reason in sorted(reasons)}
        return dataclasses.replace(last, misses=misses, **sums)


class _EngineCollector(Collector):
    """Turns the Readings into metric families at scrape time."""

    def __init__(self, totals: Totals, labels: dict[str, str]) -> None:
        self._totals = totals
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats = self._totals.read()
        for family, readings in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for reading in readings:
                names = [*self._labels, *([reading.label] if reading.label else [])]
                metric = family(reading.name, reading.help, labels=names)
                value = reading.value(stats)
                samples = value.items() if isinstance(value, dict) else [("", value)]
                for key, number in samples:
                    metric.add_metric([*self._labels.values(), *([key] if reading.label else [])], number)
                yield metric

    def describe(self) -> Iterator[Metric]:
        return iter(())


class Metrics:
    """The registry of one server. ``step`` takes every StepResult, ``request`` every finished request once."""

    def __init__(self, info: EngineInfo, model_name: str, cache_config: dict[str, str]) -> None:
        self.totals = Totals()
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self.registry.register(_EngineCollector(self.totals, self._labels))
        self._constants(info, cache_config)
        lengths = tuple(_one_two_five(info.max_model_len))
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of one step.", _STEP_TOKENS)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens of a choice.", _TOKEN_TIME)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a token after the first.", _TOKEN_TIME
        )
        times = {
            "vllm:e2e_request_latency_seconds": "From arrival to the last token.",
            "vllm:request_queue_time_seconds": "From arrival to the first scheduled chunk.",
            "vllm:request_prefill_time_seconds": "From the first scheduled chunk to the first token.",
            "vllm:request_decode_time_seconds": "From the first token to the last.",
            "vllm:request_inference_time_seconds": "From the first scheduled chunk to the last token.",
        }
        self._times = {name: self._histogram(name, text, _REQUEST_TIME) for name, text in times.items()}
        counts = {
            "vllm:request_prompt_tokens": "Prompt tokens of a request.",
            "vllm:request_generation_tokens": "Tokens generated for a request.",
            "vllm:request_max_num_generation_tokens": "Tokens of a request's longest choice.",
            "vllm:request_params_max_tokens": "max_tokens of a request.",
            "vllm:request_prefill_kv_computed_tokens": "Prompt tokens of a request that were computed.",
        }
        self._counts = {name: self._histogram(name, text, lengths) for name, text in counts.items()}
        self._choices = self._histogram("vllm:request_params_n", "Choices of a request.", _CHOICES)
        self._finished = Counter(
            "vllm:request_success",
            "Requests finished, by how they ended.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(*self._labels.values(), reason)
        self._prefix_wait = self._histogram(
            "anaphora:prefix_wait_seconds", "Part of the queue time spent waiting for another's prefix.", _REQUEST_TIME
        )

    def step(self, result: StepResult) -> None:
        if self.totals.update(result.stats):
            self._step_tokens.observe(result.stats.last_step_tokens)

    def token_gap(self, seconds: float) -> None:
        """Two tokens of one choice came ``seconds`` apart."""
        self._itl.observe(seconds)

    def request(self, record: RequestRecord, *, max_tokens: int, longest: int) -> None:
        """A finished request; ``longest`` is the token count of its longest choice."""
        self._finished.labels(*self._labels.values(), record.finish).inc()
        times, counts = self._times, self._counts
        times["vllm:e2e_request_latency_seconds"].observe(record.total_s)
        counts["vllm:request_params_max_tokens"].observe(max_tokens)
        self._choices.observe(record.n)
        counts["vllm:request_prompt_tokens"].observe(record.prompt_tokens)
        counts["vllm:request_generation_tokens"].observe(record.output_tokens)
        counts["vllm:request_max_num_generation_tokens"].observe(longest)
        if record.ttft_s is None:
            return
        decode = max(0.0, record.total_s - record.ttft_s)
        self._ttft.observe(record.ttft_s)
        times["vllm:request_queue_time_seconds"].observe(record.queue_s)
        times["vllm:request_prefill_time_seconds"].observe(record.prefill_s)
        times["vllm:request_decode_time_seconds"].observe(decode)
        times["vllm:request_inference_time_seconds"].observe(record.prefill_s + decode)
        computed = record.prompt_tokens - (record.cached_tokens or 0)
        counts["vllm:request_prefill_kv_computed_tokens"].observe(computed)
        if longest > 1:
            self._tpot.observe(decode / (longest - 1))
        if record.waited:
            self._prefix_wait.observe(record.waited_s)

    def count_dropped(self, dropped: Callable[[], int]) -> None:
        """Export how many log records could not be written."""
        self.registry.register(_Function("anaphora:records_dropped", "Log records not written.", self._labels, dropped))

    def export(self, accept: str | None) -> tuple[bytes, str]:
        """The page and its content type: Prometheus text, or OpenMetrics where ``accept`` asks for it."""
        if accept and "application/openmetrics-text" in accept:
            accept = _OPENMETRICS
        encoder, content_type = choose_encoder(accept or "")
        return encoder(self.registry), content_type

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> _Histogram:
        histogram = _Histogram(name, text, self._labels, buckets)
        self.registry.register(histogram)
        return histogram

    def _constants(self, info: EngineInfo, cache_config: dict[str, str]) -> None:
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Settings of the KV cache.", labels=[*self._labels, *cache_config]
        )
        config.add_metric([*self._labels.values(), *cache_config.values()], 1)
        pool = GaugeMetricFamily("anaphora:kv_pool_bytes", "Memory of the KV block pool.", labels=[*self._labels])
        pool.add_metric([*self._labels.values()], info.model.num_blocks * info.model.bytes_per_block)
        weights = GaugeMetricFamily("anaphora:weights_bytes", "Memory of the model's weights.", labels=[*self._labels])
        weights.add_metric([*self._labels.values()], info.model.weights_bytes)
        self.registry.register(_Constants((config, pool, weights)))


class _Constants(Collector):
    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


class _Histogram(Collector):
    """A histogram that is fed with every token: a tenth of the time that prometheus_client's own takes.

    Belongs to one thread.
    """

    def __init__(self, name: str, text: str, labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        metric = HistogramMetricFamily(self._name, self._text, labels=[*self._labels])
        metric.add_metric([*self._labels.values()], buckets, self._sum)
        yield metric


class _Function(Collector):
    """A counter that is asked for when it is scraped."""

    def __init__(self, name: str, text: str, labels: dict[str, str], value: Callable[[], int]) -> None:
        self._name, self._text, self._labels, self._value = name, text, labels, value

    def collect(self) -> Iterator[Metric]:
        metric = CounterMetricFamily(self._name, self._text, labels=[*self._labels])
        metric.add_metric([*self._labels.values()], self._value())
        yield metric


def _one_two_five(highest: int) -> Iterator[float]:
    """1, 2, 5, 10, 20, … up to ``highest``."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > highest:
                return
            yield digit * power
        power *= 10

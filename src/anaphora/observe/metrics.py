"""The page /metrics: vLLM's names for what vLLM has, too, and ``anaphora:`` for the rest.

All metrics have the labels ``model_name`` and, as in vLLM, ``engine="0"``. Counters and gauges are read from the
engine's latest EngineStats at each scrape (engine_metrics.py); histograms are fed by finished requests.

============================================  =======================================================================
vLLM's name                                   here
============================================  =======================================================================
vllm:num_requests_waiting_by_reason           ``capacity``; ``deferred`` = waits for a prefix that another
                                              request computes
vllm:kv_cache_usage_perc                      blocks held by running requests, over all blocks; blocks kept for
                                              reuse are available and do not count
vllm:prompt_tokens_total                      counted when a prompt is first scheduled
vllm:prompt_tokens_by_source_total            ``local_compute``, ``local_cache_hit``
vllm:prompt_tokens_cached_by_source_total     only ``device``
vllm:external_prefix_cache_*, vllm:mm_cache_* absent: there is no external or multimodal cache
vllm:engine_sleep_state                       absent: the engine does not sleep
vllm:admission_rejections_total               absent: the queue has no limit
vllm:estimated_*_per_gpu_total                absent: not estimated
vllm:request_num_preemptions                  absent: preemptions are counted in total only
                                              (vllm:num_preemptions_total)
============================================  =======================================================================
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from anaphora.observe.engine_metrics import EngineCollector, Totals
from anaphora.observe.record import RequestRecord
from anaphora.types.outputs import EngineInfo, StepResult

_OPENMETRICS = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"
"""The format requested from prometheus_client instead of the scraper's own header: without ``escaping`` it replaces the
colon in sample names, which is legal in every format, by an underscore."""

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


class Metrics:
    """The metrics of one server. ``step`` takes every StepResult, ``request`` every finished request once.

    Args:
        info: the engine's model and limits.
        model_name: the label on every metric.
        cache_config: labels of vllm:cache_config_info.
    """

    def __init__(self, info: EngineInfo, model_name: str, cache_config: dict[str, str]) -> None:
        self.totals = Totals()
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self.registry.register(EngineCollector(self.totals, self._labels))
        self._constants(info, cache_config)
        lengths = tuple(_one_two_five(info.max_model_len))
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of one step.", _STEP_TOKENS)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self._itl = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of one choice.", _TOKEN_TIME
        )
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_TIME
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
            "Finished requests by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(*self._labels.values(), reason)
        self._prefix_wait = self._histogram(
            "anaphora:prefix_wait_seconds",
            "Part of the queue time spent waiting for a prefix that another request computes.",
            _REQUEST_TIME,
        )

    def step(self, result: StepResult) -> None:
        """Counts a step of the engine."""
        if self.totals.update(result.stats):
            self._step_tokens.observe(result.stats.last_step_tokens)

    def token_gap(self, seconds: float) -> None:
        """Counts the time between two tokens of one choice."""
        self._itl.observe(seconds)

    def request(self, record: RequestRecord, *, max_tokens: int, longest: int) -> None:
        """Counts a finished request.

        Args:
            record: its times and token counts.
            max_tokens: its limit.
            longest: tokens of its longest choice.
        """
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
        """Exports ``dropped()``, the number of records that could not be written to the request log."""
        self.registry.register(
            _CallbackCounter(
                "anaphora:records_dropped",
                "Request records that could not be written to the log.",
                self._labels,
                dropped,
            )
        )

    def export(self, accept: str | None) -> tuple[bytes, str]:
        """Returns the page and its content type: Prometheus text, or OpenMetrics if ``accept`` asks for it."""
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
    """A histogram for one thread, fed with every token: ten times as fast as prometheus_client's."""

    def __init__(self, name: str, text: str, labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        metric = HistogramMetricFamily(self._name, self._text, labels=[*self._labels])
        metric.add_metric([*self._labels.values()], buckets, self._sum)
        yield metric


class _CallbackCounter(Collector):
    """A counter whose value a function returns at each scrape."""

    def __init__(self, name: str, text: str, labels: dict[str, str], value: Callable[[], int]) -> None:
        self._name, self._text, self._labels, self._value = name, text, labels, value

    def collect(self) -> Iterator[Metric]:
        metric = CounterMetricFamily(self._name, self._text, labels=[*self._labels])
        metric.add_metric([*self._labels.values()], self._value())
        yield metric


def _one_two_five(highest: int) -> Iterator[float]:
    """Yields 1, 2, 5, 10, 20, … up to ``highest``."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > highest:
                return
            yield digit * power
        power *= 10

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from anaphora.observe import metrics as module
from anaphora.observe.engine_metrics import COUNTERS, GAUGES, Totals
from anaphora.observe.metrics import Metrics
from anaphora.observe.record import RequestRecord
from anaphora.types.batch import ModelInfo
from anaphora.types.outputs import EngineInfo, EngineStats, StepResult

INFO = EngineInfo(ModelInfo("m", "id", 100, 4096, 11, 16, 1000, "float32", "float32", "cpu", 5000), 4096)
STATS = EngineStats(
    running=3,
    waiting=5,
    waiting_for_prefix=2,
    total_blocks=10,
    referenced_blocks=4,
    queries=100,
    hits=60,
    requests=4,
    requests_hit=2,
    reasons={"hit": 1, "cold": 2, "evicted": 1},
    prompt_tokens=100,
    steps=7,
    prefill_seconds_saved=1.5,
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(INFO, 'na"me', {"block_size": "16", "num_gpu_blocks": "11"})


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Returns numbers by (name, value of the label other than model_name and engine)."""
    page, _ = metrics.export(None)
    found = {}
    for family in parse_text(page.decode()):
        for sample in family.samples:
            if "le" in sample.labels:
                continue
            assert sample.labels.pop("model_name") == 'na"me'
            assert sample.labels.pop("engine") == "0"
            found[sample.name, ",".join(sample.labels.values())] = sample.value
    return found


def test_gauges_and_counters_come_from_the_engine(metrics: Metrics) -> None:
    metrics.step(StepResult((), STATS))
    found = samples(metrics)
    assert found["vllm:num_requests_running", ""] == 3
    assert found["vllm:num_requests_waiting", ""] == 5
    assert found["vllm:num_requests_waiting_by_reason", "capacity"] == 3
    assert found["vllm:num_requests_waiting_by_reason", "deferred"] == 2
    assert found["vllm:kv_cache_usage_perc", ""] == pytest.approx(0.4)
    assert found["vllm:prefix_cache_queries_total", ""] == 100
    assert found["vllm:prefix_cache_hits_total", ""] == 60
    assert found["vllm:prompt_tokens_by_source_total", "local_compute"] == 40
    assert found["anaphora:cache_misses_total", "cold"] == 2
    assert found["anaphora:cache_misses_total", "diverged"] == 0
    assert ("anaphora:cache_misses_total", "hit") not in found
    assert found["anaphora:prefill_seconds_saved_total", ""] == 1.5
    assert found["anaphora:kv_pool_bytes", ""] == 11_000
    assert found["vllm:cache_config_info", "16,11"] == 1


def test_every_engine_counter_is_carried_over_a_restart() -> None:
    totals = Totals()
    totals.update(STATS)
    totals.update(EngineStats(steps=1, queries=5, hits=1, requests=1, reasons={"cold": 1}))
    after = totals.read()
    assert (after.queries, after.hits, after.requests, after.steps) == (105, 61, 5, 8)
    assert after.reasons == {"hit": 1, "cold": 3, "evicted": 1}
    assert (after.running, after.waiting) == (0, 0)
    numbers = {f.name for f in dataclasses.fields(EngineStats) if isinstance(getattr(STATS, f.name), (int, float))}
    gauges = {"running", "waiting", "waiting_for_prefix", "free_memory_bytes", "last_step_tokens"}
    gauges |= {name for name in numbers if name.endswith("_blocks") and name != "evicted_blocks"}
    assert set(Totals._COUNTERS) == numbers - gauges


def test_a_counter_that_decreases_keeps_its_value_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    totals = Totals()
    totals.update(STATS)
    totals.update(dataclasses.replace(STATS, steps=8, hits=-7680, queries=120))
    assert (totals.read().hits, totals.read().queries) == (60, 120)
    assert "hits fell from 60 to -7680" in caplog.text
    totals.update(dataclasses.replace(STATS, steps=9, hits=70, queries=130))
    assert totals.read().hits == 70


def test_a_step_is_observed_once(metrics: Metrics) -> None:
    step = dataclasses.replace(STATS, last_step_tokens=50)
    metrics.step(StepResult((), step))
    metrics.step(StepResult((), step))  # the resting engine repeats its last numbers
    found = samples(metrics)
    assert found["vllm:iteration_tokens_total_count", ""] == 1
    assert found["vllm:iteration_tokens_total_sum", ""] == 50


def test_a_finished_request_fills_the_histograms(metrics: Metrics) -> None:
    record = RequestRecord(
        time=0.0,
        block_size=16,
        id="a",
        model="m",
        prompt_tokens=100,
        output_tokens=21,
        cached_tokens=64,
        n=2,
        queue_s=0.5,
        prefill_s=1.0,
        ttft_s=1.5,
        total_s=3.5,
        finish="length",
    )
    metrics.request(record, max_tokens=11, longest=11)
    metrics.request(
        RequestRecord(time=0.0, block_size=16, id="b", model="m", prompt_tokens=7, finish="abort"),
        max_tokens=5,
        longest=0,
    )
    found = samples(metrics)
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:request_success_total", "abort"] == 1
    assert found["vllm:time_to_first_token_seconds_count", ""] == 1
    assert found["vllm:request_decode_time_seconds_sum", ""] == 2.0
    assert found["vllm:request_inference_time_seconds_sum", ""] == 3.0
    assert found["vllm:request_time_per_output_token_seconds_sum", ""] == pytest.approx(0.2)
    assert found["vllm:request_prefill_kv_computed_tokens_sum", ""] == 36
    assert found["vllm:request_max_num_generation_tokens_sum", ""] == 11
    assert found["vllm:request_params_n_sum", ""] == 3


def test_buckets_are_cumulative_and_include_their_bounds(metrics: Metrics) -> None:
    for seconds in (0.005, 0.01, 0.02, 100.0):
        metrics.token_gap(seconds)
    page, _ = metrics.export(None)
    families = parse_text(page.decode())
    (family,) = (family for family in families if family.name == "vllm:inter_token_latency_seconds")
    buckets = {s.labels["le"]: s.value for s in family.samples if "le" in s.labels}
    assert (buckets["0.01"], buckets["0.025"], buckets["80.0"], buckets["+Inf"]) == (2, 3, 3, 4)


def test_open_metrics_by_the_accept_header(metrics: Metrics) -> None:
    metrics.step(StepResult((), STATS))
    accept = "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"  # as Prometheus 2 asks
    page, content_type = metrics.export(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_openmetrics(page.decode())}
    assert all(line.startswith(("#", "vllm:", "anaphora:")) for line in page.decode().splitlines())
    assert {"vllm:prefix_cache_hits", "anaphora:evicted_blocks", "vllm:time_to_first_token_seconds"} <= names


def test_dropped_records_are_counted(metrics: Metrics) -> None:
    metrics.count_dropped(lambda: 3)
    assert samples(metrics)["anaphora:records_dropped_total", ""] == 3


def test_every_metric_of_vllm_is_present_or_its_absence_explained(metrics: Metrics, shared_data: Path) -> None:
    lines = (shared_data.parent / "peer" / "vllm-metric-names.tsv").read_text().splitlines()
    page, _ = metrics.export(None)
    kinds = {}
    for line in page.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            kinds[name] = kind
    absent = (
        *("vllm:engine_sleep_state", "vllm:admission_rejections_total", "vllm:request_num_preemptions"),
        *("vllm:external_prefix_cache", "vllm:mm_cache", "vllm:estimated_"),
    )
    for name, kind in (line.split("\t") for line in lines):
        if name.startswith(absent):
            assert name not in kinds
        else:
            assert kinds.get(name) == kind, name
    for start in absent:
        assert start in (module.__doc__ or "")


class ReadFields:
    """Stands for EngineStats and notes which fields are read."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(STATS, name)


def test_every_field_of_the_statistics_is_exported() -> None:
    seen: Any = ReadFields()
    for metric in (*GAUGES, *COUNTERS):
        metric.value(seen)
    assert {field.name for field in dataclasses.fields(EngineStats)} - seen.read == {"last_step_tokens"}  # a histogram

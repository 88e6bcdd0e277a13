from __future__ import annotations

from dataclasses import replace

import pytest

from anaphora.observe.log_lines import HitRates, LoadLog, describe_pool, describe_request
from anaphora.observe.record import RequestRecord
from anaphora.types.batch import ModelInfo
from anaphora.types.outputs import EngineInfo, EngineStats
from tests.support.clock import ManualClock


def test_the_start_line_says_what_fits() -> None:
    info = EngineInfo(ModelInfo("m", "id", 100, 4096, 1001, 16, 2**20, "f", "f", "cpu"), 4000)
    line = describe_pool(info)
    assert "num_gpu_blocks=1001" in line
    assert "block_size=16" in line
    assert "16,000 tokens fit" in line
    assert "4.00 requests of the full 4,000 tokens" in line
    assert line.startswith("memory: KV blocks 0.98 GiB; ")
    model = replace(info.model, weights_bytes=2**31, activation_bytes=2**29, graph_bytes=2**28)
    line = describe_pool(replace(info, model=model))
    assert line.startswith("memory: weights 2.00 GiB, activations 0.50 GiB, CUDA graphs 0.25 GiB, KV blocks 0.98 GiB; ")


def test_a_request_line_has_the_reason_of_the_miss() -> None:
    record = RequestRecord(
        time=0.0, block_size=16, id="a", model="m", prompt_tokens=9, cached_tokens=4, reason="diverged", detail="at 4"
    )
    assert "4 cached (diverged: at 4)" in describe_request(record)
    record.reason = "hit"
    record.detail = ""
    assert "4 cached (hit: all that was there; the rest is new);" in describe_request(record)
    assert "no token" in describe_request(record)


def test_a_request_line_has_the_clients_id_escaped() -> None:
    record = RequestRecord(time=0.0, block_size=16, id="a", model="m", prompt_tokens=9)
    assert describe_request(record).startswith("a: prompt")
    record.client_id = "order-7"
    assert describe_request(record).startswith("a ('order-7'): prompt")
    record.client_id = "x\n2026-01-01 INFO all is well\x1b[2J"
    assert describe_request(record).isprintable()


def test_hit_rates_of_the_last_requests_and_since_the_start() -> None:
    rates = HitRates(last=2)
    rates.add(1000, 0)
    rates.add(100, 90)
    rates.add(100, 0)
    stats = EngineStats(queries=1200, hits=90, requests=3, requests_hit=1, running=2, waiting=1, total_blocks=10)
    line = rates.describe(stats)
    assert "last 2 requests: 45.0% of prompt tokens, 50.0% of requests" in line
    assert "since the start: 7.5% of tokens, 33.3% of requests" in line
    assert "running 2, waiting 1" in line


def test_the_few_tokens_before_every_chat_prompt_are_not_a_hit() -> None:
    rates = HitRates()
    for cached in (3, 15, 16):
        rates.add(1000, cached)
    rates.add(8, 7)
    assert "50.0% of requests; since" in rates.describe(EngineStats())


def test_nothing_divides_by_zero_before_the_first_request() -> None:
    assert "–" in HitRates().describe(EngineStats())


def test_the_timer_runs_only_while_there_is_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="anaphora.server")
    clock = ManualClock()
    busy = True
    log = LoadLog(10.0, clock.call_later, lambda: busy, lambda: "rates")
    assert clock.waiting == 0
    log.touch()
    log.touch()
    assert clock.waiting == 1
    clock.advance(9.9)
    assert "rates" not in caplog.text
    clock.advance(0.1)
    assert clock.waiting == 1
    busy = False
    clock.advance(10)
    assert clock.waiting == 0
    assert caplog.text.count("rates") == 2
    log.touch()
    log.close()
    assert clock.waiting == 0

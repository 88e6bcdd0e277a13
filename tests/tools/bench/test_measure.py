"""Known answers come out of the measurement: against a server whose cache, counters, clock and faults are set."""

from __future__ import annotations

import asyncio
import io
import json
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from anaphora.errors import AnaphoraError, ConfigError
from anaphora.tools.bench import BenchOptions, command, run
from anaphora.tools.bench.client import PlannedRequest, RequestResult, Server, read_counters, read_stream
from anaphora.tools.bench.figures import (
    Load,
    Round,
    busy_seconds,
    figures_of,
    itl,
    medians,
    peak_in_flight,
    ttft,
)
from anaphora.tools.bench.progress import UNKNOWN_LENGTH, RequestProgress, progress_bars
from anaphora.tools.bench.workloads import Session
from tests.tools.fake_server import MODEL, Fake, event, render, serving, words
from tests.tools.shared.test_simulate import simulate

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake server counts at once; real ones may update their counters after the last event."""
    monkeypatch.setattr(command, "SETTLE_SECONDS", 0.0)


SMALL = {"shared": 200, "own": 40, "out": 6, "requests": 6, "concurrency": 1, "rounds": 1, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "How long does it take?"}]}


def measure(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], int]:
    """The JSON of a run and its exit code."""
    target = tmp_path / "out" / "bench.json"
    code = run(BenchOptions(json=str(target), **(SMALL | options)))
    return json.loads(target.read_text()), code


def compare(tmp_path: Path, off: Fake, on: Fake, **options: Any) -> tuple[dict[str, Any], int]:
    with serving(off), serving(on):
        return measure(tmp_path, off_url=off.url, on_url=on.url, **options)


def send(fake: Fake, planned: PlannedRequest) -> RequestResult:
    async def once() -> RequestResult:
        server = Server(fake.url)
        try:
            await server.connect()
            return await server.send(planned)
        finally:
            await server.close()

    with serving(fake):
        return asyncio.run(once())


def test_no_round_begins_that_would_end_after_the_time_limit(tmp_path: Path) -> None:
    found, code = compare(tmp_path, Fake(caching=False), Fake(), rounds=9, requests=2, time_limit=0.001)
    assert code == 0
    assert len(found["on"]["rounds"]) == len(found["off"]["rounds"]) == 1
    assert any("1 of 9 rounds" in warning for warning in found["warnings"])


def test_hit_rates_are_those_of_the_servers_cache(tmp_path: Path) -> None:
    off, on = Fake(caching=False), Fake()
    found, code = compare(tmp_path, off, on, rounds=2)
    assert code == 0
    bodies = on.seen[1:]
    assert [b["messages"] for b in bodies[:6]] == [b["messages"] for b in off.seen[1:7]]
    rates, shares = [], []
    for part in (bodies[:6], bodies[6:]):
        prompts = [render(body["messages"]) for body in part]
        hits = simulate(prompts)
        rates.append(sum(hits) / sum(map(len, prompts)))
        shares.append(sum(hit >= 16 for hit in hits) / len(hits))
    assert found["on"]["hit_rate"] == pytest.approx(statistics.median(rates))
    assert found["on"]["spread"]["hit_rate"] == pytest.approx([min(rates), max(rates)])
    assert found["on"]["hit_rate_requests"] == pytest.approx(statistics.median(shares))
    assert found["on"]["hit_rate_source"] == "metrics"
    assert found["on"]["hit_rate_possible"] == pytest.approx(found["on"]["hit_rate"])
    assert found["off"]["hit_rate"] == 0
    assert found["off"]["hit_rate_requests"] == 0
    assert found["warnings"] == []


def test_the_order_alternates_and_both_sides_get_the_same(tmp_path: Path) -> None:
    off, on = Fake(caching=False), Fake()
    compare(tmp_path, off, on, rounds=3, requests=2)
    sides = [[body["messages"][-1]["content"] for body in fake.seen[1:]] for fake in (off, on)]
    assert sides[0] == sides[1]
    assert len(set(sides[0])) == 6


def test_the_json_has_what_it_promises(tmp_path: Path) -> None:
    found, _ = compare(tmp_path, Fake(caching=False), Fake(), gpu_hour_price=2.5, per_day=50_000)
    assert {"workload", "model", "machine", "versions", "commit", "off", "on", "cost_ratio"} <= set(found)
    assert found["workload"] == "custom"
    assert found["model"] == MODEL
    for side in ("off", "on"):
        values = found[side]
        assert values["requests"] == 6
        assert values["concurrency"] == 1
        hours = 100_000 / 6 * busy(values) / 3600
        assert values["gpu_hours_per_100k"] == pytest.approx(hours)
        assert values["busy_hours_per_day"] == pytest.approx(hours / 2)
        assert values["price_per_100k"] == pytest.approx(hours * 2.5)
        assert values["price_per_day"] == pytest.approx(hours / 2 * 2.5)
        assert values["price_per_month"] == pytest.approx(hours / 2 * 2.5 * 30)
        assert values["output_tokens_per_s"] == pytest.approx(6 * values["requests_per_s"])
        times = values["ttft_s"]
        assert len(times) == 6
        assert values["ttft_mean_s"] == pytest.approx(sum(times) / 6, abs=1e-5)
        assert values["ttft_p50_s"] == pytest.approx((times[2] + times[3]) / 2, abs=1e-5)
        assert times[4] <= values["ttft_p99_s"] <= times[5] + 1e-5
        assert values["itl_p50_s"] >= 0
        assert values["prefill_share"] == pytest.approx(values["prefill_mean_s"] / values["latency_mean_s"])
    hours = [found[side]["gpu_hours_per_100k"] for side in ("off", "on")]
    assert found["cost_ratio"] == pytest.approx(hours[0] / hours[1])


def busy(values: dict[str, Any]) -> float:
    """Seconds of the round in which something was in flight."""
    return float(values["busy_share"] * values["requests"] / values["requests_per_s"])


def test_a_side_that_should_be_off_and_caches_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, code = compare(tmp_path, Fake(), Fake())
    assert code == 0
    told = next(text for text in found["warnings"] if "THE OFF SIDE CACHED" in text)
    assert f"{found['off']['cached_tokens']:,}" in told
    assert found["off"]["cached_tokens"] > 0
    assert "THE OFF SIDE CACHED" in " ".join(capsys.readouterr().out.split())


def test_an_off_side_is_also_caught_by_its_counters_alone(tmp_path: Path) -> None:
    found, _ = compare(tmp_path, Fake(cached_in_usage=False), Fake())
    assert any("THE OFF SIDE CACHED" in text for text in found["warnings"])


def test_an_on_side_without_hits_is_named(tmp_path: Path) -> None:
    found, _ = compare(tmp_path, Fake(caching=False), Fake(caching=False))
    assert any("the on side HIT NOTHING" in text for text in found["warnings"])


def test_prompts_that_share_nothing_are_no_fault_of_the_server(tmp_path: Path) -> None:
    found, _ = compare(tmp_path, Fake(caching=False), Fake(), tenants=6)
    assert any("could not: the prompts share at most" in text for text in found["warnings"])


def test_a_warm_server_is_named(tmp_path: Path) -> None:
    with serving(Fake()) as fake:
        cold, _ = measure(tmp_path, url=fake.url)
        warm, _ = measure(tmp_path, url=fake.url)
        other, _ = measure(tmp_path, url=fake.url, seed=2)
        fresh = [measure(tmp_path, url=fake.url, seed=None)[0]["warnings"] for _ in range(1)]
    assert any("WARM" in text for text in warm["warnings"])
    assert cold["warnings"] == other["warnings"] == fresh[0] == []


def test_one_url_has_one_side(tmp_path: Path) -> None:
    with serving(Fake()) as fake:
        found, code = measure(tmp_path, url=fake.url + "/v1", html=str(tmp_path / "page.html"))
    assert code == 0
    assert found["off"] is None
    assert found["cost_ratio"] is None
    assert found["on"]["hit_rate"] > 0.5
    assert "<svg" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("fake", "source"),
    [
        (Fake(), "metrics"),
        (Fake(metrics=False), "usage"),
        (Fake(metrics=False, cached_in_usage=False), "unknown"),
        (Fake(cached_in_usage=False), "metrics"),
        (Fake(metrics=False, usage=False), "unknown"),
    ],
)
def test_where_the_hit_rate_comes_from(tmp_path: Path, fake: Fake, source: str) -> None:
    with serving(fake):
        found, code = measure(tmp_path, url=fake.url)
    assert code == 0
    assert found["on"]["hit_rate_source"] == source
    prompts = [render(body["messages"]) for body in fake.seen[1:]]
    truth = sum(simulate(prompts)) / sum(map(len, prompts))
    assert found["on"]["hit_rate"] == (None if source == "unknown" else pytest.approx(truth))
    known = fake.usage and fake.cached_in_usage
    assert (found["on"]["hit_rate_requests"] is not None) == known
    assert (found["on"]["prefill_mean_s"] is None) == (not fake.metrics)


def test_without_usage_tokens_are_counted_and_it_is_said(tmp_path: Path) -> None:
    with serving(Fake(usage=False)) as fake:
        found, _ = measure(tmp_path, url=fake.url)
    assert found["on"]["output_tokens_mean"] == 6
    assert any("no usage with 6 of 6" in text for text in found["warnings"])


def test_failed_requests_are_counted_reported_and_in_no_figure(tmp_path: Path) -> None:
    fake = Fake(fail=(1, 4), break_off=(2,))
    with serving(fake):
        found, code = measure(tmp_path, url=fake.url)
    assert code == 1
    assert found["failed"] == found["on"]["failed"] == 3
    assert sum(found["on"]["errors"].values()) == 3
    assert any("HTTP 500" in error for error in found["on"]["errors"])
    assert any("without a finish reason" in error for error in found["on"]["errors"])
    assert len(found["on"]["ttft_s"]) == 3
    assert any("failed 2 of 6" in text for text in found["warnings"])


def test_when_all_fail_there_is_still_a_report(tmp_path: Path) -> None:
    with serving(Fake(fail=tuple(range(6)))) as fake:
        found, code = measure(tmp_path, url=fake.url, html=str(tmp_path / "p.html"))
    assert code == 1
    assert found["on"]["failed"] == 6


def test_the_role_event_is_not_the_first_token() -> None:
    events: list[tuple[float, Any]] = [
        (1.0, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        (3.0, {"choices": [{"delta": {"content": "a"}}]}),
        (4.5, {"choices": [{"delta": {"content": "b"}}, {"delta": {"content": "c"}}]}),
        (6.0, {"choices": [{"delta": {"content": "d"}, "finish_reason": "length"}]}),
        (9.0, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}),
    ]
    now = 0.0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal now
        for time, content in events:
            now = time
            yield event(content).encode()
        yield b"data: [DONE]\n\n"

    result, heard = RequestResult(PlannedRequest(CHAT, out=4), started=0.5), list[str]()
    asyncio.run(read_stream(chunks(), result, heard.append, clock=lambda: now))
    assert result.error is None
    assert ttft(result) == 2.5
    assert itl(result) == 1.0
    assert heard == ["a", "b", "c", "d"]
    assert (result.prompt_tokens, result.output_tokens, result.content_events) == (7, 4, 4)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"data: nonsense\n\n", "what is not JSON: nonsense"),
        (b'data: {"error": "full"}\n\n', "the server broke off: full"),
        (b'data: {"choices": [{"text": "a", "finish_reason": "abort"}]}\n\n', "ended with abort"),
        (b'data: {"choices": [{"text": "a"}]}\n\n', "without a finish reason"),
        (b"data: [1]\n\n", "not an event of a completion: [1]"),
        (b"data: null\n\n", "not an event of a completion: null"),
        (b'data: {"choices": 5}\n\n', 'not an event of a completion: {"choices": 5}'),
        (b'data: {"choices": [[1]]}\n\n', "not an event of a completion"),
        (b'data: {"choices": [{"delta": "x"}]}\n\n', "not an event of a completion"),
        (b'data: {"error": ' + b"[" * 200_000 + b"\n\n", 'the server sent what is not JSON: {"error": [[['),
    ],
)
def test_streams_that_fail_say_how(stream: bytes, error: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield stream

    result = RequestResult(PlannedRequest(CHAT, out=4), started=0.0)
    asyncio.run(read_stream(chunks(), result, None))
    assert error in (result.error or "")


@pytest.mark.parametrize("usage", ["[1]", '"no"', '{"prompt_tokens": "7", "prompt_tokens_details": [1]}', "-1"])
def test_usage_without_valid_counts_is_ignored(usage: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": 9}}\n\n'
        yield f'data: {{"choices": [], "usage": {usage}}}\n\n'.encode()

    result = RequestResult(PlannedRequest(CHAT, out=4), started=0.0)
    asyncio.run(read_stream(chunks(), result, None))
    assert (result.error, result.prompt_tokens, result.cached_tokens) == (None, 9, None)


@pytest.mark.parametrize(
    "body", ["[1]", '{"data": [null]}', '{"data": "abc"}', '{"data": [{"name": 1}]}', '{"data": {}}']
)
def test_an_invalid_list_of_models_counts_as_empty(body: str) -> None:
    server = Server("http://localhost:1")
    with pytest.raises(ConfigError, match="lists no model"):
        server._learn(httpx.Response(200, content=body))


@pytest.mark.parametrize("tokens", ["5", '["a"]', "null", '{"a": 1}'])
def test_tokens_that_are_not_numbers_are_ignored(tokens: str) -> None:
    async def asked() -> tuple[int, ...] | None:
        server = Server("http://localhost:1")
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=f'{{"tokens": {tokens}}}'))
        server._http = httpx.AsyncClient(transport=transport, base_url=server.url)
        try:
            return await server.tokenize({"prompt": "a"})
        finally:
            await server.close()

    assert asyncio.run(asked()) is None


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_head_speaks_of_a_median_only_of_several_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rounds: int
) -> None:
    compare(tmp_path, Fake(caching=False), Fake(), rounds=rounds, html=str(tmp_path / "page.html"))
    head = " ".join(capsys.readouterr().out.split("prefill, mean")[0].split())
    assert ("median of 2 rounds (smallest–largest)" in head) == (rounds == 2)
    assert ("6 requests, concurrency 1; 1 round" in head) == (rounds == 1)
    page = (tmp_path / "page.html").read_text()
    assert ("median over the rounds, with" in page) == ("alternated" in page) == (rounds == 2)


def test_a_days_hours_are_shown_only_where_they_differ_from_those_at_full_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for per_day, rate in ((100_000, None), (50_000, None), (100_000, 50.0)):
        compare(tmp_path, Fake(caching=False), Fake(), per_day=per_day, rate=rate)
        said = " ".join(capsys.readouterr().out.split())
        assert ("hours a day" in said.split("cost ratio")[0]) == ((per_day, rate) != (100_000, None))
        assert ("the busy hours of a day too" in said) == ((per_day, rate) == (100_000, None))


def test_bars_count_tokens_and_name_what_is_known_of_the_servers(tmp_path: Path) -> None:
    options = BenchOptions(**SMALL, off_url="http://a", on_url="http://b")
    assert options.names == {"off": "off URL", "on": "on URL"}
    assert BenchOptions(**SMALL, url="http://a").names == {"on": "server"}
    assert BenchOptions(**SMALL).names == {"off": "cache off", "on": "cache on"}
    planned = [PlannedRequest(CHAT, out=10), PlannedRequest(CHAT, out=None)]
    progress = progress_bars(Console(file=io.StringIO()))
    sending = RequestProgress(progress, "round 1", [Session(tuple(planned), burst=0)])
    (task,) = progress.tasks
    assert (task.total, task.fields["count"]) == (10 + UNKNOWN_LENGTH, "0/2 requests")
    for _ in range(7):
        sending.on_text("word")
    assert task.completed == 7
    sending.on_end(RequestResult(planned[0], 0.0, content_events=7))
    assert (task.completed, task.fields["count"]) == (10, "1/2 requests")
    for _ in range(UNKNOWN_LENGTH + 20):
        sending.on_text("word")
    sending.on_end(RequestResult(planned[1], 0.0, content_events=UNKNOWN_LENGTH + 20))
    assert task.completed == task.total


def test_pages_say_of_servers_at_urls_only_what_is_known(tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    compare(tmp_path, Fake(caching=False), Fake(), html=str(html))
    assert "off URL" in html.read_text()
    assert "cache on<" not in html.read_text()
    with serving(Fake()) as fake:
        measure(tmp_path, url=fake.url, html=str(html))
    page = html.read_text()
    assert ">server<" in page
    assert not any(claim in page for claim in ("Both sides", "cache on", "cache off", "off and on"))


def test_completions_are_followed_too() -> None:
    result = send(Fake(), PlannedRequest({"prompt": "Once upon a time"}, out=4))
    assert (result.error, result.prompt_tokens, result.output_tokens) == (None, len(words("Once upon a time")), 4)


def test_an_answer_without_text_has_no_first_token(tmp_path: Path) -> None:
    with serving(Fake(silent=True)) as fake:
        found, code = measure(tmp_path, url=fake.url)
    assert code == 0
    assert found["on"]["ttft_mean_s"] is None
    assert any("no text in 6 of 6" in text for text in found["warnings"])


def test_fields_that_the_server_refuses_are_left_out(tmp_path: Path) -> None:
    fake = Fake(refuses=("ignore_eos", "cache_salt"))
    with serving(fake):
        found, code = measure(tmp_path, url=fake.url)
    assert code == 0
    assert all("ignore_eos" not in body for body in fake.seen)
    assert any("refuses ignore_eos" in text for text in found["warnings"])
    assert any("another length" in text for text in found["warnings"])


def test_every_request_is_greedy_and_of_fixed_length(tmp_path: Path) -> None:
    with serving(Fake()) as fake:
        measure(tmp_path, url=fake.url)
    for body in fake.seen[1:]:
        assert (body["temperature"], body["max_tokens"], body["ignore_eos"], body["stream"]) == (0, 6, True, True)
        assert "cache_salt" not in body


def test_a_closed_loop_keeps_its_concurrency_in_flight(tmp_path: Path) -> None:
    fake = Fake(gather=4)
    with serving(fake):
        found, _ = measure(tmp_path, url=fake.url, concurrency=4, requests=12, out=2)
    assert fake.most_in_flight == 4
    assert found["on"]["concurrency"] == 4


def test_an_open_loop_does_not_wait_for_answers(tmp_path: Path) -> None:
    fake = Fake(gather=8)  # it answers nobody before all eight have come
    with serving(fake):
        found, _ = measure(tmp_path, url=fake.url, rate=200.0, requests=8, out=2)
    assert fake.most_in_flight == found["on"]["concurrency"] == 8
    assert found["on"]["rate"] == 200


def test_a_sweep_measures_each_concurrency_on_both_sides(tmp_path: Path) -> None:
    off, on = Fake(caching=False, prefill_s=0.02), Fake(prefill_s=0.01)
    page = tmp_path / "page.html"
    found, _ = compare(tmp_path, off, on, sweep=(2, 4), requests=2, html=str(page))
    assert [row["concurrency"] for row in found["sweep"]] == [2, 4]
    assert len(off.seen) == len(on.seen) == 1 + 2 + 4 + 8
    for row in found["sweep"]:
        assert row["off"]["prefill_mean_s"] == pytest.approx(0.02)
        assert row["on"]["prefill_mean_s"] == pytest.approx(0.01)
        assert row["on"]["ttft_p50_s"] > 0.01


def test_a_wrong_key_a_dead_address_and_a_failing_server_are_told_apart(tmp_path: Path) -> None:
    with serving(Fake(api_key="right")) as fake:
        with pytest.raises(ConfigError, match="--api-key"):
            measure(tmp_path, url=fake.url, api_key="wrong")
        assert measure(tmp_path, url=fake.url, api_key="right")[1] == 0
    with pytest.raises(ConfigError, match="no server answers"):
        measure(tmp_path, url=fake.url)
    with serving(Fake(fail=(-1, -2))) as fake, pytest.raises(AnaphoraError, match="first short request: HTTP 500"):
        measure(tmp_path, url=fake.url)


def result(started: float, first: float, ended: float, tokens: int = 3, prompt: int = 100) -> RequestResult:
    return RequestResult(PlannedRequest(CHAT, tokens), started, first, ended, ended, tokens, prompt, tokens, 0)


def test_figures_of_a_round_by_hand() -> None:
    seen = Round([result(0, 1, 3), result(0, 2, 4), result(6, 7, 9, tokens=5)], prefills=[0.5, 1.0, 1.5])
    found = figures_of(seen, Load(requests_per_day=200_000, hour_price=3.0))
    assert found["requests_per_s"] == pytest.approx(3 / 9)
    assert found["output_tokens_per_s"] == pytest.approx(11 / 9)
    assert found["ttft_mean_s"] == pytest.approx(4 / 3)
    assert found["itl_p50_s"] == pytest.approx(1.0)
    assert found["latency_mean_s"] == pytest.approx(10 / 3)
    assert found["prefill_mean_s"] == 1.0
    assert found["prefill_share"] == pytest.approx(0.3)
    # In flight from 0 to 4 and from 6 to 9: seven seconds of work for three requests.
    assert found["busy_share"] == pytest.approx(7 / 9)
    assert found["gpu_hours_per_100k"] == pytest.approx(100_000 / 3 * 7 / 3600)
    assert found["busy_hours_per_day"] == pytest.approx(200_000 / 3 * 7 / 3600)
    assert peak_in_flight(seen.results) == 2
    assert busy_seconds(seen.results) == 7


def test_medians_and_spread_pass_over_what_is_unknown() -> None:
    middle, spread = medians([{"a": 1.0, "b": None}, {"a": 5.0, "b": None}, {"a": 3.0, "b": None}])
    assert middle == {"a": 3.0, "b": None}
    assert spread == {"a": (1.0, 5.0)}


def test_counters_are_summed_over_engines_and_former_names_are_known() -> None:
    page = "\n".join(
        [
            'vllm:gpu_prefix_cache_queries_total{engine="0"} 10.0',
            'vllm:gpu_prefix_cache_queries_total{engine="1"} 5.0',
            'vllm:gpu_prefix_cache_hits_total{engine="0"} 4.0',
            'vllm:request_prefill_time_seconds_bucket{engine="0",le="0.5"} 3',
            'vllm:request_prefill_time_seconds_bucket{engine="1",le="0.5"} 1',
            'vllm:request_prefill_time_seconds_bucket{engine="0",le="+Inf"} 4',
        ]
    )
    found = read_counters(page + "\n")
    assert (found.queries, found.hits, found.prefill_s) == (15, 4, None)
    assert found.prefill_buckets == {0.5: 4, float("inf"): 4}


def test_the_median_prefill_is_taken_from_the_histogram() -> None:
    lines = ['vllm:request_prefill_time_seconds_bucket{le="%s"} %d']
    page = "\n".join(lines[0] % pair for pair in [("0.5", 2), ("1.0", 6), ("2.0", 8), ("+Inf", 8)])
    seen = Round([result(0, 1, 2)], read_counters(""), read_counters(page + "\n"))
    # The fourth of eight lies halfway through the four of the bucket from 0.5 to 1 second.
    assert figures_of(seen, Load(1))["prefill_p50_s"] == pytest.approx(0.75)

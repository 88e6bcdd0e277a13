"""A running server: what its metrics say, what not, and what to do."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from anaphora.errors import ConfigError
from anaphora.tools.doctor import DoctorOptions, run
from anaphora.tools.doctor.live.next_steps import advise
from anaphora.tools.doctor.live.scrape import ScrapedServer
from anaphora.tools.doctor.live.server_figures import figures
from anaphora.tools.doctor.live.server_terminal import show
from anaphora.tools.shared.metrics_page import parse
from anaphora.tools.shared.server_version import version_of
from tests.tools.doctor import pages


def examined(
    *texts: str, engine: str = "vllm", version: str | None = "0.33.0", details: dict[str, Any] | None = None
) -> dict[str, Any]:
    seen = ScrapedServer("http://server:8000", engine, version, details or {}, [parse(text) for text in texts], 30.0)
    data = figures(seen)
    return data | {"advice": advise(data)}


def titles(data: dict[str, Any]) -> list[str]:
    return [step["title"] for step in data["advice"]]


def shown(data: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    show(data, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_figures_of_a_sample_and_since_the_start() -> None:
    data = examined(pages.vllm(100), pages.vllm(160))
    assert data["models"] == ["qwen"]
    assert data["caching"]["on"] is True
    assert data["old"]["too_old"] is False
    assert (data["cache"]["blocks"], data["cache"]["block_size"], data["cache"]["tokens"]) == (9000, 16, 144_000)
    sample = data["sample"]
    assert (sample["requests"], sample["prompt_tokens"], data["since_start"]["requests"]) == (60, 60 * 2420, 160)
    assert sample["prefill_s"] == pytest.approx(0.6)
    assert sample["prefill_share"] == pytest.approx(0.2)
    assert sample["queue_s"] == pytest.approx(0.01)
    assert sample["preemptions"] == 0
    assert sample["requests_hit"] == {"at_least": 0, "at_most": 0}
    assert data["load"]["running"] == {"mean": 3, "most": 3}
    assert titles(data) == ["Find what changes at the head of the prompts"]
    assert "--upstream http://server:8000" in data["advice"][0]["do"]


def test_requests_with_a_hit_are_bounded_by_the_lengths_that_were_computed() -> None:
    cold, warm = pages.vllm(20), pages.vllm(80, cached=2304)
    both = parse(cold + warm.replace('engine="0"', 'engine="1"'))
    seen = ScrapedServer("http://server", "vllm", "0.33.0", {}, [both])
    share = figures(seen)["since_start"]["requests_hit"]
    assert share["at_least"] == pytest.approx(0.8)
    assert 0.8 <= share["at_most"] <= 1


def test_without_lengths_the_bound_is_the_block() -> None:
    """64 tokens found in blocks of 16: at most four requests had a hit."""
    text = "\n".join(
        [
            pages.gauge("vllm:cache_config_info", 1, block_size="16"),
            pages.counter("vllm:prefix_cache_queries_total", 10_000),
            pages.counter("vllm:prefix_cache_hits_total", 64),
            pages.counter("vllm:request_success_total", 10, finished_reason="stop"),
        ]
    )
    share = examined(text + "\n")["since_start"]["requests_hit"]
    assert share == {"at_least": 0, "at_most": pytest.approx(0.4)}


def test_nothing_to_do_where_prompts_are_reused() -> None:
    assert examined(pages.vllm(0), pages.vllm(50, cached=2304, prefill=0.1))["advice"] == []


def test_caching_off_comes_first_and_an_old_version_second() -> None:
    data = examined(pages.vllm(5, caching="False"), pages.vllm(9, caching="False"), version="0.6.3.post1")
    assert data["caching"]["on"] is False
    assert titles(data)[:2] == ["Turn prefix caching on", "Upgrade vLLM"]
    assert "--enable-prefix-caching" in data["advice"][0]["do"]


def test_the_old_engine_tells_a_share_or_that_it_is_off() -> None:
    def page(rate: float) -> str:
        lines = [
            pages.gauge("vllm:gpu_prefix_cache_hit_rate", rate, model_name="m"),
            pages.gauge("vllm:gpu_cache_usage_perc", 0.4, model_name="m"),
            pages.counter("vllm:prompt_tokens_total", 5000, model_name="m"),
            pages.counter("vllm:request_success_total", 9, finished_reason="stop", model_name="m"),
        ]
        return "\n".join(lines) + "\n"

    off = examined(page(-1), page(-1), version="0.6.0")
    assert off["caching"]["on"] is False
    assert off["since_start"]["hit_rate"] is None
    some = examined(page(0.31), page(0.31), version="0.6.0")
    assert some["caching"]["on"] is True
    assert some["since_start"]["hit_rate"] == 0.31
    assert some["sample"]["hit_rate"] is None
    assert some["cache"]["used_most"] == 0.4
    assert any("since its start alone" in note for note in some["notes"])


@pytest.mark.parametrize(
    ("text", "version", "old"),
    [
        ("0.3.3", (0, 3, 3), True),
        ("0.7.3", (0, 7, 3), True),
        ("0.8.0", (0, 8, 0), False),
        ("0.10.1.1", (0, 10, 1), False),
        ("0.22.1rc1.dev164+ga6183563b", (0, 22, 1), False),
        ("v1.2", (1, 2, 0), False),
        ("0.1.dev20051+g487ecf187", None, None),
        ("nightly", None, None),
        (None, None, None),
    ],
)
def test_versions(text: str | None, version: tuple[int, int, int] | None, old: bool | None) -> None:
    assert version_of(text) == version
    assert examined(pages.vllm(1), version=text)["old"]["too_old"] is old


def test_anaphora_is_not_judged_by_vllms_versions() -> None:
    own = "# TYPE anaphora:requests_scheduled counter\nanaphora:requests_scheduled_total 10\n"
    own += "# TYPE anaphora:requests_hit counter\nanaphora:requests_hit_total 4\n"
    own += '# TYPE anaphora:cache_misses counter\nanaphora:cache_misses_total{reason="diverged"} 6\n'
    data = examined(pages.vllm(10, cached=200) + own, engine="anaphora", version="0.1.0")
    assert data["old"]["too_old"] is None
    assert data["since_start"]["requests_hit"] == {"at_least": 0.4, "at_most": 0.4}
    assert data["misses"] == {"diverged": 6}
    assert data["since_start"]["requests_scheduled"] == 10
    assert data["advice"][0]["do"].startswith("restart it with --record")
    assert "without a restart, anaphora record --upstream http://server:8000" in data["advice"][0]["do"]
    lines = shown(data)
    assert "why not more 6 diverged (of the requests scheduled)" in lines
    assert any(line.split()[:3] == ["requests", "scheduled", "10"] for line in lines)
    assert not any("requests scheduled" in line for line in shown(examined(pages.vllm(10))))


@pytest.mark.parametrize(("dtype", "told"), [("auto", "in the model's own data type,"), ("bfloat16", "in bfloat16,")])
def test_the_data_type_of_the_cache_is_named(dtype: str, told: str) -> None:
    assert any(told in line for line in shown(examined(pages.vllm(10, dtype=dtype))) if line.startswith("KV cache"))


def test_anaphora_tells_what_other_sizes_would_give() -> None:
    own = "# TYPE anaphora:prefix_cache_hits_at_size counter\n"
    for size, found in (("0.5", 6050), ("1", 12100), ("2", 18150), ("4", 21780)):
        own += f'anaphora:prefix_cache_hits_at_size_total{{size="{size}"}} {found}\n'
    data = examined(pages.vllm(10, cached=1210) + own, engine="anaphora", version="0.1.0")
    assert data["sizes"] == {0.5: 0.25, 1.0: 0.5, 2.0: 0.75, 4.0: 0.9}
    assert titles(data) == ["A larger cache would reuse more"]
    assert examined(pages.vllm(10))["sizes"] == {}


@pytest.mark.parametrize(
    "line",
    [
        "vllm:request_success_total +Inf",
        'vllm:prefix_cache_hits_total{model_name="x"} 1e308\nvllm:prefix_cache_hits_total{model_name="y"} 1e308',
        "sglang:max_total_num_tokens +Inf",
        f'vllm:cache_config_info{{block_size="{"9" * 4000}",num_gpu_blocks="{"9" * 5000}"}} 1',
        'vllm:request_prompt_tokens_bucket{le="x"} 5\nvllm:request_prompt_tokens_bucket 5',
        "anaphora:cache_misses_total -Inf",
        'anaphora:prefix_cache_hits_at_size_total{size="x"} 5\nanaphora:prefix_cache_hits_at_size_total 5',
    ],
)
def test_values_that_cannot_be_are_not_known_and_cost_no_other(line: str) -> None:
    text = "vllm:prefix_cache_queries_total 10\nvllm:prefix_cache_hits_total 4\n" + line + "\n"
    for engine in ("anaphora", "vllm", "sglang"):
        data = examined(text, text, engine=engine, version="9" * 5000 + ".1")
        assert data["since_start"]["hit_rate"] == pytest.approx(0.4)
        json.dumps(data, allow_nan=False)


def test_no_traffic_is_no_hit_rate() -> None:
    idle = examined(pages.vllm(0), pages.vllm(0))
    assert idle["sample"]["hit_rate"] is None
    assert idle["since_start"]["prefill_s"] is None
    assert titles(idle) == ["Send traffic"]
    before = examined(pages.vllm(50), pages.vllm(50))
    assert "no request ended during the sample" in before["notes"]
    assert titles(before) == ["Find what changes at the head of the prompts"]


def test_sglang() -> None:
    details = {"version": "0.5.2", "disable_radix_cache": False, "page_size": 64, "kv_cache_dtype": "auto"}
    texts = (pages.sglang(10, cached=600), pages.sglang(30, cached=600))
    data = examined(*texts, engine="sglang", version="0.5.2", details=details)
    assert data["caching"] == {"on": True, "because": "the server says disable_radix_cache=False"}
    assert (data["cache"]["block_size"], data["cache"]["tokens"]) == (64, 50_000)
    assert data["sample"]["hit_rate"] == pytest.approx(0.6)
    assert data["sample"]["queue_s"] == pytest.approx(0.02)
    assert data["sample"]["prefill_s"] == pytest.approx(0.3)
    assert data["sample"]["prefill_share"] == pytest.approx(0.15)
    assert data["sample"]["preemptions"] is None
    nothing = examined(pages.sglang(10, cached=None), engine="sglang", details=details | {"disable_radix_cache": True})
    assert nothing["since_start"]["hit_rate"] is None
    assert titles(nothing)[0] == "Turn prefix caching on"


def test_llamacpp_tells_no_hit_rate() -> None:
    data = examined(pages.LLAMACPP, engine="llamacpp", version="b5000")
    assert data["since_start"]["hit_rate"] is None
    assert data["since_start"]["prefill_share"] == pytest.approx(0.25)
    assert any("llama.cpp counts only" in note for note in data["notes"])
    assert titles(data) == ["See what is reused"]


def test_a_block_larger_than_the_prompt_cannot_hit() -> None:
    texts = [pages.vllm(n, prompt=900, block_size=3584) for n in (1, 9)]
    assert titles(examined(*texts)) == ["The block is larger than the prompts"]


def test_a_block_larger_than_a_shared_beginning_may_be_the_cause() -> None:
    data = examined(*(pages.vllm(n, block_size=784) for n in (1, 9)))
    assert titles(data)[0] == "See whether the shared beginning fills a block"
    assert data["advice"][0]["do"].endswith("anaphora doctor log.jsonl --block-size 784")


def test_quantised_keys_and_values_are_suspected_before_the_prompts() -> None:
    data = examined(*(pages.vllm(n, dtype="fp8_e5m2") for n in (1, 9)))
    assert titles(data) == ["Try without KV quantisation", "Find what changes at the head of the prompts"]


def test_what_a_kv_connector_finds_counts_too(capsys: pytest.CaptureFixture[str]) -> None:
    def page(requests: int) -> str:
        return pages.vllm(requests) + pages.counter("vllm:external_prefix_cache_hits_total", requests * 2178) + "\n"

    data = examined(page(1), page(9))
    assert data["sample"]["hit_rate"] == 0
    assert data["sample"]["external_rate"] == pytest.approx(0.9)
    assert titles(data) == []
    with pages.serving(lambda path, _: (200, page(4)) if path == "/metrics" else (404, "")) as url:
        run(DoctorOptions(log=url, sample=0))
    assert "more from external caches 90.0%" in " ".join(capsys.readouterr().out.split())


def test_a_full_cache_and_preemptions() -> None:
    full = examined(*(pages.vllm(n, cached=300, used=0.97) for n in (1, 9)))
    assert titles(full) == ["Find where the prompts part", "Make room for the KV cache"]
    busy = examined(pages.vllm(1, cached=2304), pages.vllm(9, cached=2304, preemptions=4, queue=2.0))
    assert titles(busy) == ["Make room for the KV cache", "Requests wait longer than they are prefilled"]
    assert busy["sample"]["preemptions"] == 4


def test_engines_that_hit_unevenly() -> None:
    def both(requests: int) -> str:
        return pages.vllm(requests, cached=2304) + pages.vllm(requests, cached=300, engine="1")

    data = examined(both(1), both(9))
    assert data["engines"] == 2
    assert [round(part["hit_rate"], 2) for part in data["parts"]] == [0.95, 0.12]
    assert data["cache"]["blocks"] == 18_000
    assert titles(data) == ["Send equal beginnings to the same engine"]


def test_several_models_have_a_rate_each() -> None:
    both = [pages.vllm(n, cached=2304) + pages.vllm(n, cached=2304, model_name="other") for n in (1, 9)]
    data = examined(*both)
    assert data["models"] == ["other", "qwen"]
    assert [part["model"] for part in data["parts"]] == ["other", "qwen"]


def test_a_restart_and_servers_that_take_turns_are_told() -> None:
    restarted = examined(pages.vllm(100), pages.vllm(3), pages.vllm(9))
    assert any("was restarted" in note for note in restarted["notes"])
    assert restarted["sample"]["requests"] == 9
    turns = examined(*(pages.vllm(n) for n in (100, 3, 101, 4)))
    assert any("in turn" in note for note in turns["notes"])


def test_preempted_requests_flatter_old_versions() -> None:
    data = examined(pages.vllm(9, cached=600, preemptions=3), version="0.9.1")
    assert any("looks better than it is" in note for note in data["notes"])


# --- Over HTTP -------------------------------------------------------------------------------------------------------


class Vllm:
    """Answers as vLLM does; each reading of /metrics finds ten more requests."""

    def __init__(self, cached: int = 2304, key: str | None = None) -> None:
        self.cached, self.key, self.read = cached, key, 0

    def __call__(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return 401, "no"
        if path == "/metrics":
            self.read += 1
            return 200, pages.vllm(10 * self.read, cached=self.cached)
        return (200, pages.version("0.33.0")) if path == "/version" else (404, "no")


def test_a_server_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "live.json"
    with pages.serving(Vllm(key="k")) as url:
        options = DoctorOptions(log=f"{url}/v1", sample=0.05, api_key="k", json=str(out), min_hit_rate=0.9)
        assert run(options) == 0
        assert run(DoctorOptions(log=f"{url}/metrics", sample=0, api_key="k", min_hit_rate=0.96)) == 1
    data = json.loads(out.read_text())
    assert (data["engine"], data["version"], data["url"]) == ("vLLM", "0.33.0", url)
    assert data["sample"]["requests"] == 10
    assert data["sample"]["hit_rate"] == pytest.approx(2304 / 2420)
    shown = " ".join(capsys.readouterr().out.split())
    assert "caching on" in shown
    assert "9,000 blocks of 16 tokens" in shown
    assert "Nothing to do." in shown


def test_ctrl_c_ends_the_sample_and_not_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = iter([None, KeyboardInterrupt()])

    def sleep(_: float) -> None:
        if (stop := next(pauses)) is not None:
            raise stop

    monkeypatch.setattr("anaphora.tools.doctor.live.scrape.time.sleep", sleep)
    with pages.serving(Vllm()) as url:
        assert run(DoctorOptions(log=url, sample=600)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "you ended it" in shown
    assert "requests ended 10 20" in shown


def test_unknown_is_never_shown_as_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pages.serving(lambda path, _: (200, pages.LLAMACPP) if path == "/metrics" else (404, "")) as url:
        assert run(DoctorOptions(log=url, sample=0, min_hit_rate=0.0)) == 1
    shown = capsys.readouterr().out
    assert "unknown" in shown
    assert "hit rate, tokens" in shown
    assert "0.0%" not in shown.split("\nthe hit rate is unknown")[0]


def test_a_server_that_goes_away_is_reported_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Vllm()
    with pages.serving(lambda path, headers: answers(path, headers) if answers.read < 1 else (503, "gone")) as url:
        assert run(DoctorOptions(log=url, sample=0.05)) == 0
    assert "ended early" in capsys.readouterr().out
    seen = ScrapedServer("u", "vllm", None, {}, [parse(pages.vllm(1))], broken="it stopped answering", unreachable=True)
    assert "it stopped answering" in figures(seen)["notes"][0]


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (404, "", "serves no /metrics"),
        (501, "no", "--metrics"),
        (401, "", "--api-key"),
        (200, "<html>", "not in Prometheus' text format"),
        (200, "# TYPE up gauge\nup 1\n", "none of the names"),
    ],
)
def test_what_is_no_such_server(status: int, text: str, message: str) -> None:
    with pages.serving(lambda *_: (status, text)) as url, pytest.raises(ConfigError, match=message):
        run(DoctorOptions(log=url, sample=0))


def test_nothing_listens() -> None:
    with pages.serving(lambda *_: (200, "")) as url:
        pass
    with pytest.raises(ConfigError, match="no server answers at"):
        run(DoctorOptions(log=url, sample=0))


@pytest.mark.parametrize("wrong", [{"fix": "x"}, {"heads": True}, {"html": "x"}, {"sample": -1.0}, {"sample": 1e9}])
def test_options_of_logs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DoctorOptions(log="http://localhost:8000", **wrong)


@pytest.mark.parametrize("url", ["http://", "http://a:99999", "http://a/?x=1", "http://[::1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="not a server address"):
        run(DoctorOptions(log=url, sample=0))


def test_the_docs_name_every_figure_of_a_server() -> None:
    docs = Path(__file__).resolve().parents[4] / "docs" / "doctor.md"
    listed = docs.read_text("utf-8").partition("In `--json FILE`, `sample`")[2].partition("The exit code is 2")[0]
    data = figures(ScrapedServer("http://a", "vllm", "0.11.0", {}, [parse("vllm:num_requests_running 0")]))
    names = {*data, *data["since_start"]} - {"sample"}
    assert [name for name in sorted(names) if f"`{name}`" not in listed] == []

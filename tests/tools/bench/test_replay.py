"""Logs: what is read, in which order and when it is sent, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from anaphora.errors import ConfigError
from anaphora.tools.bench import BenchOptions, command, run, servers
from anaphora.tools.bench.replay import read_airline, read_log
from tests.tools.fake_server import Fake, render, serving


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake server counts at once; real ones may update their counters after the last event."""
    monkeypatch.setattr(command, "SETTLE_SECONDS", 0.0)


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "other", "messages": [{"role": "user", "content": text}], **more}


def contents(fake: Fake) -> list[str]:
    return [seen["messages"][0]["content"] for seen in fake.seen[1:]]


def test_a_log_of_bodies_is_replayed_in_order(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", *(body(f"question {n}", max_tokens=3, top_p=0.5) for n in range(5)))
    with serving(Fake()) as fake:
        code = run(BenchOptions(log=log, url=fake.url, concurrency=1, rounds=1, json=str(tmp_path / "r.json")))
    assert code == 0
    assert contents(fake) == [f"question {n}" for n in range(5)]
    assert {seen["model"] for seen in fake.seen} == {"fake-1"}
    assert [seen["max_tokens"] for seen in fake.seen[1:]] == [3] * 5
    # The body's own limit is an upper one: the answer may end before it.
    assert all("ignore_eos" not in seen for seen in fake.seen[1:])
    assert json.loads((tmp_path / "r.json").read_text())["workload"] == "log"


def test_records_give_the_length_of_the_answer_and_rounds_are_kept_apart(tmp_path: Path) -> None:
    text = " ".join(f"word{n}" for n in range(100))
    record = {"time": 1.0, "id": "a", "model": "m", "prompt_tokens": 9, "output_tokens": 7}
    log = write(tmp_path / "log.jsonl", *(record | {"body": body(text, cache_salt=s)} for s in ("x", "x", "y")))
    target = tmp_path / "r.json"
    with serving(Fake()) as fake:
        run(BenchOptions(log=log, url=fake.url, concurrency=1, rounds=2, json=str(target)))
    assert [(seen["max_tokens"], seen["ignore_eos"]) for seen in fake.seen[1:]] == [(7, True)] * 6
    salts = [seen["cache_salt"] for seen in fake.seen[1:]]
    assert len(set(salts)) == 4
    assert salts[0] == salts[1] != salts[2]
    found = json.loads(target.read_text())
    assert [figures["hit_rate_requests"] for figures in found["on"]["rounds"]] == [pytest.approx(1 / 3)] * 2


def test_a_server_without_salts_gets_one_round(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", body("one"), body("two"))
    target = tmp_path / "r.json"
    with serving(Fake(refuses=("cache_salt",))) as fake:
        run(BenchOptions(log=log, url=fake.url, rounds=3, json=str(target)))
    assert len(fake.seen) == 1 + 2
    assert any("1 round instead of 3" in text for text in json.loads(target.read_text())["warnings"])


def test_timing_takes_the_arrivals_of_the_log(tmp_path: Path) -> None:
    lines = [{"time": 100.4, **body("late")}, {"time": 100.0, **body("early")}]
    sessions = read_log(write(tmp_path / "a.jsonl", *lines), out=None, timing=True)
    assert [s.requests[0].body["messages"][0]["content"] for s in sessions] == ["early", "late"]
    assert [s.at for s in sessions] == pytest.approx([0.0, 0.4])
    iso = [{"timestamp": f"2026-03-01T10:00:0{n}Z", "request": body("x")} for n in (1, 3)]
    assert [s.at for s in read_log(write(tmp_path / "b.jsonl", *iso), None, True)] == [0.0, 2.0]
    millis = [{"created": 1_700_000_000_000 + n, **body("x")} for n in (0, 1500)]
    assert [s.at for s in read_log(write(tmp_path / "c.jsonl", *millis), None, True)] == pytest.approx([0.0, 1.5])
    with serving(Fake(prefill_s=0.1)) as fake:
        run(BenchOptions(log=str(tmp_path / "a.jsonl"), timing=True, url=fake.url, rounds=1))
    assert contents(fake) == ["early", "late"]
    assert fake.most_in_flight == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt_tokens": 5, "time": 1, "id": "x", "model": "m"}', "line 2 has lengths but no body"),
        ('{"foo": 1}', "line 2 has no request"),
        ("[1, 2]", "line 2 is not a JSON object"),
        ("{broken", "line 2 is not a JSON object"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2 has no arrival time"),
        ('{"time": "noon", "prompt": "x"}', "line 2: time is 'noon'"),
        ('{"time": true, "prompt": "x"}', "line 2 has no arrival time"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"time": 1, **body("fine")}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=told):
        read_log(str(path), None, timing=True)


def test_empty_and_absent_logs_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no request"):
        read_log(str(tmp_path / "empty"), None, False)
    with pytest.raises(ConfigError, match="cannot read the log"):
        read_log(str(tmp_path / "absent"), None, False)
    with pytest.raises(ConfigError, match="--data"):
        read_airline(str(tmp_path), 3)


@pytest.mark.parametrize(
    "options",
    [{"log": "absent.jsonl"}, {"log": "bad.jsonl"}, {"workload": "agent", "data": "."}, {"workload": "agent"}],
)
def test_a_bad_log_is_told_before_a_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    def start(*_: object) -> NoReturn:
        raise AssertionError("a server was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(servers, "OwnServer", start)
    Path("bad.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\nnonsense\n')
    with pytest.raises(ConfigError, match=r"absent\.jsonl|bad\.jsonl, line 2|--data"):
        run(BenchOptions(**options))
    Path("good.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(AssertionError, match="started"):
        run(BenchOptions(log="good.jsonl"))


def test_requests_beyond_the_window_are_left_out_and_counted(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", body("short"), body("x " * 9000), body("short too"))
    target = tmp_path / "r.json"
    with serving(Fake()) as fake:
        run(BenchOptions(log=log, url=fake.url, rounds=1, json=str(target)))
    found = json.loads(target.read_text())
    assert contents(fake) == ["short", "short too"]
    assert found["skipped"] == 1
    assert any("1 requests a round were left out" in text for text in found["warnings"])


def test_the_airline_log_is_sent_as_conversations(shared_data: Path) -> None:
    sessions = read_airline(str(shared_data / "tau-bench"), 30)
    assert sum(len(session.requests) for session in sessions) == 30
    for session in sessions:
        for planned in session.requests:
            assert planned.body["messages"][0]["role"] == "system"
            assert planned.body["messages"][-1]["role"] in ("user", "tool")
            assert len(planned.body["tools"]) == 14
            assert planned.out
        lengths = [len(render(planned.body["messages"])) for planned in session.requests]
        assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"off_url": "http://x"}, "belong together"),
        ({"url": "http://x", "off_url": "http://y", "on_url": "http://z"}, "--url measures one server"),
        ({"url": "http://x", "server_args": ("--dtype", "float32")}, "is for own servers"),
        ({"log": "f", "workload": "agent"}, "--log replaces the workload"),
        ({"timing": True}, "--timing needs --log"),
        ({"log": "f", "timing": True, "rate": 1.0}, "leave out --rate"),
        ({"log": "f", "shared": 5}, "are for generated prompts"),
        ({"workload": "agent", "turns": 5}, "are for generated prompts"),
        ({"requests": 0}, "--requests must be at least 1, got 0"),
        ({"concurrency": -1}, "--concurrency must be at least 1"),
        ({"shared": -1}, "--shared must be at least 0"),
        ({"per_day": 0}, "--per-day must be at least 1"),
        ({"rate": 0.0}, "--rate must be a number above 0"),
        ({"rate": float("nan")}, "--rate must be a number above 0"),
        ({"gpu_hour_price": -2.0}, "--gpu-hour-price"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        BenchOptions(**options)

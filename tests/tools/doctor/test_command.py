"""The command from its options to files and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from anaphora.errors import ConfigError
from anaphora.tools.doctor import DoctorOptions, ExplainOptions, explain, run
from tests.tools.doctor import logs
from tests.tools.doctor.logs import Body

SHORT = "Be brief and kind, ask when in doubt, and never promise what the shop cannot keep or pay for."


def stamped() -> list[Body]:
    bodies = logs.interleaved(logs.conversations(count=6, turns=2, head=logs.rules(lines=20)))
    return [logs.with_system(b, lambda c, n=n: f"[Request ID: {n * 7919:08x}]\n{c}") for n, b in enumerate(bodies)]


def write(path: Path, bodies: list[Body]) -> str:
    usage = {"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": 100}}
    lines = [{"body": body, "time": 1780000000 + n, "usage": usage} for n, body in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_report_files_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "log.jsonl", stamped())
    (tmp_path / "prices.json").write_text(json.dumps({"in": 1, "cached": 0.1}))
    options = DoctorOptions(
        log=log,
        json=str(tmp_path / "out.json"),
        html=str(tmp_path / "out.html"),
        prices=str(tmp_path / "prices.json"),
        per_day=1000,
        prefill_rate=1000.0,
        gpu_hour_price=3.6,
        min_hit_rate=0.5,
        cache_tokens=100_000,
    )
    assert run(options) == 1
    data = json.loads((tmp_path / "out.json").read_text())
    (item,) = data["breaks"]
    assert data["requests"] == 12
    assert data["conversations"] == 6
    assert data["hit_rate"] < 0.1 < 0.7 < data["best_hit_rate"]
    assert (item["class"], item["status"], item["message"], item["role"]) == ("request_id", "confirmed", 0, "system")
    assert item["start"] == 13
    assert item["seconds_lost"] == pytest.approx(item["tokens_lost"] / 1000)
    assert item["cost_a_day"] == pytest.approx(item["tokens_lost"] / 1000 / 12 * 1000 / 1000)
    assert item["predicted_hit_rate"] == pytest.approx(data["best_hit_rate"])
    assert data["reported"]["hit_rate"] == pytest.approx(0.2)
    assert data["reported"]["price"] == pytest.approx(12 * (400 + 100 * 0.1) / 1e6)
    assert data["limits"]["cold"] == 1
    assert data["limited"]["hit_rate"] == pytest.approx(data["hit_rate"], abs=0.01)
    page = (tmp_path / "out.html").read_text()
    assert "request_id" in page
    assert "http" not in page.replace("http-equiv", "")
    shown = capsys.readouterr().out
    assert "request_id" in shown
    assert "message 0 (system)" in shown


def test_a_cost_of_a_day_that_cannot_be_told_in_money(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = write(tmp_path / "log.jsonl", stamped()), tmp_path / "out.json"
    run(DoctorOptions(log=log, json=str(out), per_day=1200, gpu_hour_price=3.6))
    data = json.loads(out.read_text())
    (item,) = data["breaks"]
    assert item["tokens_a_day"] == pytest.approx(item["tokens_lost"] * 100)
    assert "cost_a_day" not in item
    assert ["--prefill-rate" in warning for warning in data["warnings"]] == [True]
    assert f"{item['tokens_lost'] * 100:,} tokens a day" in " ".join(capsys.readouterr().out.split())
    run(DoctorOptions(log=log, json=str(out), gpu_hour_price=3.6))
    assert ["needs --per-day" in warning for warning in json.loads(out.read_text())["warnings"]] == [True]


def test_the_fixed_log_says_the_same_and_hits(tmp_path: Path) -> None:
    bodies = stamped()
    fixed = tmp_path / "fixed.jsonl"
    run(DoctorOptions(log=write(tmp_path / "log.jsonl", bodies), fix=str(fixed)))
    lines = [json.loads(line) for line in fixed.read_text().splitlines()]
    assert len(lines) == len(bodies)
    for before, line in zip(bodies, lines, strict=True):
        texts = ["\n".join(m["content"] for m in b["messages"]) for b in (before, line["body"])]
        assert sorted(texts[0].split()) == sorted(texts[1].split())
        assert line["time"]
    assert run(DoctorOptions(log=str(fixed), min_hit_rate=0.7)) == 0


def test_fix_sorts_tools(tmp_path: Path) -> None:
    tools = [logs.tool(name) for name in "abc"]
    made = logs.conversations(count=6, turns=2, head=logs.rules(lines=20))
    bodies = [{**b, "tools": tools if n % 3 else tools[::-1]} for n, b in enumerate(logs.interleaved(made))]
    fixed = tmp_path / "fixed.jsonl"
    run(DoctorOptions(log=write(tmp_path / "log.jsonl", bodies), fix=str(fixed)))
    orders = {
        tuple(t["function"]["name"] for t in json.loads(line)["body"]["tools"])
        for line in fixed.read_text().splitlines()
    }
    assert len(orders) == 1


def test_fix_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", stamped()[:2])
    with pytest.raises(ConfigError, match="overwrite"):
        run(DoctorOptions(log=log, fix=log))


def test_a_regression_since_an_earlier_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = logs.interleaved(logs.conversations(count=6, turns=2, head=logs.rules(lines=20)))
    fine = [{**body, "model": "small"} for body in bodies]
    stamped_bodies = [{**body, "model": "large"} for body in stamped()]
    earlier = write(tmp_path / "earlier.jsonl", [*fine, *({**body, "model": "large"} for body in bodies)])
    out = tmp_path / "out.json"
    now = write(tmp_path / "now.jsonl", [*fine, *stamped_bodies])
    assert run(DoctorOptions(log=now, baseline=now)) == 0
    capsys.readouterr()
    assert run(DoctorOptions(log=now, baseline=earlier, json=str(out))) == 1
    data = json.loads(out.read_text())
    routes = {route["route"]: route for route in data["baseline"]["routes"]}
    assert {name: route["regression"] for name, route in routes.items()} == {"large": True, "small": False}
    assert routes["large"]["hit_rate"] < 0.1 < 0.7 < routes["large"]["hit_rate_before"]
    assert [data["breaks"][index]["class"] for index in data["baseline"]["new_breaks"]] == ["request_id"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "a regression" in shown
    assert "new since then: request_id in message 0 (system)" in shown


@pytest.mark.parametrize("how", ["report", "heads"])
def test_control_characters_of_a_log_do_not_reach_the_terminal(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = "\x1b]0;mine\x07\x1b[2J\r\x9b3"
    bodies = [logs.with_system(b, lambda c, n=n: f"{marks}{n * 7919:08x}\n{c}") for n, b in enumerate(stamped())]
    run(DoctorOptions(log=write(tmp_path / "log.jsonl", bodies), heads=how == "heads"))
    out = capsys.readouterr().out
    assert "␛[2J\ufffd" in out
    assert not set(out) & set("\x1b\x07\r\x9b")


def test_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "log.jsonl", stamped())
    assert run(DoctorOptions(log=log, heads=True)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("12 prompts with 12 different first 200 characters; all begin with the same 35 ")
    assert len(re.findall(r"\[Request ID: «[0-9a-f]{8}»\]", shown)) == 12


def test_heads_of_several_kinds_are_compared_with_their_like(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [
        f"{kind} {n:06d} is what you are, so answer the people kindly." for kind in ("Bank", "Shop") for n in (1, 2)
    ]
    lines = [{"prompt": prompt} for prompt in (*prompts, prompts[0])]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(DoctorOptions(log=str(path), heads=True)) == 0
    shown = capsys.readouterr().out
    assert "5 prompts with 4 different first" in shown
    assert "×2" in shown
    for kind in ("Bank", "Shop"):
        assert f"{kind} «000001» is what" in shown
        assert f"{kind} «000002» is what" in shown


def test_heads_that_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "the same"}\n' * 3)
    assert run(DoctorOptions(log=str(path), heads=True)) == 0
    shown = capsys.readouterr().out
    assert "3 prompts, all with the same first 8 characters" in shown
    assert "«" not in shown


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = []
    for n, body in enumerate(stamped()[:2]):
        names.append(str(tmp_path / f"{n}.json"))
        Path(names[-1]).write_text(json.dumps(body))
    assert explain(ExplainOptions(first=names[0], second=names[1])) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "They part in message 0 (system), character 17" in shown
    assert "[Request ID: «00000000»]" in shown
    assert "request_id" in shown


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ("[]", "second.json: a JSON list, not an object"),
        ("3", "second.json: a JSON int, not an object"),
        ('{"prompt": [1, 2]}', "second.json: its prompt is not text"),
        ('{"requests": [{"prompt": "a"}, {"prompt": "b"}]}', "must hold one request each"),
        ('{"body": "%s"}' % ("{" + r"\"a\":{" * 100_000), "second.json: it is nested too deeply"),
        ("[" * 200_000, "second.json is nested too deeply"),
    ],
)
def test_explain_refuses_files_without_one_request(
    tmp_path: Path, second: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("first.json").write_text('{"prompt": "a"}')
    Path("second.json").write_text(second)
    with pytest.raises(ConfigError) as refused:
        explain(ExplainOptions(first="first.json", second="second.json"))
    assert reason in refused.value.message


def test_explain_never_compares_two_requests_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "two.json").write_text('{"requests": [{"prompt": "a"}, {"prompt": "b"}]}')
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"must hold one request each: .*none\.json"):
        explain(ExplainOptions(first=str(tmp_path / "two.json"), second=str(tmp_path / "none.json")))


def test_an_empty_log_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1: it has neither messages nor a prompt"):
        run(DoctorOptions(log=str(tmp_path / "log.jsonl")))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"log": "a", "min_hit_rate": 2.0},
        {"log": "a", "block_size": 0},
        {"log": "a", "json": "-"},
        {"log": "a", "fix": "-"},
        {"log": "-", "baseline": "-"},
    ],
)
def test_wrong_options(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        DoctorOptions(**wrong)  # type: ignore[arg-type]


def test_limits(tmp_path: Path) -> None:
    made = logs.conversations(
        count=6,
        turns=1,
        head=SHORT,
    )
    salted = [{**bodies[0], "cache_salt": f"s{n}"} for n, bodies in enumerate(made)]
    out = tmp_path / "out.json"
    for bodies, size, name in ((salted, 1, "routing_key"), ([b[0] for b in made], 64, "block_too_large")):
        path = tmp_path / "log.jsonl"
        path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
        run(DoctorOptions(log=str(path), json=str(out), block_size=size))
        data = json.loads(out.read_text())
        assert data["hit_rate"] == 0
        assert data["breaks"] == []
        assert {limit: count for limit, count in data["limits"].items() if count} == {"cold": 1, name: 5}


@pytest.mark.parametrize("block_size", [1, 16, 128, 512])
def test_a_limited_cache_never_beats_the_unlimited_one(block_size: int, tmp_path: Path) -> None:
    heads = [logs.conversations(count=6, turns=3, head=logs.rules(seed, 40)) for seed in range(2)]
    made = logs.interleaved(bodies for pair in zip(*heads, strict=True) for bodies in pair)
    log, out = write(tmp_path / "log.jsonl", made), tmp_path / "out.json"
    rates = []
    for tokens in (1_500, 4_000, 1_000_000):
        run(DoctorOptions(log=log, json=str(out), block_size=block_size, cache_tokens=tokens))
        data = json.loads(out.read_text())
        assert data["limited"]["hit_rate"] <= data["hit_rate"]
        rates.append(data["limited"]["hit_rate"])
    assert rates[0] <= rates[1] <= rates[2]
    assert rates[0] < rates[2] == pytest.approx(data["hit_rate"])
    assert data["limits"]["cache_too_small"] == 0

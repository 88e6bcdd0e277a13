"""Logs of many kinds, mixed, broken and packed."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anaphora.errors import ConfigError
from anaphora.observe.record import RequestRecord
from anaphora.tools.doctor.price.diagnose import diagnose
from anaphora.tools.doctor.read.load_log import load_log
from anaphora.tools.shared.request_log.bodies import LoggedRequest
from anaphora.tools.shared.request_log.log_files import read_requests
from anaphora.tools.shared.tokenizer_and_template import load_tokenizer_and_template
from anaphora.tools.shared.usage import Usage

TRACES = Path(__file__).resolve().parents[5] / "shared/data/inference-perf-otel/examples/otel/test_traces"


def requests(path: Path | str) -> tuple[list[LoggedRequest], list[int]]:
    bad: list[int] = []
    return list(read_requests(str(path), lambda line, why: bad.append(line))), bad


def written(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


PARTS = [{"type": "text", "text": "a"}]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        (CHAT, ["hi"]),
        ({"body": CHAT, "time": 5, "ttft_s": 0.1}, ["hi"]),
        ({"request": {"body": CHAT}, "response": {"usage": {"prompt_tokens": 3}}}, ["hi"]),
        ({"custom_id": "1", "method": "POST", "body": CHAT}, ["hi"]),
        ({"request": json.dumps(CHAT)}, ["hi"]),
        (
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]},
            [[{"type": "text", "text": "a"}]],
        ),
        ({"system": "s", "messages": [{"role": "user", "content": "u"}]}, ["s", "u"]),
        ({"instructions": "s", "input": "u"}, ["s", "u"]),
        ({"contents": [{"role": "model", "parts": [{"text": "x"}]}]}, [[{"type": "text", "text": "x"}]]),
    ],
)
def test_bodies_of_several_apis(line: Any, texts: list[Any], tmp_path: Path) -> None:
    found, bad = requests(written(tmp_path, line))
    assert bad == []
    assert [message["content"] for message in found[0].messages] == texts


def test_prompts(tmp_path: Path) -> None:
    vllm = "INFO 11-29 10:00:00 [logger.py:41] Received request cmpl-1: prompt: 'say \\'a\\'\\n', params: Sampling()"
    found, bad = requests(written(tmp_path, {"prompt": "a"}, json.dumps("b"), {"prompt": ["c", "d"]}, vllm))
    assert bad == []
    assert [logged.prompt for logged in found] == ["a", "b", "c", "d", "say 'a'\n"]


def test_anthropic_blocks(tmp_path: Path) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "find", "input": {"b": 1, "a": 2}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]}
    thought = {"type": "thinking", "thinking": "hm"}
    body = {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "t"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "more"}]},
        ],
    }
    (found,), _ = requests(written(tmp_path, body))
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "user"]
    assert found.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"b": 1, "a": 2}'
    assert found.messages[2]["reasoning_content"] == "hm"
    assert found.origins == ["system", "messages[0]", "messages[1]", "messages[2]", "messages[2]"]


def test_times_sessions_and_salts(tmp_path: Path) -> None:
    first = {"time": 1780000000.5, "salt": "ab", "body": CHAT, "prefill_s": 0.25}
    second = {"t": "2026-09-14T23:59:50+00:00", "metadata": {"session_id": "s1"}, **CHAT, "prompt_cache_key": "k"}
    (a, b), _ = requests(written(tmp_path, first, second))
    assert (a.time, a.salt, a.prefill_s) == (1780000000.5, "ab", 0.25)
    assert (b.time, b.session, b.salt) == (1789430390.0, "s1", "k")


def test_bad_lines_are_named_and_skipped(tmp_path: Path) -> None:
    lines = [
        CHAT,
        "{broken",
        "",
        "[1, 2]",
        {"messages": ["text"]},
        {"prompt": [1, 2]},
        {"prompt_tokens": 4},
        "plain",
        CHAT,
    ]
    found, bad = requests(written(tmp_path, *lines))
    assert len(found) == 2
    assert bad == [2, 4, 5, 6, 7, 8]


def test_requests_that_were_refused_are_none(tmp_path: Path) -> None:
    records = [{"body": CHAT, "status": status, "route": "/v1/chat/completions"} for status in (200, 400, 502, "ok")]
    found, bad = requests(written(tmp_path, *records))
    assert [logged.line for logged in found] == [1, 4]
    assert bad == [2, 3]


@pytest.mark.parametrize("told", [{"prompt_tokens": 4}, {}])
def test_a_record_without_its_prompt_says_how_to_get_it(told: dict[str, int], tmp_path: Path) -> None:
    path = written(tmp_path, {"time": 1.0, "id": "r", "model": "m", "route": "/v1/completions", "total_s": 0.5} | told)
    with pytest.raises(ConfigError, match="--record-prompts"):
        load_log(str(path), load_tokenizer_and_template(None, None))


def test_a_broken_first_line_costs_no_other(tmp_path: Path) -> None:
    found, bad = requests(written(tmp_path, '{"messages": [', CHAT, CHAT, "{"))
    assert len(found) == 2
    assert bad == [1, 4]


@pytest.mark.parametrize("deep", ["[" * 100_000, "[" * 2000 + "]" * 2000, '{"messages":' * 9000])
def test_a_first_line_nested_too_deeply_costs_no_other(deep: str, tmp_path: Path) -> None:
    found, bad = requests(written(tmp_path, deep, CHAT, CHAT))
    assert len(found) == 2
    assert bad == [1]


def test_times_that_no_clock_has_are_not_known(tmp_path: Path) -> None:
    (found,), bad = requests(written(tmp_path, {"body": CHAT, "time": 10**400, "ttft_s": 10**400}))
    assert bad == []
    assert found.time is None


def test_gzip_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(json.dumps(CHAT).encode() + b"\n")
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(packed)
    assert len(requests(path)[0]) == 1
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(packed))))
    assert len(requests("-")[0]) == 1


def test_a_missing_log() -> None:
    with pytest.raises(ConfigError, match="cannot read the log /nowhere/log"):
        requests("/nowhere/log")


def test_an_address_without_its_scheme_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match="a running server is named http://localhost:8000"):
        requests("localhost:8000")


def test_an_array_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps([CHAT, CHAT], indent=2))
    assert len(requests(path)[0]) == 2


def test_otlp_spans(tmp_path: Path) -> None:
    messages = [{"role": "user", "parts": [{"type": "text", "content": "q"}]}]
    instructions = [{"type": "text", "content": "s"}]
    attributes = [
        {"key": "gen_ai.input.messages", "value": {"stringValue": json.dumps(messages)}},
        {"key": "gen_ai.system_instructions", "value": {"stringValue": json.dumps(instructions)}},
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "7"}},
    ]
    span = {"startTimeUnixNano": "1780000000000000000", "attributes": attributes}
    (found,), _ = requests(written(tmp_path, {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    assert [message["role"] for message in found.messages] == ["system", "user"]
    assert found.time == 1780000000.0
    assert found.usage is not None
    assert found.usage.prompt == 7


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the traces are not at {TRACES}")
def test_trace_files() -> None:
    for path in sorted(TRACES.rglob("*.json")):
        found, bad = requests(path)
        spans = json.loads(path.read_text())["spans"]
        asked = [span for span in spans if "gen_ai.input.messages" in span["attributes"]]
        assert (len(found), bad) == (len(asked), [])
        assert all(logged.time for logged in found)


def test_our_own_records(tmp_path: Path) -> None:
    record = RequestRecord(
        time=1780000000.0,
        id="r",
        model="m",
        prompt_tokens=40,
        block_size=16,
        cached_tokens=32,
        prefill_s=0.5,
        body=CHAT,
    )
    path = tmp_path / "log.jsonl"
    path.write_bytes(msgspec.json.encode(record) + b"\n")
    (found,), _ = requests(path)
    assert found.messages == CHAT["messages"]
    assert found.usage == Usage(40, 32)
    assert found.prefill_s == 0.5


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        {"messages": [{"role": "critic", "content": "\ue0007\ue001 <think>"}], "tools": ["x", 5, None]},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}, "time": "never"},
        {"system": {"a": 1}, "messages": [{"role": "user", "content": "x"}], "metadata": "x"},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]},
        CHAT | {"time": 10**400, "ttft_s": -(10**400)},
        {"requests": []},
        {"spans": [{"attributes": 5}, 5]},
        {"resourceSpans": [5, {"scopeSpans": None}]},
        {"attributes": {"gen_ai.input.messages": "[]"}, "startTimeUnixNano": "9" * 5000},
        {"attributes": [{"key": "gen_ai.input.messages", "value": {"intValue": "x"}}]},
        {"attributes": [{"key": "gen_ai.input.messages", "value": {"arrayValue": 5}}]},
        {"prompt": ["a", 1]},
        "null",
        "[" * 5000,
    ],
)
def test_no_line_brings_it_down(line: Any, tmp_path: Path) -> None:
    log = load_log(str(written(tmp_path, CHAT, line, line, CHAT)), load_tokenizer_and_template(None, None))
    assert len(log.prompts) + log.bad_lines >= 2
    assert [prompt.line for prompt in log.prompts if prompt.line in (1, 4)] == [1, 4]
    assert diagnose(log).before.total > 0

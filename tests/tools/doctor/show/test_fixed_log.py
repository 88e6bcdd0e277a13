"""The log that --fix writes: it hits as predicted, says the same, and what moved is listed."""

from __future__ import annotations

import functools
import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anaphora.tools.doctor import DoctorOptions, run
from tests.tools.doctor import logs
from tests.tools.doctor.logs import Body

pytestmark = pytest.mark.slow

RULES = logs.rules(lines=20)


def chats(count: int = 6, turns: int = 4) -> list[list[Body]]:
    return logs.conversations(count=count, turns=turns, head=RULES)


def with_line(line: str, bodies: list[Body]) -> list[Body]:
    """``line`` with a time in it as the first line of the system text."""
    return [
        logs.with_system(b, lambda c, n=n: f"{line.format(f'2026-11-29 10:{n % 60:02}:{n * 7 % 60:02}')}\n{c}")
        for n, b in enumerate(bodies)
    ]


def clock() -> list[Body]:
    return with_line("Now: {}", logs.interleaved(chats()))


def clock_in_parts() -> list[Body]:
    return [
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in body["messages"]]}
        for body in clock()
    ]


def clock_beside_messages() -> list[Body]:
    return [{"system": body["messages"][0]["content"], "messages": body["messages"][1:]} for body in clock()]


def clock_in_prompts() -> list[Body]:
    rng = random.Random(1)
    return [{"prompt": f"Now: 2026-11-29 10:{n:02}:01\n{RULES}\nQuestion: {logs.sentence(rng)}"} for n in range(20)]


def rounds(count: int = 4, steps: int = 5) -> list[Body]:
    made = []
    for n in range(count):
        rng = random.Random(n)
        messages = [logs.system(RULES), logs.user(logs.sentence(rng))]
        bodies = [{"messages": messages}]
        for step in range(steps):
            function = {"name": "find", "arguments": json.dumps({"q": logs.sentence(rng, 3), "unit": "km"})}
            call = {"id": f"c{step}", "type": "function", "function": function}
            result = {"role": "tool", "tool_call_id": f"c{step}", "content": logs.sentence(rng, 60)}
            messages = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
            bodies.append({"messages": messages})
        made.append(bodies)
    return logs.interleaved(made)


def clock_in_rounds() -> list[Body]:
    return with_line("Now: {}", rounds())


def window() -> list[Body]:
    return logs.interleaved(
        [{"messages": [b["messages"][0], *b["messages"][1:][-8:]]} for b in bodies] for bodies in chats(4, 12)
    )


def cut_short() -> list[Body]:
    def cut(body: Body) -> Body:
        first, *rest = body["messages"]
        return {
            "messages": [first, *({**m, "content": m["content"][:60]} if i < len(rest) - 4 else m
                                  for i, m in enumerate(rest))]
        }  # fmt: skip

    return logs.interleaved([[cut(b) for b in bodies] for bodies in chats(4, 8)])


def arguments_turned() -> list[Body]:
    """All tool calls but the newest come back with their keys sorted the other way."""
    bodies = rounds()
    for body in bodies:
        calls = [m for m in body["messages"] if m.get("tool_calls")]
        body["messages"] = [_turned(m) if m in calls[:-1] else m for m in body["messages"]]
    return bodies


def _turned(message: Body) -> Body:
    (call,) = message["tool_calls"]
    arguments = json.dumps(dict(reversed(json.loads(call["function"]["arguments"]).items())))
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}]}


def tools(turned: Callable[[int, list[Any]], list[Any]]) -> list[Body]:
    listed = [logs.tool(f"tool_{name}") for name in "abcde"]
    return [{**body, "tools": turned(n, listed)} for n, body in enumerate(logs.interleaved(chats()))]


def tools_shuffled() -> list[Body]:
    return tools(lambda n, listed: random.Random(n).sample(listed, len(listed)))


def schemas_turned() -> list[Body]:
    def turned(n: int, listed: list[Any]) -> list[Any]:
        return [{"type": t["type"], "function": _shuffled(n, t["function"])} for t in listed]

    return tools(turned)


def required_shuffled() -> list[Body]:
    def shuffled(n: int, listed: list[Any]) -> list[Any]:
        names = random.Random(n).sample(["query", "limit", "page"], 3)
        return [{**t, "function": {**t["function"], "parameters": {"required": names}}} for t in listed]

    return tools(shuffled)


def clock_in_the_first_message() -> list[Body]:
    made = []
    for n, body in enumerate(logs.interleaved(chats())):
        head, first, *rest = body["messages"]
        stamped = f"Now: 2026-11-29 10:{n % 60:02}:{n * 7 % 60:02}\n{logs.rules(1, 20)}\n{first['content']}"
        made.append({"messages": [head, logs.user(stamped), *rest]})
    return made


def _shuffled(seed: int, value: Body) -> Body:
    return dict(random.Random(seed).sample(list(value.items()), len(value)))


KINDS: dict[str, tuple[Callable[[], list[Body]], str]] = {
    make.__name__: (make, kind)
    for make, kind in (
        (clock, "clock_time"),
        (clock_in_parts, "clock_time"),
        (clock_beside_messages, "clock_time"),
        (clock_in_prompts, "clock_time"),
        (clock_in_rounds, "clock_time"),
        (window, "trimmed_history"),
        (cut_short, "rewritten_history"),
        (arguments_turned, "key_order"),
        (tools_shuffled, "tool_order"),
        (schemas_turned, "key_order"),
        (required_shuffled, "key_order"),
        (clock_in_the_first_message, "clock_time"),
    )
}


@functools.cache
def fixed(name: str, folder: Path) -> tuple[Body, list[Body]]:
    """The diagnosis with what moved, and the fixed bodies."""
    log, out = folder / f"{name}.jsonl", folder / f"{name}.fixed.jsonl"
    log.write_text("".join(json.dumps(body) + "\n" for body in KINDS[name][0]()))
    run(DoctorOptions(log=str(log), fix=str(out), json=str(folder / "before.json")))
    return json.loads((folder / "before.json").read_text()), [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fixed")


@pytest.mark.parametrize("name", KINDS)
def test_the_fixed_log_hits_as_predicted(name: str, folder: Path) -> None:
    before, bodies = fixed(name, folder)
    kind = KINDS[name][1]
    assert [(item["class"], item["status"]) for item in before["breaks"]] == [(kind, "confirmed")]
    assert len(bodies) == before["requests"]
    run(DoctorOptions(log=str(folder / f"{name}.fixed.jsonl"), json=str(folder / "after.json")))
    after = json.loads((folder / "after.json").read_text())
    assert after["hit_rate"] == pytest.approx(before["best_hit_rate"], abs=0.01)
    assert after["hit_rate"] > before["hit_rate"] + 0.02
    assert {move["class"] for move in before["fix"]["moved"]} == {kind}
    assert before["fix"]["changed"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "clock",
        "clock_in_parts",
        "clock_beside_messages",
        "clock_in_prompts",
        "clock_in_rounds",
        "clock_in_the_first_message",
    ],
)
def test_every_word_is_kept(name: str, folder: Path) -> None:
    _, bodies = fixed(name, folder)
    for old, new in zip(KINDS[name][0](), bodies, strict=True):
        assert sorted(_words(old)) == sorted(_words(new))


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list):
        return [word for item in value for word in _words(item)]
    if value is None:
        return []
    return [w for key, item in value.items() if key not in ("role", "type") for w in _words(item)]


def test_a_clock_among_tool_rounds_goes_to_the_very_end(folder: Path) -> None:
    before, bodies = fixed("clock_in_rounds", folder)
    assert before["breaks"][0]["place"] == "very end of the prompt"
    assert all(body["messages"][-1]["content"].startswith("Now: 2026") for body in bodies)


def test_the_prompt_with_placeholders(folder: Path) -> None:
    before, _ = fixed("clock", folder)
    (name,) = before["fix"]["templates"]
    text = Path(name).read_text()
    assert text.startswith(RULES)
    assert "Now: {clock_time}" in text
    assert "end of the last user message" in text


def test_windows_keep_a_tool_result_with_its_call(folder: Path) -> None:
    log, out = folder / "rounds.jsonl", folder / "rounds.fixed.jsonl"
    bodies = [{"messages": [b["messages"][0], *b["messages"][1:][-8:]]} for b in rounds(steps=12)]
    log.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    run(DoctorOptions(log=str(log), fix=str(out)))
    for line in out.read_text().splitlines():
        first = next(m for m in json.loads(line)["messages"] if m["role"] != "system")
        assert first["role"] != "tool"


def test_what_moving_texts_cannot_mend_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A time in a tool's description: cutting it out would change what the description says."""
    bodies = tools(lambda n, listed: [logs.tool("look", f"Looks. Built at 2026-11-29 10:15:{n:02}."), *listed])
    log, out, found = (folder / f"left.{end}" for end in ("jsonl", "fixed", "json"))
    log.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    run(DoctorOptions(log=str(log), fix=str(out), json=str(found)))
    told = json.loads(found.read_text())
    assert told["best_hit_rate"] > told["hit_rate"] + 0.1
    assert {left["class"] for left in told["fix"]["left"]} == {"clock_time"}
    assert {left["place"] for left in told["fix"]["left"]} == {"tools[0]"}
    assert "clock_time in tools[0] is still there" in " ".join(capsys.readouterr().out.split())
    assert [json.loads(line) for line in out.read_text().splitlines()] == bodies


# --- Breaks that hide each other -------------------------------------------------------------------------------------


def head_and_tools(line: str) -> list[Body]:
    """A line new in each request at the system text's beginning, and the tools behind it in any order."""
    listed = [logs.tool(f"tool_{name}") for name in "abcdef"]
    made = []
    for n, body in enumerate(logs.interleaved(logs.conversations(count=30, turns=1, head=RULES))):
        rng = random.Random(n)
        head = line.format(n=n, id=uuid.UUID(int=rng.getrandbits(128)))
        stamped = logs.with_system(body, lambda c, head=head: f"{head}\n{c}")
        made.append({**stamped, "tools": rng.sample(listed, len(listed))})
    return made


def two_in_one_block() -> list[Body]:
    """An id and, a few lines on, a clock: in blocks of 128 tokens each hides what mending the other would save."""
    made = []
    for n, body in enumerate(head_and_tools("Request: {id}")):
        clock = f"Now: 2026-11-29 10:{n:02}:{n * 7 % 60:02}"
        stamped = logs.with_system(body, lambda c, clock=clock: _inserted(c, clock))
        made.append({"messages": stamped["messages"]})
    return made


def _inserted(text: str, line: str) -> str:
    lines = text.split("\n")
    return "\n".join([*lines[:4], line, *lines[4:]])


def diagnosed(bodies: list[Body], folder: Path, block_size: int) -> tuple[Body, Body]:
    """The diagnosis of a log, and that of its mended one."""
    log, out, data = folder / "log.jsonl", folder / "fixed.jsonl", folder / "data.json"
    log.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    run(DoctorOptions(log=str(log), fix=str(out), json=str(data), block_size=block_size))
    before = json.loads(data.read_text())
    run(DoctorOptions(log=str(out), json=str(data), block_size=block_size))
    return before, json.loads(data.read_text())


@pytest.mark.parametrize(
    ("bodies", "kinds", "block_size"),
    [
        (head_and_tools("Request: {id}"), {"request_id", "tool_order"}, 1),
        (head_and_tools("Request: {id}"), {"request_id", "tool_order"}, 128),
        (head_and_tools("Now: 2026-11-29 10:{n:02}:01"), {"clock_time", "tool_order"}, 1),
        (two_in_one_block(), {"request_id", "clock_time"}, 1),
        (two_in_one_block(), {"request_id", "clock_time"}, 128),
    ],
)
def test_breaks_that_hide_each_other_are_mended_together(
    bodies: list[Body], kinds: set[str], block_size: int, tmp_path: Path
) -> None:
    before, after = diagnosed(bodies, tmp_path, block_size)
    assert {item["class"] for item in before["breaks"] if item["status"] == "confirmed"} == kinds
    assert not [item for item in after["breaks"] if item["status"] == "confirmed"]
    assert after["hit_rate"] == pytest.approx(before["best_hit_rate"], abs=0.001)
    assert after["hit_rate"] > 0.6 > 0.2 > before["hit_rate"]
    saved = before["best_hit_rate"] * after["prompt_tokens"] - before["hit_rate"] * before["prompt_tokens"]
    lost = sum(item["tokens_lost"] for item in before["breaks"])
    assert lost == pytest.approx(saved, abs=0.03 * before["prompt_tokens"])


@pytest.mark.parametrize(
    ("head", "end"),
    [
        ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>assistant\n"),
        ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (
            "<|start_header_id|>system<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
        ("[INST] ", " [/INST]"),
        ("Rules:\n", "\nAnswer:"),
        ("Rules:\n", ""),
    ],
)
def test_nothing_moves_behind_the_marks_that_open_the_answer(head: str, end: str, tmp_path: Path) -> None:
    asked = [logs.sentence(random.Random(n)) for n in range(20)]
    clocks = [f"Now: 2026-11-29 10:{n:02}:01" for n in range(20)]
    bodies = [{"prompt": f"{head}{c}\n{RULES}\n{q}{end}"} for c, q in zip(clocks, asked, strict=True)]
    before, after = diagnosed(bodies, tmp_path, 1)
    assert after["hit_rate"] == pytest.approx(before["best_hit_rate"], abs=0.001)
    assert after["hit_rate"] > 0.7 > before["hit_rate"]
    lines = (tmp_path / "fixed.jsonl").read_text().splitlines()
    for line, clock, question in zip(lines, clocks, asked, strict=True):
        prompt = json.loads(line)["prompt"]
        assert prompt.split() == f"{head}{RULES}\n{question}\n{clock}{end}".split()
        assert prompt.endswith(f"{question}\n{clock}{end}")
    template = (tmp_path / "fixed.jsonl.template.txt").read_text()
    assert template.rstrip("\n").endswith("}" + end.rstrip("\n"))


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("Request: {id}", "end of the last user message"),
        ("Now: 2026-11-29 10:{n:02}:01", "tail of the system text"),  # the date in it is shared there
    ],
)
@pytest.mark.parametrize("count", [2, 5, 30])
def test_a_log_of_any_length_is_given_the_same_place(line: str, place: str, count: int, tmp_path: Path) -> None:
    bodies = [{"messages": body["messages"]} for body in head_and_tools(line)[:count]]
    before, after = diagnosed(bodies, tmp_path, 1)
    assert [item["place"] for item in before["breaks"] if item["place"]] == [place]
    assert after["hit_rate"] == pytest.approx(before["best_hit_rate"], abs=0.001)

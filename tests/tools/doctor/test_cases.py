"""Faults that users of other systems reported, each in another form than they had it."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from anaphora.tools.doctor.options import DoctorOptions
from anaphora.tools.doctor.price.breaks import Break
from anaphora.tools.doctor.price.diagnose import Diagnosis, diagnose
from anaphora.tools.doctor.read.load_log import log_from_bodies
from anaphora.tools.doctor.show.diagnosis_json import NO_GAIN, as_json
from anaphora.tools.shared.tokenizer_and_template import TokenizerAndTemplate, load_tokenizer_and_template
from tests.tools.doctor import logs
from tests.tools.doctor.logs import Body

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
TEMPLATES = DATA / "chat-templates"
needs_templates = pytest.mark.skipif(not TEMPLATES.is_dir(), reason=f"the chat templates are not at {TEMPLATES}")
RULES = logs.rules(lines=30)


@pytest.fixture(scope="module")
def model() -> TokenizerAndTemplate:
    return load_tokenizer_and_template(None, None)


def examined(bodies: list[Body], model: TokenizerAndTemplate) -> tuple[Diagnosis, list[Break]]:
    diagnosis = diagnose(log_from_bodies(bodies, model))
    return diagnosis, diagnosis.breaks


def two(text: str, *values: str) -> list[Body]:
    """Requests that differ only in ``{}`` of the system text."""
    return [{"messages": [logs.system(text.replace("{}", value)), logs.user("hello")]} for value in values]


@pytest.mark.parametrize(
    ("text", "values", "kind", "start"),
    [
        ("<now>{}</now>\n" + RULES, ("2026-06-11T00:44:42.714237", "2026-06-11T00:44:43.102955"), "clock_time", 5),
        ("Date: {}\n" + RULES, ("2026-09-14", "2026-09-14", "2026-09-15"), "date", 6),
        ("run={} host=h1\n" + RULES, ("0b5c1f6e-1111-4aaa-8bbb-000000000001", "0b5c1f6e-1111-4aaa-8bbb-000000000002"),
         "request_id", 4),
        ("Thread {} on web\n" + RULES, ("th-88121", "th-88122"), "session_id", 7),
        ("Build {}\n" + RULES, ("4.1.0", "4.1.0", "4.1.0", "4.2.0"), "version", 6),
        ("cwd: {}\n" + RULES, ("/home/ann/code/shop", "/home/bob/code/shop"), "path", 5),
        ("Heute ist {}.\n" + RULES, ("Montag, 3. März 2025, 14:05 Uhr", "Montag, 3. März 2025, 14:07 Uhr"),
         "clock_time", 10),
        ("Il est {}.\n" + RULES, ("mardi 4 février 2025 à 9 h 05", "mardi 4 février 2025 à 9 h 06"), "clock_time", 7),
    ],
)  # fmt: skip
def test_a_value_before_the_rules(
    text: str, values: tuple[str, ...], kind: str, start: int, model: TokenizerAndTemplate
) -> None:
    diagnosis, found = examined(two(text, *values), model)
    assert [(b.finding.kind, b.status) for b in found] == [(kind, "confirmed")]
    finding = found[0].finding
    assert abs(finding.location.start - start) <= 1
    assert set(finding.samples) <= set(values)
    rules_tokens = len(diagnosis.log.store.packed(diagnosis.log.prompts[0].pieces)) // 4 - 60
    assert found[0].tokens_lost > 0.8 * rules_tokens
    assert found[0].repair is not None
    assert "last user message" in found[0].repair.advice or "system text" in found[0].repair.advice


@pytest.mark.parametrize(
    ("line", "values", "kind"),
    [
        ("It is {}", ("Tuesday, June 9, 2026, 03:04:20 PM GMT+3", "Tuesday, June 9, 2026, 03:04:27 PM GMT+3"),
         "clock_time"),
        ("Customer: {}", ("A, tier gold", "B, tier basic"), "user_data"),
    ],
)  # fmt: skip
def test_a_value_behind_the_rules_costs_nothing(
    line: str, values: tuple[str, str], kind: str, model: TokenizerAndTemplate
) -> None:
    diagnosis, found = examined(two(f"{RULES}\n{line}", *values), model)
    assert [b.finding.kind for b in found] == [kind]
    data = as_json(diagnosis, DoctorOptions(log="-"), {})["breaks"][0]
    assert data["status"] == "suspected"
    assert data["tokens_lost"] == 0
    assert data["repair"] == NO_GAIN


def test_a_client_header_is_known_by_name(model: TokenizerAndTemplate) -> None:
    line = "x-anthropic-billing-header: cc_version=2.2.0.1a; cc_entrypoint=cli; cch={};"
    bodies = [
        {"system": [{"type": "text", "text": line.replace("{}", nonce)}, {"type": "text", "text": RULES}],
         "messages": [logs.user("hey")]}
        for nonce in ("36ee5", "0aaa9", "77b1c")
    ]  # fmt: skip
    _, found = examined(bodies, model)
    assert [b.finding.kind for b in found] == ["request_id"]
    assert found[0].finding.location.path == "system[0].text"
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER" in found[0].finding.note


def test_tools_that_come_back_in_another_order_now_and_then(model: TokenizerAndTemplate) -> None:
    a, b, c = (logs.tool(name) for name in ("a1", "a2", "b1"))
    bodies = [
        {**body, "tools": [a, b, c] if turn // 12 % 2 == 0 else [c, a, b]}
        for turn, body in enumerate(logs.conversations(count=1, turns=60)[0])
    ]
    _, found = examined(bodies, model)
    assert [b.finding.kind for b in found] == ["tool_order"]
    assert found[0].finding.location.message == -1
    assert found[0].finding.seen == 4
    assert "about every 12 requests" in found[0].finding.varies


def test_a_time_before_the_tools_costs_the_tools(model: TokenizerAndTemplate) -> None:
    """The template writes tools behind the system text, so that what changes in it takes the tools with it."""
    tools = [logs.tool(f"switch_{n}", f"Switches lamp {n} on or off. " * 14) for n in range(12)]
    bodies = [
        {"messages": [logs.system(f"You run a house. It is 10:{n:02}:09."), logs.user(f"lamp {n} on")], "tools": tools}
        for n in range(6)
    ]
    diagnosis, found = examined(bodies, model)
    assert [(b.finding.kind, b.status) for b in found] == [("clock_time", "confirmed")]
    assert (found[0].finding.location.message, found[0].finding.location.role) == (0, "system")
    assert found[0].tokens_lost > 0.9 * 5 * (diagnosis.before.tokens[0] - 60)
    assert found[0].repair is not None
    assert "give the model a tool that tells the time" in found[0].repair.advice
    assert found[0].repair.destination == "end of the last user message"


def test_a_time_that_the_template_writes_before_the_tools(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(
        "Now: {{ now }}\n{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    )
    tools = [logs.tool(f"switch_{n}") for n in range(12)]
    bodies: list[Body] = [
        {"messages": [logs.user(f"lamp {n} on")], "tools": tools, "chat_template_kwargs": {"now": f"10:{n:02}:09"}}
        for n in range(6)
    ]
    diagnosis, found = examined(bodies, load_tokenizer_and_template(None, str(path)))
    assert [(b.finding.kind, b.status, b.finding.location.role) for b in found] == [
        ("clock_time", "confirmed", "template")
    ]
    assert found[0].tokens_lost > 0.9 * 5 * (diagnosis.before.tokens[0] - 60)
    assert found[0].finding.samples[0] == "10:00:09"


def test_tools_without_messages(model: TokenizerAndTemplate) -> None:
    tools = [logs.tool(f"mcp__{name}__search") for name in ("files", "issues")]
    _, found = examined([{"tools": tools}, {"tools": tools[::-1]}], model)
    assert [b.finding.kind for b in found] == ["tool_order"]


def test_a_tool_result_with_other_key_order(model: TokenizerAndTemplate) -> None:
    rows = {"rows": [{"id": i, "note": f"row {i} of the table"} for i in range(12)], "count": 12}
    turned = {"count": 12, "rows": [dict(reversed(row.items())) for row in rows["rows"]]}  # type: ignore[attr-defined]
    result = {"role": "tool", "tool_call_id": "1"}
    first = [{**result, "content": json.dumps(rows)}, logs.user("next please")]
    second = [{**result, "content": json.dumps(turned)}, *first[1:], logs.assistant("ok"), logs.user("and now?")]
    diagnosis, found = examined([{"messages": first}, {"messages": second}], model)
    assert [(b.finding.kind, b.finding.location.message, b.finding.location.role) for b in found] == [
        ("key_order", 0, "tool")
    ]
    assert found[0].tokens_lost > 0.6 * diagnosis.before.tokens[0]


def test_memory_that_is_written_on(model: TokenizerAndTemplate) -> None:
    memories = ["likes tea", "likes tea; lives in Oslo", "likes tea; lives in Oslo; has a dog named Rex"]
    bodies = [
        logs.with_system(body, lambda c, n=n: f"{c}\n<memory>{memories[n // 5]}</memory>\n{RULES}")
        for n, body in enumerate(logs.conversations(count=1, turns=15)[0])
    ]
    _, found = examined(bodies, model)
    assert [b.finding.kind for b in found if b.status == "confirmed"] == ["user_data"]
    assert found[0].requests == 2
    assert found[0].finding.seen == 2


def test_system_text_behind_the_history(model: TokenizerAndTemplate) -> None:
    rng = random.Random(1)
    bodies = []
    for body in logs.conversations(count=1, turns=8)[0]:
        _, *history, last = body["messages"]
        context = logs.system(f"{RULES}\n<context>\n{logs.sentence(rng, 80)}\n</context>")
        bodies.append({"messages": [*history, context, last]})
    diagnosis, found = examined(bodies, model)
    confirmed = [b for b in found if b.status == "confirmed"]
    assert [b.finding.kind for b in confirmed] == ["moved_system"]
    assert diagnosis.best.hit_rate > diagnosis.before.hit_rate + 0.1
    assert confirmed[0].repair is not None
    assert "first" in confirmed[0].repair.advice


@needs_templates
def test_a_template_that_moves_the_system_text() -> None:
    nemo = load_tokenizer_and_template(None, str(TEMPLATES / "mistralai-Mistral-Nemo-Instruct-2407.jinja"))
    diagnosis, found = examined(logs.interleaved(logs.conversations(count=4, turns=4)), nemo)
    assert [b.finding.kind for b in found if b.status == "confirmed"] == ["template"]
    assert "moves the system text" in found[0].finding.note
    assert diagnosis.before.hit_rate < 0.5


@needs_templates
def test_a_template_with_an_empty_thought_in_front_of_the_answer() -> None:
    qwen = load_tokenizer_and_template(None, str(TEMPLATES / "Qwen-Qwen3-0.6B.jinja"))
    bodies = [
        {**body, "chat_template_kwargs": {"enable_thinking": False}} for body in logs.conversations(count=1, turns=3)[0]
    ]
    _, found = examined(bodies, qwen)
    assert [(b.finding.kind, b.finding.location.role) for b in found] == [("template", "assistant")]
    assert "begins an answer" in found[0].finding.note


@needs_templates
def test_a_thought_in_the_history_that_the_model_never_wrote() -> None:
    """Only the responses tell: what they hold is not what the template makes of it."""
    template = load_tokenizer_and_template(None, str(TEMPLATES / "Qwen3.5-4B.jinja"))
    rng = random.Random(7)
    messages, bodies = [logs.system(RULES), logs.user("What is two and two?")], []
    for _ in range(4):
        answer = logs.sentence(rng, 50)
        response = {"choices": [{"message": logs.assistant(answer)}]}
        bodies.append({"request": {"messages": messages}, "response": response})
        messages = [*messages, logs.assistant(answer), logs.user(logs.sentence(rng, 6))]
    _, found = examined(bodies, template)
    assert [(b.finding.kind, b.status, b.finding.location.message) for b in found] == [("template", "confirmed", 2)]
    assert found[0].tokens_lost > 120


def test_an_answer_that_comes_back_in_other_tokens(model: TokenizerAndTemplate) -> None:
    rng = random.Random(8)
    encode = functools.partial(model.tokenizer.encode, add_special_tokens=False)
    messages, bodies, lost = [logs.system(RULES), logs.user("hello")], [], 0
    for turn in range(6):
        answer = logs.sentence(rng, 60)
        ids = [*encode(answer[:1]), *encode(answer[1:])] if turn % 2 else encode(answer)
        lost += len(ids) if turn in (1, 3) else 0
        choice: Body = {"message": logs.assistant(answer)}
        if turn < 3:
            choice["token_ids"] = ids
        else:
            choice["logprobs"] = {"content": [{"token": model.tokenizer.token_text(i)} for i in ids]}
        bodies.append({"request": {"messages": messages}, "response": {"choices": [choice]}})
        messages = [*messages, logs.assistant(answer), logs.user(logs.sentence(rng, 6))]
    _, found = examined(bodies, model)
    assert [(b.finding.kind, b.status, b.finding.location.message) for b in found] == [("retokenised", "confirmed", 4)]
    assert found[0].finding.location.role == "assistant"
    assert found[0].tokens_lost == pytest.approx(lost, rel=0.15)


def airline(count: int, change: Any = None) -> list[Body]:
    folder = DATA / "tau-bench"
    if not folder.is_dir():
        pytest.skip(f"the airline log is not at {folder}")
    tools = json.loads((folder / "tools-airline.json").read_text())
    bodies: list[Body] = []
    with open(folder / "airline_conversations.jsonl", encoding="utf-8") as lines:
        for line in lines:
            messages = json.loads(line)["messages"]
            for at, message in enumerate(messages):
                if message["role"] == "assistant" and len(bodies) < count:
                    body = {"messages": messages[:at], "tools": tools}
                    live = functools.partial(change, number=len(bodies)) if change else str
                    bodies.append(logs.with_system(body, live))
    return bodies


def test_the_airline_log_as_it_is(model: TokenizerAndTemplate) -> None:
    diagnosis, found = examined(airline(120), model)
    assert [(b.finding.kind, b.status) for b in found] == [("clock_time", "latent")]
    assert found[0].finding.samples == ["2024-05-15 15:00:00 EST"]
    assert diagnosis.before.hit_rate == pytest.approx(0.96, abs=0.03)


def test_the_airline_log_with_a_live_clock(model: TokenizerAndTemplate) -> None:
    def live(content: str, number: int) -> str:
        return content.replace("15:00:00", f"{9 + number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}")

    diagnosis, found = examined(airline(80, live), model)
    assert [(b.finding.kind, b.status) for b in found] == [("clock_time", "confirmed")]
    assert diagnosis.before.hit_rate < 0.03
    assert diagnosis.best.hit_rate > 0.7


def test_the_airline_log_with_retrieved_documents(model: TokenizerAndTemplate) -> None:
    def retrieved(content: str, number: int) -> str:
        rng = random.Random(number)
        chunks = "\n\n".join(f"[{i}] {logs.sentence(rng, 70)}." for i in range(2))
        return f"{content}\n\n<documents>\n{chunks}\n</documents>"

    diagnosis, found = examined(airline(80, retrieved), model)
    confirmed = [b for b in found if b.status == "confirmed"]
    assert [b.finding.kind for b in confirmed] == ["retrieved_text"]
    assert confirmed[0].finding.location.message == 0
    assert confirmed[0].finding.location.start > 6000
    assert diagnosis.best.hit_rate > diagnosis.before.hit_rate + 0.2

"""Planted breaks: class, place, and a cost within 15% of what an independent computation says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from anaphora.tools.doctor.price.breaks import Break
from anaphora.tools.doctor.price.diagnose import Diagnosis, diagnose
from anaphora.tools.doctor.read.load_log import log_from_bodies
from anaphora.tools.shared.tokenizer_and_template import TokenizerAndTemplate, load_tokenizer_and_template
from tests.tools.doctor import logs
from tests.tools.doctor.logs import Body

pytestmark = pytest.mark.slow

START = datetime(2026, 11, 29, 10, 15, 2)


@pytest.fixture(scope="module")
def model() -> TokenizerAndTemplate:
    return load_tokenizer_and_template(None, None)


def examined(bodies: list[Body], model: TokenizerAndTemplate) -> tuple[Diagnosis, list[Break]]:
    diagnosis = diagnose(log_from_bodies(bodies, model))
    return diagnosis, [item for item in diagnosis.breaks if item.status == "confirmed"]


def moment(number: int) -> datetime:
    return START + timedelta(seconds=37 * number)


def hex_id(length: int) -> Callable[[int], str]:
    return lambda number: f"{random.Random(number).getrandbits(4 * length):0{length}x}"


HEAD, MIDDLE = 0, 30
SLOTS: dict[str, tuple[str, int, str, Callable[[int], str]]] = {
    "request id, 16 hex": ("request_id", HEAD, "[Request ID: {}]", hex_id(16)),
    "nonce without a name": ("request_id", HEAD, "x={};", hex_id(6)),
    "time with h and m": ("clock_time", MIDDLE, "Zeit: {}", lambda n: moment(n).strftime("%d.%m.%Y %Hh%Mm%S")),
    "Japanese": ("clock_time", HEAD, "現在 {}", lambda n: moment(n).strftime("%Y年%m月%d日 %H時%M分%S秒")),
}


def planted(line: str, place: int, value: Callable[[int], str]) -> tuple[list[Body], list[Body], str]:
    """The log with the line at a line of the system text, the mended log, and the first value."""
    broken, mended = [], []
    for number, body in enumerate(logs.interleaved(logs.conversations())):
        text = line.format(value(number))

        def insert(content: str, text: str = text) -> str:
            lines = content.split("\n")
            return "\n".join([*lines[:place], text, *lines[place:]])

        broken.append(logs.with_system(body, insert))
        mended.append(logs.with_last_user(body, text))
    return broken, mended, value(1)


def close(item: Break, broken: list[Body], mended: list[Body]) -> bool:
    truth = logs.computed(broken)[1] - logs.computed(mended)[1]
    return abs(item.tokens_lost - truth) <= 0.15 * truth


@pytest.mark.parametrize("name", SLOTS)
def test_a_line_that_changes_with_each_request(name: str, model: TokenizerAndTemplate) -> None:
    kind, place, line, value = SLOTS[name]
    broken, mended, second = planted(line, place, value)
    diagnosis, found = examined(broken, model)
    assert [item.finding.kind for item in found] == [kind]
    finding = found[0].finding
    text = broken[1]["messages"][0]["content"]
    assert finding.location.message == 0
    assert finding.location.role == "system"
    assert (
        text[finding.location.start : finding.location.end] in second
        or second in text[finding.location.start : finding.location.end]
    )
    assert abs(finding.location.start - text.index(second)) <= 24
    assert close(found[0], broken, mended)
    total, missed = logs.computed(mended)
    assert found[0].predicted_hit_rate == pytest.approx(1 - missed / total, abs=0.02)
    assert diagnosis.before.hit_rate == pytest.approx(1 - logs.computed(broken)[1] / logs.computed(broken)[0], abs=0.02)


def test_tools_in_another_order(model: TokenizerAndTemplate) -> None:
    tools = [logs.tool(f"tool_{name}") for name in "abcdefgh"]
    rng = random.Random(3)
    broken = [
        {**body, "tools": rng.sample(tools, len(tools))} for body in logs.interleaved(logs.conversations(turns=2))
    ]
    mended = [{**body, "tools": tools} for body in broken]
    _, found = examined(broken, model)
    assert [item.finding.kind for item in found] == ["tool_order"]
    assert found[0].finding.location.message == -1
    assert close(found[0], broken, mended)


def test_key_order_in_tool_schemas(model: TokenizerAndTemplate) -> None:
    tools = [logs.tool(f"tool_{name}") for name in "abcd"]
    turned = [{"type": t["type"], "function": dict(reversed(t["function"].items()))} for t in tools]
    bodies = logs.interleaved(logs.conversations(turns=2))
    broken = [{**body, "tools": (tools, turned)[number // 3 % 2]} for number, body in enumerate(bodies)]
    _, found = examined(broken, model)
    # Both orders are cached after a few requests, so what it costs is what conversations lose that change over.
    assert [item.finding.kind for item in found] == ["key_order"]
    assert close(found[0], broken, [{**body, "tools": tools} for body in bodies])


def test_a_date_at_midnight(model: TokenizerAndTemplate) -> None:
    bodies = logs.interleaved(logs.conversations(count=12, turns=4))
    days = ["2026-09-14"] * 30 + ["2026-09-15"] * (len(bodies) - 30)
    broken = [logs.with_system(b, lambda c, d=day: f"Date: {d}\n{c}") for b, day in zip(bodies, days, strict=True)]
    mended = [logs.with_last_user(b, f"Date: {day}") for b, day in zip(bodies, days, strict=True)]
    _, found = examined(broken, model)
    assert [item.finding.kind for item in found] == ["date"]
    assert "changes 1 time" in found[0].finding.varies
    truth = logs.computed(broken)[1] - min(
        logs.computed(mended)[1],
        logs.computed(
            [logs.with_system(b, lambda c, d=d: f"{c}\nDate: {d}") for b, d in zip(bodies, days, strict=True)]
        )[1],
    )
    assert abs(found[0].tokens_lost - truth) <= 0.15 * truth


@pytest.mark.parametrize(
    ("kind", "line", "value"),
    [
        ("session_id", "Session: {}", lambda n: f"s-{1000 + n}"),
        ("session_id", "ref {}", hex_id(12)),
        ("path", "Working directory: {}", lambda n: f"/home/worker{n}/projects/shop{n % 7}/src"),
        ("user_data", "You are talking to {}.", lambda n: ("Ann Miller", "Bob Stone", "Cyd Ray", "Dee Fox")[n % 4]),
        ("user_data", "Account of {}", lambda n: f"client{n}@example.org"),
    ],
)
def test_a_line_that_changes_with_each_conversation(
    kind: str, line: str, value: Callable[[int], str], model: TokenizerAndTemplate
) -> None:
    made = logs.conversations(count=24, turns=3)
    texts = [line.format(value(number)) for number in range(len(made))]
    broken = logs.interleaved(
        [logs.with_system(b, lambda c, t=t: f"{t}\n{c}") for b in bodies] for t, bodies in zip(texts, made, strict=True)
    )
    mended = logs.interleaved(
        [logs.with_system(b, lambda c, t=t: f"{c}\n{t}") for b in bodies] for t, bodies in zip(texts, made, strict=True)
    )
    _, found = examined(broken, model)
    assert [item.finding.kind for item in found] == [kind]
    assert close(found[0], broken, mended)


def documents(number: int) -> str:
    rng = random.Random(1000 + number)
    return "\n\n".join(f"[{i}] {logs.sentence(rng, 60)}." for i in range(3))


def test_retrieved_documents_in_the_system_text(model: TokenizerAndTemplate) -> None:
    bodies = logs.interleaved(logs.conversations(count=10, turns=5))
    texts = [f"<context>\n{documents(n)}\n</context>" for n in range(len(bodies))]
    broken = [logs.with_system(b, lambda c, t=t: f"{c}\n{t}") for b, t in zip(bodies, texts, strict=True)]
    mended = [logs.with_last_user(b, documents(n)) for n, b in enumerate(bodies)]
    _, found = examined(broken, model)
    assert [item.finding.kind for item in found] == ["retrieved_text"]
    assert close(found[0], broken, mended)


def test_a_window_of_the_last_messages(model: TokenizerAndTemplate) -> None:
    made = logs.conversations(count=8, turns=14)
    broken = logs.interleaved(
        [{"messages": [b["messages"][0], *b["messages"][1:][-10:]]} for b in bodies] for bodies in made
    )
    mended = []
    for bodies in made:
        kept = []
        for body in bodies:
            rest = body["messages"][1:]
            lost = max(0, len(rest) - 10)
            kept.append({"messages": [body["messages"][0], *rest[-(-lost // 8) * 8 :]]})
        mended.append(kept)
    _, found = examined(broken, model)
    assert [item.finding.kind for item in found] == ["trimmed_history"]
    assert found[0].finding.location.message == 1
    assert close(found[0], broken, logs.interleaved(mended))


def test_old_messages_cut_short(model: TokenizerAndTemplate) -> None:
    made = logs.conversations(count=6, turns=10)

    def cut(body: Body) -> Body:
        first, *rest = body["messages"]
        short = [{**m, "content": m["content"][:60]} if i < len(rest) - 4 else m for i, m in enumerate(rest)]
        return {"messages": [first, *short]}

    broken = logs.interleaved([[cut(b) for b in bodies] for bodies in made])
    _, found = examined(broken, model)
    assert [item.finding.kind for item in found] == ["rewritten_history"]
    assert close(found[0], broken, logs.interleaved(made))


def calling(arguments: str) -> Body:
    function = {"name": "look_up", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("nested", [False, True])
def test_arguments_written_again_with_other_key_order(nested: bool, model: TokenizerAndTemplate) -> None:
    def messages(number: int, turn: int) -> list[Body]:
        rng = random.Random(number)
        made: list[Any] = [logs.system(logs.rules())]
        for step in range(turn + 1):
            made.append(logs.user(logs.sentence(rng)))
            if step == turn:
                break
            given = {"city": logs.sentence(rng, 2), "unit": "celsius", "days": [step, number]}
            value = {"query": given, "limit": step} if nested else given
            old = step < turn - 1
            turned = json.dumps(value, sort_keys=True) if old else json.dumps(value)
            made += [calling(turned), {"role": "tool", "tool_call_id": "c1", "content": logs.sentence(rng, 40)}]
            made.append(logs.assistant(logs.sentence(rng, 20)))
        return made

    broken = logs.interleaved([[{"messages": messages(n, turn)} for turn in range(5)] for n in range(6)])
    _, found = examined(broken, model)
    assert [item.finding.kind for item in found] == ["key_order"]
    assert found[0].finding.location.role == "assistant"
    assert "arguments" in found[0].finding.location.path


def test_two_breaks_share_the_cost(model: TokenizerAndTemplate) -> None:
    broken, mended = [], []
    for number, body in enumerate(logs.interleaved(logs.conversations())):
        name, now = f"[Request ID: {hex_id(16)(number)}]", f"Current time: {moment(number).isoformat()}"

        def insert(content: str, name: str = name, now: str = now) -> str:
            lines = content.split("\n")
            return "\n".join([name, *lines[:MIDDLE], now, *lines[MIDDLE:]])

        broken.append(logs.with_system(body, insert))
        mended.append(logs.with_last_user(body, f"{name}\n{now}"))
    diagnosis, found = examined(broken, model)
    assert {item.finding.kind for item in found} == {"request_id", "clock_time"}
    truth = logs.computed(broken)[1] - logs.computed(mended)[1]
    assert sum(item.tokens_lost for item in found) == pytest.approx(truth, rel=0.15)
    assert diagnosis.before.computed - diagnosis.best.computed == sum(item.tokens_lost for item in found)


def test_messages_that_come_back_without_their_last_line_break(model: TokenizerAndTemplate) -> None:
    made = logs.conversations(count=8, turns=5)

    def fresh(body: Body) -> Body:
        """The newest answer as it came, with the line break that is lost when it is stored."""
        if len(body["messages"]) < 4:
            return body
        *old, answer, last = body["messages"]
        return {"messages": [*old, {**answer, "content": answer["content"] + "\n"}, last]}

    _, found = examined(logs.interleaved([[fresh(b) for b in bodies] for bodies in made]), model)
    assert [(item.finding.kind, item.finding.location.role) for item in found] == [("whitespace", "assistant")]
    broken = logs.interleaved([[fresh(b) for b in bodies] for bodies in made])
    assert close(found[0], broken, logs.interleaved(made))


def test_a_time_in_old_messages(model: TokenizerAndTemplate) -> None:
    made = logs.conversations(count=6, turns=6)

    def aged(body: Body) -> Body:
        messages = list(body["messages"])
        for i in range(1, len(messages), 2):
            age = 3 * (len(messages) - i)
            messages[i] = {**messages[i], "content": f"[{age} minutes ago] {messages[i]['content']}"}
        return {"messages": messages}

    broken = logs.interleaved([[aged(b) for b in bodies] for bodies in made])
    _, found = examined(broken, model)
    assert [(item.finding.kind, item.finding.location.role) for item in found] == [("rewritten_history", "user")]
    assert close(found[0], broken, logs.interleaved(made))


def test_a_summary_that_is_written_again(model: TokenizerAndTemplate) -> None:
    rng = random.Random(4)
    made = []
    for bodies in logs.conversations(count=6, turns=8):
        made.append(
            [
                {"messages": [b["messages"][0], logs.user(f"Summary: {logs.sentence(rng, 40)}"), *b["messages"][-5:]]}
                if len(b["messages"]) > 9
                else b
                for b in bodies
            ]
        )
    _, found = examined(logs.interleaved(made), model)
    assert [item.finding.kind for item in found] == ["rewritten_history"]
    assert found[0].finding.location.message == 1


def test_a_second_bos_token_now_and_then(model: TokenizerAndTemplate) -> None:
    text = f"{logs.rules(1, 30)}\nQuestion"
    diagnosis, _ = examined([{"prompt": f"{'<s>' * (1 + n % 2)}{text} {n}:"} for n in range(12)], model)
    assert "double_bos" in [item.finding.kind for item in diagnosis.breaks]


def test_a_template_in_the_user_message(model: TokenizerAndTemplate) -> None:
    rng = random.Random(2)
    heads = [f"Ticket {rng.randrange(10**6)} of {logs.sentence(rng, 4)}" for _ in range(25)]
    broken = [{"messages": [logs.user(f"{head}\n\n{logs.rules(3, 25)}\nAnswer now.")]} for head in heads]
    mended = [{"messages": [logs.user(f"{logs.rules(3, 25)}\nAnswer now.\n{head}")]} for head in heads]
    _, found = examined(broken, model)
    assert len(found) == 1
    assert found[0].finding.location.role == "user"
    assert close(found[0], broken, mended)


def test_one_conversation_open_at_midnight_is_priced(model: TokenizerAndTemplate) -> None:
    day, night = logs.conversations(count=30, turns=1), logs.conversations(count=1, turns=30, seed=5)[0]
    bodies = [*(bodies[0] for bodies in day), *night]
    dates = ["2026-09-14"] * 59 + ["2026-09-15"]
    broken = [logs.with_system(b, lambda c, d=d: f"Date: {d}\n{c}") for b, d in zip(bodies, dates, strict=True)]
    _, found = examined(broken, model)
    assert [item.finding.kind for item in found] == ["date"]
    assert found[0].requests == 1
    assert found[0].tokens_lost > 2000


def test_other_spaces_in_old_messages(model: TokenizerAndTemplate) -> None:
    made = logs.conversations(count=5, turns=5)

    def stored(body: Body) -> Body:
        *old, last = body["messages"]
        return {
            "messages": [old[0], *({**m, "content": m["content"].replace(" ", "\u00a0", 3)} for m in old[1:]), last]
        }

    broken = logs.interleaved([[stored(b) for b in bodies] for bodies in made])
    _, found = examined(broken, model)
    assert [(item.finding.kind, item.finding.location.role) for item in found] == [("whitespace", "user")]


@pytest.mark.parametrize("change", [lambda t: t.replace("\n", "\r\n"), lambda t: f"{t}\n", lambda t: f" {t}"])
def test_other_spaces_in_the_system_text(change: Callable[[str], str], model: TokenizerAndTemplate) -> None:
    made = logs.conversations(count=5, turns=4)
    broken = [
        logs.with_system(body, change if turn % 2 else str) for bodies in made for turn, body in enumerate(bodies)
    ]
    diagnosis, found = examined(broken, model)
    assert [(item.finding.kind, item.finding.location.message) for item in diagnosis.breaks] == [("whitespace", 0)]
    if change("a b\n") != "a b\n\n":  # at the end of the text only what follows is lost
        assert len(found) == 1
        assert close(found[0], broken, [body for bodies in made for body in bodies])


def rounds(number: int, steps: int, seed: int | None) -> Body:
    """An agent's request after some tool calls; with a seed all results have their keys in another order."""
    messages = [logs.system(logs.rules(lines=20)), logs.user(logs.sentence(random.Random(number)))]
    for step in range(steps):
        rng = random.Random(number * 50 + step)
        fields = [(f"field{i}", logs.sentence(rng, 4)) for i in range(8)]
        if seed is not None:
            random.Random(seed * 100 + step).shuffle(fields)
        result = {"role": "tool", "tool_call_id": "c1", "content": json.dumps(dict(fields))}
        messages += [calling(json.dumps({"step": step})), result]
    return {"messages": messages}


def test_results_with_their_keys_in_another_order_each_turn(model: TokenizerAndTemplate) -> None:
    broken = logs.interleaved([[rounds(n, step, n * 10 + step) for step in range(6)] for n in range(4)])
    diagnosis, found = examined(broken, model)
    assert [(item.finding.kind, item.finding.location.role) for item in found] == [("key_order", "tool")]
    assert found[0].finding.location.message == 3
    mended = logs.interleaved([[rounds(n, step, None) for step in range(6)] for n in range(4)])
    truth = diagnose(log_from_bodies(mended, model)).before.hit_rate
    assert diagnosis.best.hit_rate == pytest.approx(truth, abs=0.01)


def test_a_subset_of_the_tools_in_each_request(model: TokenizerAndTemplate) -> None:
    tools = [logs.tool(f"tool_{name}") for name in "abcdefgh"]
    bodies = logs.interleaved(logs.conversations(count=6, turns=3, head=logs.rules(lines=20)))
    some = [sorted(random.Random(n).sample(range(8), 5)) for n in range(len(bodies))]
    broken = [{**body, "tools": [tools[i] for i in chosen]} for body, chosen in zip(bodies, some, strict=True)]
    diagnosis, found = examined(broken, model)
    assert [(item.finding.kind, item.finding.location.message) for item in found] == [("tool_set", -1)]
    assert found[0].repair is not None
    assert found[0].repair.destination == "all tools"
    truth = diagnose(log_from_bodies([{**body, "tools": tools} for body in bodies], model)).before
    assert diagnosis.best.computed == truth.computed


def test_two_applications_in_one_log_have_a_break_each(model: TokenizerAndTemplate) -> None:
    first = logs.conversations(count=5, turns=3, head=logs.rules(0, 25))
    second = logs.conversations(count=5, turns=3, head=logs.rules(5, 25), seed=9)
    bodies = logs.interleaved([*first, *second])
    heads = {first[0][0]["messages"][0]["content"]: "[Request {}]", second[0][0]["messages"][0]["content"]: "Now {}"}

    def stamped(content: str, number: int) -> str:
        line = heads[content]
        return f"{line.format(hex_id(16)(number) if 'Request' in line else moment(number).isoformat())}\n{content}"

    broken = [logs.with_system(b, lambda c, n=n: stamped(c, n)) for n, b in enumerate(bodies)]
    _, found = examined(broken, model)
    assert {item.finding.kind for item in found} == {"request_id", "clock_time"}
    truth = logs.computed(broken)[1] - logs.computed(bodies)[1]
    assert sum(item.tokens_lost for item in found) == pytest.approx(truth, rel=0.15)


def test_a_time_in_the_first_message_of_many_conversations(model: TokenizerAndTemplate) -> None:
    notes = logs.rules(4, 25).replace("\n", " ")
    broken, mended = [], []
    for number, body in enumerate(logs.interleaved(logs.conversations(count=8, turns=3))):
        head, first, *rest = body["messages"]
        now = f"local time = {moment(number):%a %d %b, %I:%M:%S %p}"
        for line, made in ((f"{now}\n", broken), ("", mended)):
            made.append({"messages": [head, logs.user(f"<env>\n{line}</env>\n{notes}\n{first['content']}"), *rest]})
        mended[-1] = logs.with_last_user(mended[-1], now)
    _, found = examined(broken, model)
    assert [(item.finding.kind, item.finding.location.message, item.finding.location.role) for item in found] == [
        ("clock_time", 1, "user")
    ]
    assert found[0].repair is not None
    assert found[0].repair.destination == "end of the last user message"
    assert close(found[0], broken, mended)


def test_blocks_of_one_system_text_that_say_the_same_are_not_compared(model: TokenizerAndTemplate) -> None:
    lines = logs.rules(5, 24).split("\n")
    broken, mended = [], []
    for number, body in enumerate(logs.interleaved(logs.conversations(head="-"))):
        now = f"It is {moment(number):%H:%M:%S}."
        for top, made in (([*lines[:4], now, *lines[4:8]], broken), (lines[:8], mended)):
            parts = [{"type": "text", "text": "\n".join(block)} for block in (top, lines)]
            made.append({"messages": [{"role": "system", "content": parts}, *body["messages"][1:]]})
        mended[-1] = logs.with_last_user(mended[-1], now)
    _, found = examined(broken, model)
    assert [(item.finding.kind, item.finding.location.path) for item in found] == [
        ("clock_time", "messages[0].content[0].text")
    ]
    assert close(found[0], broken, mended)


def test_tools_in_another_order_behind_a_system_text_with_a_time(model: TokenizerAndTemplate) -> None:
    tools = [logs.tool(f"tool_{name}") for name in "abcdef"]
    rng = random.Random(8)
    broken, mended = [], []
    for number, body in enumerate(logs.interleaved(logs.conversations(turns=2))):
        now = f"It is {moment(number):%H:%M:%S}."
        stamped = logs.with_system(body, lambda content, now=now: f"{now}\n{content}")
        broken.append({**stamped, "tools": rng.sample(tools, len(tools))})
        mended.append({**logs.with_last_user(body, now), "tools": tools})
    diagnosis, found = examined(broken, model)
    assert {item.finding.kind for item in found} == {"clock_time", "tool_order"}
    truth = logs.computed(broken, 1)[1] - logs.computed(mended, 1)[1]
    assert diagnosis.before.computed - diagnosis.best.computed == pytest.approx(truth, rel=0.1)
    assert sum(item.tokens_lost for item in found) == diagnosis.before.computed - diagnosis.best.computed


def test_the_required_arguments_of_a_tool_written_from_a_set(model: TokenizerAndTemplate) -> None:
    def tools(required: list[str]) -> list[Body]:
        made = [logs.tool(f"tool_{name}") for name in "abcdefgh"]
        made[0]["function"]["parameters"] |= {"required": required}
        return made

    rng = random.Random(9)
    names = ["query", "limit", "page", "sort"]
    bodies = logs.interleaved(logs.conversations(count=8))
    broken = [{**body, "tools": tools(rng.sample(names, len(names)))} for body in bodies]
    _, found = examined(broken, model)
    assert [(item.finding.kind, item.finding.location.message) for item in found] == [("key_order", -1)]
    truth = logs.computed(broken, 1)[1] - logs.computed([{**body, "tools": tools(names)} for body in bodies], 1)[1]
    assert found[0].tokens_lost == pytest.approx(truth, rel=0.15)


def test_two_breaks_close_together_leave_the_system_text_together(model: TokenizerAndTemplate) -> None:
    """The tail of the system text is as good as any place for one of them while the other stands there."""
    broken, mended = [], []
    for number, body in enumerate(logs.interleaved(logs.conversations(count=10, turns=4, head=logs.rules(lines=20)))):
        now, name = f"Time: {moment(number):%H:%M:%S}", f"ref {hex_id(24)(number)}"
        broken.append(logs.with_system(body, lambda text, a=now, b=name: "\n".join([a, text.split("\n")[0], b, text])))
        first = body["messages"][0]["content"].split("\n")[0]
        clean = logs.with_system(body, lambda text, first=first: f"{first}\n{text}")
        mended.append(logs.with_last_user(clean, f"{now}\n{name}"))
    diagnosis, found = examined(broken, model)
    assert {item.finding.kind for item in found} == {"clock_time", "request_id"}
    truth = logs.computed(broken, 1)[1] - logs.computed(mended, 1)[1]
    assert diagnosis.before.computed - diagnosis.best.computed == pytest.approx(truth, rel=0.02)
    assert sum(item.tokens_lost for item in found) == diagnosis.before.computed - diagnosis.best.computed

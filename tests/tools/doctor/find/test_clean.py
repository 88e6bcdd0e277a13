"""Logs with nothing to mend: no false alarm."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from anaphora.tools.doctor.price.diagnose import diagnose
from anaphora.tools.doctor.read.load_log import log_from_bodies
from anaphora.tools.shared.tokenizer_and_template import TokenizerAndTemplate, load_tokenizer_and_template
from tests.tools.doctor import logs
from tests.tools.doctor.logs import Body


@pytest.fixture(scope="module")
def model() -> TokenizerAndTemplate:
    return load_tokenizer_and_template(None, None)


def chats(**more: Any) -> list[Body]:
    return logs.interleaved(logs.conversations(**more))


def one_after_the_other() -> list[Body]:
    return [body for bodies in logs.conversations(turns=6) for body in bodies]


def without_system() -> list[Body]:
    return logs.interleaved(logs.conversations(head=""))


def with_tools() -> list[Body]:
    tools = [logs.tool(name) for name in ("find", "book", "cancel")]
    return [{**body, "tools": tools} for body in chats(turns=4)]


def two_agents() -> list[Body]:
    return logs.interleaved(
        [*logs.conversations(count=10, seed=1), *logs.conversations(count=10, seed=2, head=logs.rules(9))]
    )


def related_agents() -> list[Body]:
    """Two system prompts with the same end and the same beginning."""
    common = logs.rules(4, 20)
    heads = [f"{common}\nYou sell {what}.\n{logs.rules(5, 30)}" for what in ("flowers", "books")]
    return logs.interleaved(made for n, h in enumerate(heads) for made in logs.conversations(count=8, seed=n, head=h))


def a_tenant_each() -> list[Body]:
    return logs.interleaved(
        made for n in range(5) for made in logs.conversations(count=4, seed=n, head=logs.rules(20 + n))
    )


def the_user_last() -> list[Body]:
    """What belongs to the user stands at the end of the system text."""
    return logs.interleaved(
        [logs.with_system(body, lambda c, n=n: f"{c}\nCustomer: client{n}@example.org") for body in bodies]
        for n, bodies in enumerate(logs.conversations(turns=4))
    )


def documents_in_the_question() -> list[Body]:
    rng = random.Random(5)
    made = []
    for bodies in logs.conversations(count=12, turns=1):
        made.append([logs.with_last_user(body, f"Context: {logs.sentence(rng, 120)}") for body in bodies])
    return logs.interleaved(made)


def the_time_in_the_question() -> list[Body]:
    return [
        logs.with_last_user(b, f"(asked at 2026-11-29 10:{n:02}:00)") for n, b in enumerate(chats(turns=1, count=40))
    ]


def agent_rounds() -> list[Body]:
    rng = random.Random(6)
    made = []
    for n in range(8):
        messages = [logs.system(logs.rules()), logs.user(logs.sentence(rng))]
        bodies = [{"messages": messages}]
        for step in range(6):
            function = {"name": "find", "arguments": json.dumps({"q": logs.sentence(rng, 3), "n": step})}
            call = {"id": f"c{n}{step}", "type": "function", "function": function}
            messages = [
                *messages,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{n}{step}", "content": json.dumps({"at": f"10:{step:02}", "n": n})},
            ]
            bodies.append({"messages": messages})
        made.append(bodies)
    return logs.interleaved(made)


def few_shot() -> list[Body]:
    shots = [m for i in range(5) for m in (logs.user(f"Example {i}: parcels"), logs.assistant(f"Answer {i}: orders"))]
    rng = random.Random(7)
    return [{"messages": [logs.system(logs.rules()), *shots, logs.user(logs.sentence(rng))]} for _ in range(40)]


def completions() -> list[Body]:
    rng = random.Random(8)
    return [{"prompt": f"{logs.rules()}\n\nQuestion: {logs.sentence(rng)}\nAnswer:"} for _ in range(30)]


def unrelated() -> list[Body]:
    rng = random.Random(9)
    return [{"messages": [logs.user(logs.sentence(rng, 80))]} for _ in range(40)]


def the_same_again() -> list[Body]:
    return chats(turns=2) * 2


def constant_dates() -> list[Body]:
    head = logs.rules() + "\nOrders before 2024-03-01 follow the old policy; release 2.4.1 of 12 May 2025 changed it."
    return logs.interleaved(logs.conversations(head=head))


def regenerated() -> list[Body]:
    """The last question is asked again in other words."""
    rng = random.Random(10)
    made = []
    for bodies in logs.conversations(turns=3):
        last = bodies[-1]["messages"]
        made.append([*bodies, {"messages": [*last[:-1], logs.user(logs.sentence(rng))]}])
    return logs.interleaved(made)


def in_parts() -> list[Body]:
    return [
        {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in body["messages"]]}
        for body in chats()
    ]


def anthropic() -> list[Body]:
    return [
        {"system": [{"type": "text", "text": body["messages"][0]["content"]}], "messages": body["messages"][1:]}
        for body in chats()
    ]


def similar_questions() -> list[Body]:
    rng = random.Random(11)
    text = "I ordered {} last week and it has not come yet, can you please look where my parcel is and tell me?"
    return [{"messages": [logs.system(logs.rules()), logs.user(text.format(logs.sentence(rng, 2)))]} for _ in range(40)]


def long_conversations() -> list[Body]:
    return chats(count=3, turns=25)


def short_system_texts() -> list[Body]:
    return logs.interleaved(logs.conversations(head="You are a helpful assistant."))


def titles_beside() -> list[Body]:
    """A side request after each conversation, with its instruction first."""
    made = logs.conversations(count=8)
    asked = "Write a title of five words for this talk."
    return [
        body
        for bodies in made
        for body in (
            *bodies,
            {"messages": [logs.user("\n".join([asked, *(m["content"] for m in bodies[-1]["messages"][1:])]))]},
        )
    ]


def tags_behind() -> list[Body]:
    made = logs.conversations(count=8)
    asked = logs.user("Suggest three tags for this chat.")
    return [b for bodies in made for b in (*bodies, {"messages": [*bodies[-1]["messages"], asked]})]


def two_sets_of_tools() -> list[Body]:
    tools = [logs.tool(f"tool_{name}") for name in "abcdefgh"]
    made = logs.conversations(count=10)
    return logs.interleaved([[{**b, "tools": (tools[:5], tools[3:])[n % 2]} for b in x] for n, x in enumerate(made)])


def compacted_once() -> list[Body]:
    summary = logs.user("Summary so far: refunds were asked for and given, all is well.")
    return logs.interleaved(
        [*bodies[:6], *({"messages": [b["messages"][0], summary, *b["messages"][11:]]} for b in bodies[6:])]
        for bodies in logs.conversations(count=4, turns=9)
    )


def with_responses() -> list[Body]:
    return [
        {"request": body, "response": {"choices": [{"message": later["messages"][-2]}]}}
        for bodies in logs.conversations(count=8, turns=5)
        for body, later in itertools.pairwise(bodies)
    ]


def asked_twice() -> list[Body]:
    return [body for body in chats(turns=2) for _ in range(2)]


def in_german() -> list[Body]:
    return chats(head="\n".join(f"- Regel {i}: Antworte höflich und nenne nie fremde Kunden." for i in range(20)))


CLEAN: list[Callable[[], list[Body]]] = [
    chats,
    one_after_the_other,
    without_system,
    with_tools,
    two_agents,
    related_agents,
    a_tenant_each,
    the_user_last,
    documents_in_the_question,
    the_time_in_the_question,
    agent_rounds,
    few_shot,
    completions,
    unrelated,
    the_same_again,
    constant_dates,
    regenerated,
    in_parts,
    anthropic,
    similar_questions,
    long_conversations,
    short_system_texts,
    titles_beside,
    tags_behind,
    two_sets_of_tools,
    compacted_once,
    with_responses,
    asked_twice,
    in_german,
]


@pytest.mark.parametrize("make", CLEAN, ids=lambda make: make.__name__)
def test_nothing_to_mend(make: Callable[[], list[Body]], model: TokenizerAndTemplate) -> None:
    bodies = make()
    diagnosis = diagnose(log_from_bodies(bodies, model))
    assert len(diagnosis.log.prompts) == len(bodies)
    assert [
        (b.finding.kind, b.finding.samples) for b in diagnosis.breaks if b.tokens_lost or b.status == "confirmed"
    ] == []
    assert diagnosis.best.hit_rate == diagnosis.before.hit_rate

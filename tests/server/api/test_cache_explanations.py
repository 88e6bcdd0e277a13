"""Explanations of cache lookups, over an engine process with a fake runner. One token is one byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from anaphora.observe.record import read
from anaphora.server.api import prompt_positions
from anaphora.server.api.body_parsing import parse
from anaphora.server.api.cache_explanations import HEADER
from anaphora.server.api.engine_requests import engine_requests
from anaphora.server.api.protocol import ChatRequest
from anaphora.server.api.request_context import RequestContext
from anaphora.text.chat_template import ChatTemplate
from anaphora.types.reports import CacheReport, Eviction, Neighbour
from tests.support.servers import EngineServer, ScriptedServer, engine_server, events, scripted

pytestmark = pytest.mark.usefixtures("engine_surroundings")

CHAT, TEXT, EXPLAIN = "/v1/chat/completions", "/v1/completions", "/v1/cache/explain"
SYSTEM = "You answer politely, in one word, and never guess. "
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def encode(server: EngineServer | ScriptedServer, text: str) -> list[int]:
    return server.service.text.tokenizer.encode(text)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EngineServer]:
    async with engine_server(tmp_path / "model", 1000) as server:
        yield server


def chat(system: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 3} | fields


async def post(server: EngineServer | ScriptedServer, path: str, body: dict[str, Any]) -> Any:
    response = await server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


async def asked(server: EngineServer, body: dict[str, Any]) -> dict[str, Any]:
    (explanation,) = (await post(server, EXPLAIN, body)).json()["cache_explanations"]
    return explanation


async def test_the_first_differing_character_is_reported_with_both_texts(server: EngineServer) -> None:
    first = (await post(server, CHAT, chat(SYSTEM, "Is it 10:31 now? Say so."))).json()
    explanation = await asked(server, chat(SYSTEM, "Is it 10:45 now? Say so."))
    assert explanation["reason"] == "diverged"
    assert explanation["place"] == {"message": 1, "role": "user", "character": 9}
    found = explanation["diverged"]
    assert first["id"] == found["request_id"]
    assert found["before"].endswith("user\nIs it 10:")
    assert found["text"].startswith("45 now?")
    assert found["other_text"].startswith("31 now?")
    assert [found["token_id"], found["other_token_id"]] == encode(server, "43")
    assert not found["retokenised"]
    assert (
        explanation["cached_tokens"]
        == explanation["position"]
        == explanation["prompt_tokens"] - len("45 now? Say so.") - len("<|im_end|>\n<|im_start|>assistant\n")
    )


async def test_body_field_header_and_explain_route_agree(server: EngineServer) -> None:
    await post(server, CHAT, chat(SYSTEM, "Who?"))
    body = chat(SYSTEM, "Where?", explain_cache=True)
    before = await asked(server, body)
    answer = await post(server, CHAT, body)
    (explanation,) = answer.json()["cache_explanations"]
    for explained in (before, explanation):
        explained["diverged"].pop("seconds_ago")
        explained.pop("detail")
    assert explanation == before
    assert answer.headers[HEADER] == (
        f"diverged;cached={explanation['cached_tokens']};prompt={explanation['prompt_tokens']};at={explanation['position']}"
    )
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == explanation["cached_tokens"]
    again = await post(server, CHAT, chat(SYSTEM, "Where?"))
    assert again.headers[HEADER].startswith("short;")
    assert "cache_explanations" not in again.json()


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_has_the_header_and_the_explanation_in_its_last_chunk(server: EngineServer, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    for path, body in ((CHAT, chat(SYSTEM, "Who?")), (TEXT, {"prompt": "Once upon a time", "max_tokens": 3})):
        silent = await post(server, path, body | {"stream": True} | options)
        assert silent.headers[HEADER].startswith("cold;cached=0;")
        assert not any("cache_explanations" in chunk for chunk in events(silent.text))
        answer = await post(server, path, body | {"stream": True, "explain_cache": True} | options)
        assert answer.headers[HEADER].startswith("short;")
        *chunks, last = events(answer.text)
        assert not any("cache_explanations" in chunk or "usage" in chunk for chunk in chunks)
        (explanation,) = last["cache_explanations"]  # type: ignore[misc]
        assert (explanation["reason"], explanation["place"], last["choices"]) == ("short", None, [])
        assert ("usage" in last) == usage


async def test_each_prompt_of_a_body_is_explained(server: EngineServer) -> None:
    await post(server, TEXT, {"prompt": "one two three", "max_tokens": 2})
    body = {"prompt": ["one two four", "something else", "one two three"], "max_tokens": 2, "explain_cache": True}
    answer = await post(server, TEXT, body)
    explanation = answer.json()["cache_explanations"]
    assert [entry["reason"] for entry in explanation] == ["diverged", "cold", "short"]
    assert explanation[0]["place"] == {"message": 0, "role": "prompt", "character": 8}
    assert [item.split(";")[0] for item in answer.headers[HEADER].split(", ")] == ["diverged", "cold", "short"]
    explanation = (await post(server, EXPLAIN, {"prompt": encode(server, "one two five")})).json()["cache_explanations"]
    assert (explanation[0]["position"], explanation[0]["place"]) == (9, None)
    assert explanation[0]["diverged"]["other_text"].startswith("our")


async def test_another_salt_is_cold_and_sees_no_text(server: EngineServer) -> None:
    secret = "The code of the vault is 4711."
    await post(server, CHAT, chat(secret, "Who?", cache_salt="owner"))
    for salt in ({"cache_salt": "thief"}, {}):
        for guess in (secret, "The code of the vault is "):
            body = chat(guess, "Who?", explain_cache=True, **salt)
            explanation = await asked(server, body)
            assert (explanation["reason"], explanation["cached_tokens"]) == ("cold", 0)
            assert "diverged" not in explanation
            assert "4711" not in json.dumps(explanation) or guess == secret
    answer = await post(server, CHAT, chat("The code of the vault is ", "Who?", explain_cache=True))
    assert answer.headers[HEADER].startswith("cold;cached=0;")
    assert "4711" not in answer.text
    page = (await server.client.get("/metrics")).text
    (count,) = [line for line in page.splitlines() if line.startswith("anaphora:requests_isolated_total")]
    assert float(count.split()[-1]) == 1


async def test_explaining_generates_nothing_and_counts_nothing(server: EngineServer) -> None:
    await post(server, CHAT, chat(SYSTEM, "Who?"))
    before = server.service.engine.stats
    for body in (chat(SYSTEM, "Where?", stream=True, n=3), {"prompt": ["a", "b"]}, {"prompt": [1, 2, 3]}):
        answer = (await post(server, EXPLAIN, body)).json()
        assert answer["object"] == "cache.explanation"
        assert answer["hit_rate_at_size"].keys() == {"0.5", "1", "2", "4"}
    await server.service.engine.check()  # type: ignore[attr-defined]
    after = server.service.engine.stats
    assert (after.requests, after.queries, after.generation_tokens) == (
        before.requests,
        before.queries,
        before.generation_tokens,
    )
    assert (await asked(server, chat(SYSTEM, "Where?")))["reason"] == "diverged"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, None),
        ({"prompt": "a", "explain_cache": "yes"}, "explain_cache"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": "a" * 3000}, "prompt"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
    ],
)
async def test_explain_refuses_what_generation_refuses(
    server: EngineServer, body: dict[str, Any], param: str | None
) -> None:
    response = await server.client.post(EXPLAIN, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_bypass_names_its_field(server: EngineServer) -> None:
    body = {"prompt": "one two three", "max_tokens": 2, "prompt_logprobs": 1, "explain_cache": True}
    answer = await post(server, TEXT, body)
    (explanation,) = answer.json()["cache_explanations"]
    assert (explanation["reason"], explanation["feature"], explanation["place"]) == (
        "bypassed",
        "prompt_logprobs",
        None,
    )


async def test_a_prompt_that_is_being_computed_is_in_flight(server: EngineServer) -> None:
    body = chat(SYSTEM * 3, "Who?", explain_cache=True)
    answers = await asyncio.gather(*(post(server, CHAT, body) for _ in range(4)))
    reasons = sorted(answer.json()["cache_explanations"][0]["reason"] for answer in answers)
    assert reasons[0] == "cold"
    assert set(reasons[1:]) <= {"in_flight", "short", "hit"}
    for answer in answers:
        waited = answer.json()["cache_explanations"][0]["waited"]
        assert (";waited=" in answer.headers[HEADER]) == waited


async def test_positions_in_tools_parts_calls_and_the_template(server: EngineServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "First part."}, {"type": "text", "text": "Second."}]},
        {"role": "user", "content": "user"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    await post(server, CHAT, {"messages": messages, "tools": [TOOL], "max_tokens": 2})
    changed = [*messages[:3], {"role": "tool", "tool_call_id": "c1", "content": "rare"}]
    explanation = await asked(server, {"messages": changed, "tools": [TOOL]})
    assert explanation["place"] == {"message": 3, "role": "tool", "character": 2}
    changed = [messages[0], {"role": "user", "content": "used"}, *messages[2:]]
    explanation = await asked(server, {"messages": changed})
    assert explanation["place"] == {"message": 1, "role": "user", "character": 3}
    changed = [{"role": "system", "content": "First part.\nSecund."}, *messages[1:]]
    explanation = await asked(server, {"messages": changed})
    assert explanation["place"] == {"message": 0, "role": "system", "character": 15}
    changed = [messages[0], {"role": "assistant", "content": "user"}]
    explanation = await asked(server, {"messages": changed})
    assert explanation["place"]["role"] == "template"
    assert explanation["diverged"]["text"].startswith("assistant\n")


async def test_the_record_has_the_place_and_the_log_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log.jsonl"
    with caplog.at_level("INFO", "anaphora.server"):
        async with engine_server(tmp_path / "model", 1000, record=str(log)) as server:
            for question in ("Is it 10:31 now?", "Is it 10:45 now?"):
                await post(server, CHAT, chat(SYSTEM, question))
            await post(server, TEXT, {"prompt": encode(server, "ids"), "max_tokens": 2})
    first, second, third = read(log)
    assert (first.reason, first.place) == ("cold", {"message": None, "role": "template", "character": 0})
    assert (second.reason, second.place) == ("diverged", {"message": 1, "role": "user", "character": 9})
    assert first.id in second.detail
    assert third.place is None
    line = next(message for message in caplog.messages if message.startswith(second.id))
    assert f"{second.cached_tokens} cached (diverged: request {first.id}" in line


async def test_positions_with_a_template_that_prints_the_time(tmp_path: Path) -> None:
    """The skeleton of such a prompt is outdated at once, so the texts are searched in the prompt itself."""
    clock = "{{ strftime_now('%f') }}|{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    async with engine_server(tmp_path / "model", 1000) as server:
        object.__setattr__(server.service.text, "template", ChatTemplate(clock, {}))
        explanation = await asked(server, chat(SYSTEM, "Who?"))
        assert explanation["reason"] == "cold"
        assert explanation["place"] == {"message": None, "role": "template", "character": 0}
        (prompt, _), *_ = engine_requests(server.service, context_of(chat(SYSTEM, "Who are you?")))
        assert prompt.text is not None
        at = prompt.text.index("are you?")
        report = CacheReport(len(prompt.token_ids), at, "hit", position=at)
        found = prompt_positions.first_miss(
            server.service.text, context_of(chat(SYSTEM, "Who are you?")).body, prompt, report
        )
        assert found == {"message": 1, "role": "user", "character": 4}


def context_of(body: dict[str, Any]) -> RequestContext:
    parsed, raw = parse(json.dumps(body).encode(), ChatRequest)
    return RequestContext(parsed, raw, CHAT, 0.0, None)


async def test_evictions_and_retokenised_texts(tmp_path: Path) -> None:
    async with scripted(tmp_path / "model") as server:
        server.engine.report = CacheReport(9, 4, "evicted", "evicted 3.0 s ago", 4, eviction=Eviction(3.0, "", 64, 320))
        (explanation,) = (await post(server, EXPLAIN, {"prompt": "one two three"})).json()["cache_explanations"]
        assert explanation["evicted"] == {
            "seconds_ago": 3.0,
            "by": "other traffic",
            "lost_tokens": 64,
            "more_tokens": 320,
            "more_bytes": 20 * 1024,
        }
        same = Neighbour("chatcmpl-7", 1.0, tuple(encode(server, "two three")))
        server.engine.report = CacheReport(9, 4, "diverged", "x", 4, neighbour=same)
        (explanation,) = (await post(server, EXPLAIN, {"prompt": "one two three"})).json()["cache_explanations"]
        assert explanation["diverged"]["retokenised"]

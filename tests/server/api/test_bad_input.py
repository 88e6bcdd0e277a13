"""Every wrong body gets an error in OpenAI's format that names the field, and the next request works."""

from __future__ import annotations

import gzip
import json
from typing import Any

import msgspec
import pytest

from anaphora.errors import InvalidRequest
from anaphora.server.api.body_parsing import REFUSED, parse
from anaphora.server.api.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.support.servers import ScriptedServer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", **fields}


async def refused(server: ScriptedServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    response = await server.client.post(path, content=content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == status
    following = await server.client.post(TEXT, json=text())
    assert following.status_code == 200
    assert not server.engine.running
    return error


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("temperature", chat(temperature=-0.1)),
        ("temperature", chat(temperature="1")),
        ("temperature", chat(temperature="nan")),
        ("temperature", chat(temperature="Infinity")),
        ("temperature", chat(temperature=True)),
        ("top_p", chat(top_p=2.0)),
        ("top_p", chat(top_p=-0.5)),
        ("top_p", chat(top_p=0)),
        ("top_k", chat(top_k=-2)),
        ("top_k", chat(top_k=10**30)),
        ("min_p", chat(min_p=1.5)),
        ("presence_penalty", chat(presence_penalty=3)),
        ("frequency_penalty", chat(frequency_penalty=-2.1)),
        ("repetition_penalty", chat(repetition_penalty=0)),
        ("repetition_penalty", chat(repetition_penalty=1e-300)),
        ("n", chat(n=0)),
        ("n", chat(n=1_000_000)),
        ("n", chat(n=1.5)),
        ("seed", chat(seed=2**64)),
        ("seed", chat(seed=10**40)),
        ("max_tokens", chat(max_tokens=0)),
        ("max_tokens", chat(max_tokens=-1)),
        ("max_tokens", chat(max_tokens=1_000_000_000)),
        ("max_tokens", chat(max_completion_tokens=1_000_000_000)),
        ("min_tokens", chat(min_tokens=5, max_tokens=2)),
        ("min_tokens", chat(min_tokens=10**9)),
        ("top_logprobs", chat(logprobs=True, top_logprobs=1000)),
        ("top_logprobs", chat(logprobs=True, top_logprobs=-1)),
        ("top_logprobs", chat(top_logprobs=2)),
        ("logprobs", chat(logprobs=3)),
        ("prompt_logprobs", chat(prompt_logprobs=-1)),
        ("prompt_logprobs", chat(prompt_logprobs=100_000)),
        ("prompt_logprobs", chat(prompt_logprobs=1, stream=True)),
        ("logit_bias", chat(logit_bias={"191222": -100})),
        ("logit_bias", chat(logit_bias={"AI": -100})),
        ("logit_bias", chat(logit_bias={"-1": 5})),
        ("logit_bias", chat(logit_bias={"1": 101})),
        ("logit_bias", chat(logit_bias={str(n): 1 for n in range(2000)})),
        ("stop_token_ids", chat(stop_token_ids=[10**6])),
        ("stop_token_ids", chat(stop_token_ids=[-1])),
        ("allowed_token_ids", chat(allowed_token_ids=[])),
        ("allowed_token_ids", chat(allowed_token_ids=[259])),
        ("stop", chat(stop=["x"] * 17)),
        ("stop", chat(stop=[""])),
        ("stop[1]", chat(stop=["x", 3])),
        ("cache_salt", chat(cache_salt="")),
        ("cache_salt", chat(cache_salt="x" * 257)),
        ("cache_salt", chat(cache_salt=5)),
        ("request_id", chat(request_id="x" * 257)),
        ("stream_options", chat(stream_options={"include_usage": True})),
        ("truncate_prompt_tokens", chat(truncate_prompt_tokens=-2)),
        ("truncate_prompt_tokens", chat(truncate_prompt_tokens=10**6)),
        ("messages", chat(messages=[])),
        ("messages", {}),
        ("messages[0].role", chat(messages=[{"content": "x"}])),
        ("messages[0]", chat(messages=["x"])),
        ("messages[0].content", chat(messages=[{"role": "user", "content": 5}])),
        ("messages[0].content", chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
        ("messages", chat(messages=[{"role": "user", "content": "x" * 600}])),
        ("chat_template", chat(chat_template="{% for a in range(10**9) %}{% endfor %}")),
        ("chat_template_kwargs", chat(chat_template_kwargs={"messages": []})),
        ("chat_template_kwargs", chat(chat_template_kwargs={str(n): n for n in range(65)})),
        ("chat_template_kwargs", chat(chat_template_kwargs={"a": "x" * 20_000})),
        ("tool_choice", chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required")),
        ("tool_choice", chat(tool_choice={"type": "function", "function": {"name": "f"}})),
        ("response_format", chat(response_format={"type": "json_object"})),
        (
            "response_format",
            chat(
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"maximum": 2 * 10**10}}}
            ),
        ),
        ("structured_outputs", chat(structured_outputs={"regex": "(a+)+b"})),
        ("use_beam_search", chat(use_beam_search=True)),
        ("bad_words", chat(bad_words=["x"])),
        ("token_ids_logprob", chat(token_ids_logprob=[-1, 10_000_000])),
        ("logprob_token_ids", chat(logprob_token_ids=[-1])),
        ("audio", chat(audio={"voice": "x"})),
        ("echo", chat(echo=True)),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
async def test_chat_names_the_field(server: ScriptedServer, param: str, body: dict[str, Any]) -> None:
    error = await refused(server, CHAT, body)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("prompt", {}),
        ("prompt", text(prompt="")),
        ("prompt", text(prompt=[])),
        ("prompt", text(prompt=[[]])),
        ("prompt", text(prompt=["", "x"])),
        ("prompt", text(prompt=["a"] * 1025)),
        ("prompt", text(prompt=["a", 1])),
        ("prompt", text(prompt=["a", [1]])),
        ("prompt", text(prompt=[259])),
        ("prompt", text(prompt=[[1], [-1]])),
        ("prompt", text(prompt=[10**30])),
        ("prompt", text(prompt=[1] * 512)),
        ("prompt[0]", text(prompt=[1.5])),
        ("prompt[0]", text(prompt=[True])),
        ("max_tokens", text(prompt=[1] * 500, max_tokens=13)),
        ("max_tokens", text(max_tokens=0)),
        ("max_tokens", text(max_tokens=512, truncate_prompt_tokens=-1)),
        ("best_of", text(best_of=1_000_000)),
        ("best_of", text(best_of=2, n=3)),
        ("n", text(prompt=["a"] * 100, n=100)),
        ("logprobs", text(logprobs=1000)),
        ("logprobs", text(logprobs=True)),
        ("suffix", text(suffix="x")),
        ("prompt_embeds", text(prompt_embeds="AAAA")),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
async def test_completion_names_the_field(server: ScriptedServer, param: str, body: dict[str, Any]) -> None:
    error = await refused(server, TEXT, body)
    assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        '"text"',
        "null",
        '{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        '{"messages": [{"role": "user", "content": "hi"}], "temperature": Infinity}',
        '{"messages": [{"role": "user", "content": "hi"}], "temperature": -Infinity}',
        '{"messages": [{"role": "user", "content": "hi"}], "top_p": 1e999}',
        '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        '{"messages": ' + "[" * 100_000,
        '{"messages": [{"role": "user", "content": "hi", "x": ' + '{"a":' * 900 + "1" + "}" * 900 + "}], 5}",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
    ],
    ids=lambda value: repr(value[:50]),
)
async def test_a_body_that_is_not_a_json_object_is_refused(server: ScriptedServer, body: str | bytes) -> None:
    await refused(server, CHAT, body)


@pytest.mark.parametrize("coding", ["gzip", "zstd", "identity"])
async def test_a_compressed_body_is_refused_naming_the_encoding(server: ScriptedServer, coding: str) -> None:
    content = json.dumps(text()).encode()
    content = gzip.compress(content) if coding == "gzip" else content
    response = await server.client.post(TEXT, content=content, headers={"content-encoding": coding})
    assert response.status_code == (200 if coding == "identity" else 400)
    assert coding == "identity" or f"Content-Encoding: '{coding}'" in response.json()["error"]["message"]


async def test_the_length_limit_is_named_and_the_same_on_all_routes(server: ScriptedServer) -> None:
    error = await refused(server, TEXT, text(prompt=[1] * 600))
    assert "512" in error["message"]
    assert "600" in error["message"]
    card = (await server.client.get("/v1/models")).json()["data"][0]
    assert card["max_model_len"] == 512
    longest = await server.client.post(TEXT, json=text(prompt=[1] * 511, max_tokens=1))
    assert longest.status_code == 200


@pytest.mark.parametrize(
    "fields", [{"prompt": "x" * 1_000_000}, {"messages": [{"role": "user", "content": "x" * 10**6}]}]
)
async def test_far_too_long_texts_are_not_encoded_in_full(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    tokenizer, encoded = server.service.text.tokenizer, []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: encoded.append(len(text)) or encode(text, **more))
    error = await refused(server, TEXT if "prompt" in fields else CHAT, fields)
    assert "maximum context length is 512 tokens" in error["message"]
    assert error["param"] in fields
    assert max(encoded) < 10_000


async def test_deep_nesting_inside_the_fields(server: ScriptedServer) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    body = chat(tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}])
    response = await server.client.post(CHAT, json=body)
    assert response.status_code in (200, 400)
    assert (await server.client.post(CHAT, json=chat())).status_code == 200


async def test_max_tokens_defaults_to_what_the_window_leaves(server: ScriptedServer) -> None:
    await server.client.post(CHAT, json=chat())
    request = server.engine.seen[-1]
    assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)
    await server.client.post(TEXT, json=text(prompt=[1] * 505))
    assert server.engine.seen[-1].sampling.max_tokens == 7


async def test_unknown_model_is_404(server: ScriptedServer) -> None:
    for path, body in ((CHAT, chat(model="gpt-9")), (TEXT, text(model="gpt-9"))):
        assert (await refused(server, path, body, 404))["param"] == "model"
    assert (await server.client.post(TEXT, json=text(model="alias"))).json()["model"] == "alias"


async def test_unknown_routes_and_methods_have_the_same_error_format(server: ScriptedServer) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/health", 405)):
        response = await server.client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_fields_that_change_nothing_pass(server: ScriptedServer) -> None:
    body = chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        response_format={"type": "text"},
        use_beam_search=False,
        suffix=None,
        bad_words=[],
        nobody_knows_this={"x": 1},
        parallel_tool_calls=True,
        priority=0,
    )
    assert (await server.client.post(CHAT, json=body)).status_code == 200


async def test_unknown_fields_are_named_in_the_debug_log(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="anaphora.server")
    await server.client.post(TEXT, json=text(tempratur=1))
    assert "tempratur" in caplog.text


async def test_a_salt_reaches_the_engine_unchanged(server: ScriptedServer) -> None:
    salt = "org_1\0|/2345"
    await server.client.post(TEXT, json=text(cache_salt=salt))
    assert server.engine.seen[-1].cache_salt == salt


NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**70), 10**40, 0.5, -0.5, 1e308, 1e-320),
    *(
        "",
        "nan",
        "x",
        "1",
        "\x00",
        "é" * 300,
        [],
        [[]],
        [None],
        ["x"],
        [1],
        [-1],
        [[1], ["x"]],
        {},
        {"x": 1},
        {"1": "x"},
    ),
    *([{}], [{"role": 5}], [{"role": "user", "content": [None]}], {"type": "text"}, {"include_usage": 1}),
)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
async def test_no_value_of_any_field_causes_a_server_error(server: ScriptedServer, kind: type[Body]) -> None:
    path, usual = {
        ChatRequest: (CHAT, chat()),
        CompletionRequest: (TEXT, text()),
        TokenizeRequest: ("/tokenize", text()),
        DetokenizeRequest: ("/detokenize", {"tokens": [1]}),
    }[kind]
    names = {field.name for field in msgspec.structs.fields(kind)} | (REFUSED.keys() if kind is ChatRequest else set())
    for name in sorted(names):
        for value in NASTY:
            response = await server.client.post(path, json=usual | {name: value})
            assert response.status_code in (200, 400, 404), (name, value, response.text)
            if response.status_code == 400:
                assert response.json()["error"]["message"]
    assert not server.engine.running
    assert server.service.in_flight == 0


async def test_an_error_in_one_prompt_aborts_the_others_of_its_body(server: ScriptedServer) -> None:
    server.engine.fail_after = 2
    response = await server.client.post(TEXT, json=text(prompt=["a", "b", "c"]))
    assert response.status_code == 500
    assert not server.engine.running
    assert len(server.engine.aborted) == 3


def test_the_required_field_selects_the_body_type() -> None:
    chat, _ = parse(b'{"messages": [{"role": "user", "content": "a"}]}', ChatRequest, CompletionRequest)
    text, _ = parse(b'{"prompt": "a", "messages": null}', ChatRequest, CompletionRequest)
    assert isinstance(chat, ChatRequest)
    assert isinstance(text, CompletionRequest)
    for body, has in ((b"{}", "none"), (b'{"prompt": "a", "messages": []}', "messages and prompt")):
        with pytest.raises(InvalidRequest, match=f"one of messages, prompt, it has {has}"):
            parse(body, ChatRequest, CompletionRequest)

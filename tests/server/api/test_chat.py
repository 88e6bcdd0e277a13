from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import ScriptedServer, events, scripted

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


async def post(server: ScriptedServer, **body: Any) -> dict[str, Any]:
    response = await server.client.post(PATH, json={"messages": HI, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(server: ScriptedServer, **body: Any) -> list[dict[str, Any]]:
    response = await server.client.post(PATH, json={"messages": HI, "stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response.text)


def joined(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


async def test_a_whole_answer(server: ScriptedServer) -> None:
    answer = await post(server)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello, world"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_the_order_of_the_events_of_a_stream(server: ScriptedServer) -> None:
    chunks = await stream(server)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks) == "Hello, world"
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert [c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"]] == [None] * (len(chunks) - 1)
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("fields", [{}, {"stop": ["world"]}, {"max_tokens": 3}], ids=["eos", "stop", "length"])
async def test_usage_comes_once_and_last(server: ScriptedServer, fields: dict[str, Any]) -> None:
    server.engine.cached = 4
    chunks = await stream(server, stream_options={"include_usage": True}, **fields)
    assert [index for index, chunk in enumerate(chunks) if "usage" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["choices"] == []
    whole = await post(server, **fields)
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_usage_in_every_chunk(server: ScriptedServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(server, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 13


async def test_characters_of_several_tokens_stay_whole(tmp_path: Path) -> None:
    async with scripted(tmp_path, "é 😀 キュー") as server:
        chunks = await stream(server)
        assert joined(chunks) == "é 😀 キュー"
        assert not any("\ufffd" in (c["delta"].get("content") or "") for chunk in chunks for c in chunk["choices"])


async def test_logprobs(server: ScriptedServer) -> None:
    answer = await post(server, logprobs=True, top_logprobs=2, max_tokens=2)
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("H", [72], -0.5)
    assert [top["token"] for top in second["top_logprobs"]] == ["e", "f"]
    chunks = await stream(server, logprobs=True, top_logprobs=2, max_tokens=2)
    streamed = [entry for c in chunks for x in c["choices"] if x["logprobs"] for entry in x["logprobs"]["content"]]
    assert streamed == [first, second]


async def test_token_ids_on_request(server: ScriptedServer) -> None:
    answer = await post(server, return_token_ids=True)
    chunks = await stream(server, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    ids = [token for chunk in chunks for c in chunk["choices"] for token in c.get("token_ids", [])]
    assert ids == answer["choices"][0]["token_ids"]


async def test_chat_and_completion_of_the_same_text_share_their_ids(server: ScriptedServer) -> None:
    await post(server)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    await server.client.post("/v1/completions", json={"prompt": rendered})
    chat, text = server.engine.seen[-2:]
    assert chat.prompt_token_ids == text.prompt_token_ids


async def test_the_clients_id_is_echoed_and_never_the_engines(server: ScriptedServer) -> None:
    first = await post(server, request_id="id")
    second = await post(server, request_id="id")
    assert first["id"] == second["id"] == "chatcmpl-id"
    ids = [request.id for request in server.engine.seen]
    assert len(set(ids)) == 2
    assert "chatcmpl-id" not in ids
    response = await server.client.post(PATH, json={"messages": HI}, headers={"x-request-id": "trace-7"})
    assert response.headers["x-request-id"] == "trace-7"
    assert response.json()["id"] == "chatcmpl-trace-7"
    refused = await server.client.post(PATH, json={"messages": HI}, headers={"x-request-id": "x" * 300})
    assert refused.status_code == 400


async def test_a_failed_step_before_the_first_token_is_a_status(server: ScriptedServer) -> None:
    server.engine.fail_after = 0
    for streamed in (False, True):
        response = await server.client.post(PATH, json={"messages": HI, "stream": streamed})
        assert response.status_code == 500
        assert "out of memory" in response.json()["error"]["message"]


async def test_a_failed_step_in_a_stream_is_an_event_and_the_stream_ends(server: ScriptedServer) -> None:
    server.engine.fail_after = 3
    chunks = await stream(server)
    assert joined(chunks[:-1]) == "Hel"
    assert "out of memory" in chunks[-1]["error"]["message"]
    server.engine.fail_after = None
    assert joined(await stream(server)) == "Hello, world"


async def test_a_dead_engine_is_503_with_the_reason(server: ScriptedServer) -> None:
    assert (await server.client.get("/health")).status_code == 200
    server.engine.dead = "the engine was killed by SIGKILL"
    for response in (
        await server.client.get("/health"),
        await server.client.post(PATH, json={"messages": HI}),
        await server.client.post(PATH, json={"messages": HI, "stream": True}),
    ):
        assert response.status_code == 503
        assert "SIGKILL" in response.json()["error"]["message"]
    assert (await server.client.get("/metrics")).status_code == 200


CALLS = (
    'Let me see.\n<tool_call>\n{"name": "look_up", "arguments": {"b":1,  "a": "é"}}\n</tool_call>\n'
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
)


async def test_tool_calls_stay_text_without_the_flags(tmp_path: Path) -> None:
    async with scripted(tmp_path, CALLS) as server:
        message = (await post(server, tools=TOOLS))["choices"][0]["message"]
        assert message == {"role": "assistant", "content": CALLS}


async def test_tool_calls_are_read_byte_for_byte(tmp_path: Path) -> None:
    async with scripted(tmp_path, CALLS, enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        choice = (await post(server, tools=TOOLS))["choices"][0]
        calls = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        assert [call["function"] for call in calls] == [
            {"name": "look_up", "arguments": '{"b":1,  "a": "é"}'},
            {"name": "other", "arguments": "{}"},
        ]
        chunks = await stream(server, tools=TOOLS)
        streamed = [call for chunk in chunks for c in chunk["choices"] for call in c["delta"].get("tool_calls", [])]
        assert [call["function"] for call in streamed] == [call["function"] for call in calls]
        assert [call["index"] for call in streamed] == [0, 1]
        assert joined(chunks) == "Let me see."
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        for fields in ({"tools": TOOLS, "tool_choice": "none"}, {}):
            assert (await post(server, **fields))["choices"][0]["message"]["content"] == CALLS
        single = await post(server, tools=TOOLS, parallel_tool_calls=False)
        assert len(single["choices"][0]["message"]["tool_calls"]) == 1

"""The render routes: the prompt that the model would get, and how it differs from what was sent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.servers import ScriptedServer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def test_the_rendered_prompt_is_the_one_that_is_computed(server: ScriptedServer) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "cache_salt": "s"}
    shown = (await server.client.post(f"{CHAT}/render", json=body | {"request_id": "mine"})).json()
    assert not server.engine.seen
    await server.client.post(CHAT, json=body)
    (request,) = server.engine.seen
    assert tuple(shown["token_ids"]) == request.prompt_token_ids
    assert shown["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown["prompt_tokens"] == len(shown["token_ids"])
    assert shown["sampling_params"]["seed"] == 3
    assert shown["sampling_params"]["max_tokens"] == request.sampling.max_tokens
    assert shown["cache_salt"] == "s"
    assert (shown["request_id"], shown["model"], shown["changes"]) == ("chatcmpl-mine", "tiny", [])


async def test_every_change_to_the_prompt_is_listed(server: ScriptedServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"messages": messages, "tools": [tool], "truncate_prompt_tokens": 30}
    shown = (await server.client.post(f"{CHAT}/render", json=body)).json()
    changes = "\n".join(shown["changes"])
    for part in (
        "messages[0].content: 2 text parts",
        "messages[2].content: null",
        "leaves them out",
        "cut to 30 tokens",
    ):
        assert part in changes, changes
    assert "arguments: JSON text is parsed" in changes
    assert len(shown["token_ids"]) == 30
    assert shown["prompt"].endswith("<|im_start|>assistant\n")


async def test_each_prompt_of_a_completion_is_shown(server: ScriptedServer) -> None:
    async def shown(**body: Any) -> list[dict[str, Any]]:
        response = await server.client.post("/v1/completions/render", json=body)
        return response.json()

    assert [entry["prompt"] for entry in await shown(prompt=["a", "bc"])] == ["a", "bc"]
    ids = server.service.text.tokenizer.encode("ab", add_special_tokens=False)
    (cut,) = await shown(prompt=ids, truncate_prompt_tokens=1)
    assert (cut["prompt"], len(cut["changes"])) == ("b", 1)
    (whole,) = await shown(prompt=ids, truncate_prompt_tokens=2)
    assert (whole["prompt"], whole["changes"]) == ("ab", [])


@pytest.mark.parametrize("messages", [None, [], "x", [{"role": "user", "content": 5}]])
async def test_render_refuses_what_generation_refuses(server: ScriptedServer, messages: Any) -> None:
    response = await server.client.post(f"{CHAT}/render", json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages")

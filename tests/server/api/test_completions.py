from __future__ import annotations

from typing import Any

import pytest

from tests.support.servers import ScriptedServer, events

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def post(server: ScriptedServer, **body: Any) -> dict[str, Any]:
    response = await server.client.post(PATH, json={"prompt": "Say", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(server: ScriptedServer, **body: Any) -> list[dict[str, Any]]:
    response = await server.client.post(PATH, json={"prompt": "Say", "stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response.text)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


async def test_a_whole_answer(server: ScriptedServer) -> None:
    server.engine.cached = 2
    answer = await post(server, max_tokens=100)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello, world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 13,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_length_ends_it(server: ScriptedServer) -> None:
    answer = await post(server, max_tokens=5)
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5


async def test_every_type_of_prompt_gives_the_same_ids(server: ScriptedServer) -> None:
    ids = (await server.client.post("/tokenize", json={"prompt": "Say"})).json()["tokens"]
    for prompt in ("Say", ["Say"], ids, [ids]):
        await post(server, prompt=prompt)
        assert list(server.engine.seen[-1].prompt_token_ids) == ids


async def test_several_prompts_and_choices(server: ScriptedServer) -> None:
    answer = await post(server, prompt=["a", "bc"], n=2, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"He"}
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 8
    assert len({request.id for request in server.engine.seen}) == 2


async def test_several_prompts_in_one_stream(server: ScriptedServer) -> None:
    chunks = await stream(server, prompt=["a", "b"], n=2, max_tokens=30)
    assert [joined(chunks, index) for index in range(4)] == ["Hello, world"] * 4


async def test_echo(server: ScriptedServer) -> None:
    assert (await post(server, echo=True, max_tokens=5))["choices"][0]["text"] == "SayHello"
    assert joined(await stream(server, echo=True, max_tokens=5)) == "SayHello"


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_with_logprobs_scores_the_prompt(server: ScriptedServer, streamed: bool) -> None:
    if streamed:
        chunks = await stream(server, echo=True, logprobs=1, max_tokens=2)
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        scores = {key: [item for part in parts for item in part[key]] for key in parts[0]}
    else:
        scores = (await post(server, echo=True, logprobs=1, max_tokens=2))["choices"][0]["logprobs"]
    assert scores["tokens"] == ["S", "a", "y", "H", "e"]
    assert scores["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert scores["text_offset"] == [0, 1, 2, 3, 4]
    assert scores["top_logprobs"][0] is None
    assert scores["top_logprobs"][3] == {"H": -0.5}


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_without_new_tokens_only_scores(server: ScriptedServer, streamed: bool) -> None:
    if streamed:
        chunks = await stream(server, echo=True, logprobs=1, max_tokens=0, stream_options={"include_usage": True})
        text, usage = joined(chunks), chunks[-1]["usage"]
        finish = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1]
    else:
        answer = await post(server, echo=True, logprobs=1, max_tokens=0)
        text, usage, finish = answer["choices"][0]["text"], answer["usage"], answer["choices"][0]["finish_reason"]
        assert answer["choices"][0]["logprobs"]["tokens"] == ["S", "a", "y"]
    assert text == "Say"
    assert finish == "length"
    assert usage["completion_tokens"] == 0


async def test_prompt_logprobs(server: ScriptedServer) -> None:
    scores = (await post(server, prompt_logprobs=2))["choices"][0]["prompt_logprobs"]
    ids = server.engine.seen[-1].prompt_token_ids
    assert scores[0] is None
    assert scores[1][str(ids[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    assert len(scores[1]) == 2


async def test_token_ids_on_request(server: ScriptedServer) -> None:
    choice = (await post(server, return_token_ids=True))["choices"][0]
    assert choice["token_ids"] == [*server.engine.reply, server.engine.eos]
    assert choice["prompt_token_ids"] == list(server.engine.seen[-1].prompt_token_ids)
    chunks = await stream(server, return_token_ids=True)
    ids = [token for chunk in chunks for c in chunk["choices"] for token in c.get("token_ids", [])]
    assert ids == choice["token_ids"]


async def test_stop_string_over_several_tokens(server: ScriptedServer) -> None:
    for choice in (await post(server, stop=["o, w"], n=2))["choices"] + (await post(server, stop="o, w"))["choices"]:
        assert choice["text"] == "Hell"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "o, w")
    assert joined(await stream(server, stop=["o, w"])) == "Hell"
    assert not server.engine.running


async def test_a_stop_token_is_shown_only_on_request(server: ScriptedServer) -> None:
    server.engine.eos = server.engine.reply[-1]
    server.engine.reply = server.engine.reply[:-1]
    hidden = await post(server, stop_token_ids=[server.engine.eos])
    shown = await post(server, stop_token_ids=[server.engine.eos], include_stop_str_in_output=True)
    assert hidden["choices"][0]["text"] == "Hello, worl"
    assert shown["choices"][0]["text"] == "Hello, world"
    assert hidden["usage"] == shown["usage"]
    assert joined(await stream(server, stop_token_ids=[server.engine.eos])) == "Hello, worl"


async def test_text_held_back_for_a_stop_string_is_sent_at_the_end(server: ScriptedServer) -> None:
    assert (await post(server, stop=["world!"]))["choices"][0]["text"] == "Hello, world"
    assert joined(await stream(server, stop=["world!"])) == "Hello, world"


async def test_truncated_prompts(server: ScriptedServer) -> None:
    for fields, kept in (({}, "cd"), ({"truncation_side": "right"}, "ab")):
        await post(server, prompt="abcd", truncate_prompt_tokens=2, echo=True, **fields)
        assert server.service.text.tokenizer.decode(server.engine.seen[-1].prompt_token_ids) == kept
    await post(server, prompt="a" * 1000, truncate_prompt_tokens=-1, max_tokens=12)
    assert len(server.engine.seen[-1].prompt_token_ids) == 500


async def test_sampling_fields_reach_the_engine(server: ScriptedServer) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 7,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    await post(server, logit_bias={"5": -3}, allowed_token_ids=[1, 5], stop_token_ids=[9], **fields)
    sampling = server.engine.seen[-1].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.logit_bias == {5: -3.0}
    assert tuple(sampling.allowed_token_ids) == (1, 5)
    assert sampling.stop_token_ids == (9,)

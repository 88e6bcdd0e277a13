"""A tiny random model behind ``anaphora serve``: command line, engine process, model and HTTP together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.servers import CHATML, VOCAB, RunningServer, cli_server
from tests.support.tokenizers import write_tokenizer

pytestmark = pytest.mark.slow

HI: list[Any] = [{"role": "user", "content": "Tell me about prefixes, as you do every day."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=write_tokenizer(folder, VOCAB, CHATML),
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "4M", "--served-model-name", "tiny")
    with cli_server(folder, *flags) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_cold_cached_and_streamed_answers_are_the_same(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 24, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    cold = client.chat.completions.create(**body)
    cached = client.chat.completions.create(**body)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cached.usage.prompt_tokens_details.cached_tokens == cached.usage.prompt_tokens - 1
    assert cached.choices[0].message.content == cold.choices[0].message.content
    assert cold.usage.completion_tokens == len(cold.choices[0].logprobs.content) == 24
    streamed = list(client.chat.completions.create(**body, stream=True))
    choices = [choice for chunk in streamed for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == cold.choices[0].message.content
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    for one, other in zip(entries, cold.choices[0].logprobs.content, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert len(one.top_logprobs) == 3


def test_an_answer_explains_where_it_differs_from_an_earlier_prompt(client: openai.OpenAI) -> None:
    def ask(question: str, **more: Any) -> Any:
        messages = [{"role": "system", "content": "Be brief and never guess."}, {"role": "user", "content": question}]
        body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
        return client.chat.completions.with_raw_response.create(**body, extra_body={"explain_cache": True}, **more)

    first = ask("[Request ID: 4711] Who are you?").parse()
    answer = ask("[Request ID: 4812] Who are you?")
    (told,) = answer.parse().cache_explanations
    assert told["reason"] == "diverged"
    assert told["place"] == {"message": 1, "role": "user", "character": 14}
    assert told["diverged"]["request_id"] == first.id
    assert told["diverged"]["text"].startswith("812] Who")
    assert told["diverged"]["other_text"].startswith("711] Who")
    cached = answer.parse().usage.prompt_tokens_details.cached_tokens
    assert answer.headers["x-anaphora-cache"].startswith(f"diverged;cached={cached};")
    stream = ask("[Request ID: 4812] Who are you?", stream=True)
    assert stream.headers["x-anaphora-cache"].startswith("short;")
    *_, last = stream.parse()
    assert last.cache_explanations[0]["reason"] == "short"


def test_a_seed_decides_every_choice(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 12, "seed": 5, "n": 3}
    first, second = (client.completions.create(**body) for _ in range(2))
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert len({choice.text for choice in first.choices}) == 3


def test_echo_scores_the_prompt_as_prompt_logprobs_do(server: RunningServer, client: openai.OpenAI) -> None:
    prompt = "Score this"
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = client.completions.create(**body, extra_body={"prompt_logprobs": 1}).choices
    assert choice.text == prompt
    assert choice.finish_reason == "length"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": prompt}).json()["tokens"]
    scores = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], choice.prompt_logprobs[1:], strict=True)]
    assert choice.prompt_logprobs[0] is None
    assert choice.logprobs.token_logprobs == [None, *scores]


def test_a_salt_separates_tenants(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        body: dict[str, Any] = {"model": "tiny", "prompt": "the same text for both tenants", "max_tokens": 1}
        usage = client.completions.create(**body, extra_body={"cache_salt": salt}).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [cached(salt) for salt in ("a", "b", "a", "b", "ab")] == [0, 0, 29, 29, 0]


def test_a_pinned_prefix_survives_the_eviction_of_everything_else(server: RunningServer, client: openai.OpenAI) -> None:
    system: Any = {"role": "system", "content": "You answer questions about prefixes. " * 6}

    def ask(question: str) -> Any:
        messages: Any = [system, {"role": "user", "content": question}]
        return client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)

    cold = ask("Why?")
    pinned: Any = client.post("/cache/pin", cast_to=object, body={"model": "tiny", "messages": [system]})
    (pin,) = pinned["data"]
    for i in range(24):  # 24 prompts of 500 tokens in a pool of 8,176
        client.completions.create(model="tiny", prompt=f"{i:03}" * 166, max_tokens=2)
    assert ask("How?").usage.prompt_tokens_details.cached_tokens == pin["tokens"] == pin["kept_tokens"]
    again = ask("Why?")
    assert again.choices[0].message.content == cold.choices[0].message.content
    listed: Any = client.get("/cache/prefixes", cast_to=object, options={"params": {"limit": 3}})
    assert [entry["id"] for entry in listed["pins"]] == [pin["id"]]
    assert listed["pins"][0]["text_start"].startswith("<|im_start|>system\nYou answer")
    shown: Any = client.post("/chat/completions/render", cast_to=object, body={"messages": [system], "model": "tiny"})
    assert shown["prompt"].startswith("<|im_start|>system\nYou answer")
    most = [f"{i:03}" * 166 for i in range(100, 117)]
    with pytest.raises(openai.BadRequestError, match=r"too much to pin: .* most 479 may be pinned"):
        client.post("/cache/pin", cast_to=object, body={"prompt": most})
    client.post("/cache/unpin", cast_to=object, body={"id": pin["id"]})
    with pytest.raises(openai.NotFoundError, match="is not pinned"):
        client.post("/cache/unpin", cast_to=object, body={"id": pin["id"]})


def test_a_prompt_over_the_window_is_refused_and_the_next_one_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="512 tokens"):
        client.completions.create(model="tiny", prompt="x" * 513)
    assert client.completions.create(model="tiny", prompt="x" * 511, max_tokens=1).usage.completion_tokens == 1

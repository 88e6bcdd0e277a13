"""The offline face over a real model, tiny and random: what sampling promises holds through the whole engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from anaphora import LLM, SamplingParams
from anaphora.checkpoint import gguf, resolve
from tests.support.tokenizers import write_tokenizer

VOCAB = 320
Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose attention matters: at the usual range of 0.02 the prompt would hardly change the logits."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=VOCAB - 1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        defaults = {"dtype": "float32", "kv_cache_memory_bytes": "4M", "max_num_seqs": 8}
        made.append(LLM(str(folder), **(defaults | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.check()


PROMPTS = [
    "The order has not arrived.",
    "The order has not arrived yet, although",
    "Refund, please",
    "The order",
    "x",
]
SAMPLING = [
    SamplingParams(seed=1, max_tokens=24, ignore_eos=True, logprobs=3),
    SamplingParams(seed=2, max_tokens=24, ignore_eos=True, top_p=0.8, temperature=1.3, n=3),
    SamplingParams(seed=3, max_tokens=24, ignore_eos=True, top_k=8, min_p=0.01, repetition_penalty=1.3),
    SamplingParams(seed=1, max_tokens=24, ignore_eos=True, frequency_penalty=0.5, presence_penalty=0.5, min_tokens=6),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={65: 2.0, 66: -50.0}),
]


def tokens(llm: LLM, prompts: list[str], sampling: list[SamplingParams]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in llm.generate(prompts, sampling)]


def test_a_seeded_request_is_the_same_alone_together_cached_and_preempted(make: Make) -> None:
    cold = make(enable_prefix_caching=False)
    alone = [tokens(cold, [prompt], [sampling])[0] for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)]
    together = make(max_num_batched_tokens=16)
    assert tokens(together, PROMPTS, SAMPLING) == alone
    assert tokens(together, PROMPTS[::-1], SAMPLING[::-1]) == alone[::-1]
    assert together.stats().hits > 0
    block = together.info.model.bytes_per_block
    narrow = make(kv_cache_memory_bytes=9 * block)
    assert tokens(narrow, PROMPTS, SAMPLING) == alone
    assert narrow.stats().preemptions > 0


def test_block_size_and_chunking_change_no_token(make: Make) -> None:
    answers = {
        str(tokens(make(block_size=size, max_num_batched_tokens=budget), PROMPTS, SAMPLING))
        for size, budget in ((16, 2048), (1, 64), (5, 9))
    }
    assert len(answers) == 1


def test_logprobs_are_those_of_the_models_distribution(make: Make) -> None:
    llm = make()
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=20, ignore_eos=True)
    output = llm.generate([PROMPTS[0]], sampling)[0]
    choice = output.outputs[0]
    assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in choice.logprobs))
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert (entry.token_id, entry.rank, entry.top[0]) == (token, 1, (token, entry.logprob))
        assert sum(math.exp(value) for _, value in entry.top) <= 1 + 1e-5


def test_prompt_logprobs_score_what_was_generated_as_generation_did(make: Make) -> None:
    for budget in (2048, 7):
        llm = make(max_num_batched_tokens=budget)
        sampling = SamplingParams(seed=5, max_tokens=12, logprobs=2, ignore_eos=True)
        first = llm.generate([PROMPTS[1]], sampling)[0]
        whole = [*first.prompt_token_ids, *first.outputs[0].token_ids]
        scored = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=2))[0]
        assert scored.num_cached_tokens == 0
        assert len(scored.prompt_logprobs) == len(whole)
        assert scored.prompt_logprobs[0] is None
        for said, again in zip(first.outputs[0].logprobs, scored.prompt_logprobs[-12:], strict=True):
            assert (again.token_id, again.rank) == (said.token_id, said.rank)
            assert again.logprob == pytest.approx(said.logprob, abs=1e-4)


def test_an_answer_sent_back_hits_to_its_last_token(make: Make) -> None:
    llm = make()
    first = llm.generate([PROMPTS[0]], SAMPLING[0])[0]
    history = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    again = llm.generate([[*history, 70, 71]], SAMPLING[0])[0]
    assert again.num_cached_tokens == len(history) - 1  # the last token of an answer is never computed
    assert again.cache.reason == "hit"


def test_text_is_what_the_tokenizer_says_of_the_tokens(make: Make) -> None:
    llm = make()
    for output in llm.generate(PROMPTS, SAMPLING):
        for choice in output.outputs:
            assert choice.text == llm.get_tokenizer().decode(choice.token_ids)


def test_the_embedded_model_answers_and_reuses() -> None:
    if gguf.find(resolve.EMBEDDED_NAME, resolve.EMBEDDED_SHA256) is None:
        pytest.skip("the embedded model is not converted on this machine; make bench does it")
    greedy = SamplingParams(temperature=0, max_tokens=16)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    with LLM(max_model_len=512, kv_cache_memory_bytes="64M") as llm:
        cold = llm.chat(question, greedy)[0]
        warm = llm.chat(question, greedy)[0]
        llm.check()
    assert "Paris" in cold.outputs[0].text
    assert "Paris" in warm.outputs[0].text
    assert cold.outputs[0].finish_reason == "stop"
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, len(cold.prompt_token_ids) - 1)

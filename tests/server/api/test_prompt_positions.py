"""Maps every token of a prompt to the exact character of a message, also if a character has several tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.server.api import prompt_positions, prompts
from anaphora.server.api.protocol import ChatRequest, CompletionRequest
from anaphora.server.service import TextComponents
from anaphora.text.generation_config import GenerationDefaults
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.reports import CacheReport
from tests.support.servers import CHATML
from tests.support.tokenizers import write_tokenizer

texts = st.text(st.sampled_from("ab \n1é\u4f60\ufffd🙂user<|"), max_size=12)


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory) -> TextComponents:
    folder: Path = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, 300, CHATML)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_template is not None
    return TextComponents(tokenizer, tokenizer.chat_template, GenerationDefaults({}, ()))


def find(
    components: TextComponents, body: ChatRequest | CompletionRequest, prompt: prompts.Prompt, at: int
) -> dict[str, Any] | None:
    return prompt_positions.first_miss(
        components, body, prompt, CacheReport(len(prompt.token_ids), at, "diverged", position=at)
    )


@settings(max_examples=100, deadline=None)
@given(contents=st.lists(texts, min_size=1, max_size=4), data=st.data())
def test_every_token_of_a_chat_has_a_position(
    components: TextComponents, contents: list[str], data: st.DataObject
) -> None:
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    body = ChatRequest(messages=messages)
    prompt = prompts.chat_prompt(body, components.tokenizer, components.template)
    message = data.draw(st.integers(0, len(messages) - 1))
    before = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[:message])
    start = len((before + f"<|im_start|>{roles[message]}\n").encode())
    content = contents[message]
    offset = data.draw(st.integers(0, len(content.encode())))
    found = find(components, body, prompt, start + offset)
    if offset == len(content.encode()):
        assert found is not None
        assert (found["message"], found["role"]) == (None, "template")
    else:
        character = len(content.encode()[:offset].decode("utf-8", "ignore"))
        assert found == {"message": message, "role": roles[message], "character": character}


@given(text=texts.filter(lambda text: len(text.encode()) > 2), data=st.data())
def test_every_token_of_a_completion_has_a_position(components: TextComponents, text: str, data: st.DataObject) -> None:
    prompt = prompts.encode(text, components.tokenizer, add_special_tokens=False)
    at = data.draw(st.integers(0, len(prompt.token_ids) - 2))
    character = len(text.encode()[:at].decode("utf-8", "ignore"))
    found = find(components, CompletionRequest(prompt=text), prompt, at)
    assert found == {"message": 0, "role": "prompt", "character": character}


def test_prompts_without_a_position(components: TextComponents) -> None:
    body = CompletionRequest(prompt="abcdef")
    prompt = prompts.encode("abcdef", components.tokenizer, add_special_tokens=False)
    assert find(components, body, prompt, 5) is None
    assert find(components, body, prompts.Prompt(prompt.token_ids), 2) is None
    assert (
        prompt_positions.first_miss(components, body, prompt, CacheReport(6, 0, "bypassed", feature="prompt_logprobs"))
        is None
    )

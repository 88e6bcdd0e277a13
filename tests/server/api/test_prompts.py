"""The shared prefix of conversations that begin with the same messages is exact to the token."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from anaphora.errors import InvalidRequest
from anaphora.server.api.prompts import chat_prompt, shared_prefix
from anaphora.server.api.protocol import ChatRequest
from anaphora.text.chat_template import ChatTemplate, default_template
from anaphora.tools.shared.tokenizer_and_template import load_tokenizer_and_template

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "chat-templates"
TOKENIZER = load_tokenizer_and_template(None, None).tokenizer
SYSTEM: dict[str, Any] = {"role": "system", "content": "You are kind. Be brief"}
EXAMPLE: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def common(one: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def templates() -> dict[str, str]:
    return {"chatml": default_template()} | {
        path.stem: path.read_text("utf-8") for path in sorted(DATA.glob("*.jinja"))
    }


@pytest.mark.parametrize("name", templates())
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("head", [[SYSTEM], EXAMPLE], ids=["system", "example"])
def test_every_conversation_begins_with_its_shared_prefix(name: str, tools: Any, head: list[dict[str, Any]]) -> None:
    template = ChatTemplate(templates()[name], {"bos_token": "<s>", "eos_token": "</s>"})

    def ids(text: str) -> tuple[int, ...]:
        request = ChatRequest(messages=[*head, {"role": "user", "content": text}], tools=tools)
        return chat_prompt(request, TOKENIZER, template).token_ids

    shared = shared_prefix(ChatRequest(messages=head, tools=tools), TOKENIZER, template, None).token_ids
    for text in ("hello", "Hello", " lead", "123", "日本", "- a list", "ünser"):
        assert ids(text)[: len(shared)] == shared
    for text in ("\n\nlines", "", "!"):  # may grow together with what stands before them
        assert ids(text)[: len(shared) - 1] == shared[:-1]
    assert len(common(ids("hello"), ids("Hello"))) <= len(shared) + 2  # nothing that is worth keeping is left out
    assert SYSTEM["content"] in TOKENIZER.decode(shared, False)


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ([SYSTEM, {"role": "user", "content": "hi"}], {}),
        ([SYSTEM], {"add_generation_prompt": True}),
        ([SYSTEM], {"add_generation_prompt": False}),
        (EXAMPLE, {"add_generation_prompt": False, "continue_final_message": True}),
    ],
)
def test_a_body_that_the_model_answers_next_is_the_whole_prompt(
    messages: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    template = ChatTemplate(templates()["chatml"], {})
    request = ChatRequest(messages=messages, **more)
    assert shared_prefix(request, TOKENIZER, template, None) == chat_prompt(request, TOKENIZER, template)


def test_a_template_that_writes_nothing_before_the_user_message_is_refused() -> None:
    template = ChatTemplate("{{ messages[-1].content }}{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequest, match="nothing before the user's message"):
        shared_prefix(ChatRequest(messages=[SYSTEM]), TOKENIZER, template, None)

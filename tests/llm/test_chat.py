"""LLM.chat over the fake runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anaphora import LLM
from anaphora.errors import ConfigError, InvalidRequest
from tests.support.engine import VOCAB, expected
from tests.support.llm import Make, plain
from tests.support.tokenizers import write_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def test_a_conversation_is_rendered_and_answered(llm: LLM) -> None:
    output = llm.chat(HELLO, plain())[0]
    assert output.prompt == "[user] Hello\n[assistant] "
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
    assert output.outputs[0].token_ids == expected(output.prompt_token_ids, 8)


def test_conversations_in_a_list_are_answered_in_order(llm: LLM) -> None:
    other = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Bye"}]
    outputs = llm.chat([HELLO, other], plain(), add_generation_prompt=False)
    assert [output.prompt for output in outputs] == ["[user] Hello\n", "[system] Be brief\n[user] Bye\n"]


def test_the_last_message_can_be_continued(llm: LLM) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Good"}]
    assert llm.chat(messages, plain(), continue_final_message=True)[0].prompt == "[user] Hello\n[assistant] Good"


def test_tools_that_the_template_drops_are_warned_about(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    llm.chat(HELLO, plain(), tools=[tool])
    assert "ignores tools" in caplog.text


@pytest.mark.parametrize("as_file", [True, False])
def test_a_template_of_ones_own(make: Make, tmp_path: Path, as_file: bool) -> None:
    template = "{{ messages[0]['content'] }}{{ mood }}"
    path = tmp_path / "mine.jinja"
    path.write_text(template)
    llm = make(chat_template=str(path) if as_file else template)
    assert llm.chat(HELLO, plain(), chat_template_kwargs={"mood": "?"})[0].prompt == "Hello?"


def test_a_template_file_that_is_not_there(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        make(chat_template="nowhere.jinja")


@pytest.mark.parametrize(
    ("messages", "options", "about"),
    [
        ([], {}, "empty"),
        ([HELLO, []], {}, "prompt 1: .*empty"),
        (["Hello"], {}, "prompt 0: a conversation is a list"),
        (HELLO, {"chat_template": "x"}, "chat_template"),
        (HELLO, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_bad_conversation_is_refused(llm: LLM, messages: Any, options: dict[str, Any], about: str) -> None:
    with pytest.raises(InvalidRequest, match=about):
        llm.chat(messages, plain(), **options)


def test_a_model_without_a_template_still_generates(make: Make, folder: Path) -> None:
    write_tokenizer(folder, VOCAB, template=None)
    llm = make()
    with pytest.raises(InvalidRequest, match="no chat template"):
        llm.chat(HELLO, plain())
    assert llm.generate("Hello", plain())[0].finished

"""Parts of prompts are mapped to messages and tools, for real templates and unusual conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anaphora.text
from anaphora.errors import InvalidRequest, ModelError
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.outline import NOBODY, OutlineBuilder, PromptPosition, TextOwner, position_at, texts_of, tool_text

TEMPLATES = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat-templates"
NAMED = Path(anaphora.text.__file__).parent / "templates" / "chatml.jinja"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Bern"}'}}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[Any]]] = [
    ([{"role": "user", "content": "user"}], []),
    ([{"role": "user", "content": " spaces around \n"}, {"role": "assistant", "content": "user"}], []),
    ([{"role": "system", "content": "system"}, {"role": "user", "content": "\ue0000\ue001 \ue00099\ue001"}], []),
    ([{"role": "user", "content": "\ue000" + "9" * 5000 + "\ue001 <think> \ue0000\ue001"}], []),
    (
        [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "<think>hm</think>three"},
            {"role": "user", "content": "four"},
        ],
        [],
    ),
    (
        [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call12345", "content": "rain"},
        ],
        [TOOL],
    ),
]


def sources() -> list[Path]:
    return [NAMED, *(sorted(TEMPLATES.glob("*.jinja")) if TEMPLATES.is_dir() else [])]


def texts(messages: list[dict[str, Any]], tools: list[Any]) -> list[tuple[str, str]]:
    own = [(kind, text) for message in messages for kind, _, text in texts_of(message)]
    return [*(("tool", tool_text(tool)) for tool in tools), *own]


@pytest.mark.parametrize("source", sources(), ids=lambda path: path.stem)
def test_a_filled_outline_is_the_prompt(source: Path) -> None:
    try:
        template = ChatTemplate(source.read_text("utf-8"), SPECIAL)
    except ModelError as error:
        pytest.skip(str(error))
    builder = OutlineBuilder(template)
    shown = 0
    for messages, tools in CONVERSATIONS:
        for _ in range(2):  # the second comes from memory
            try:
                wanted = template.render(messages, tools=tools)
                outline = builder.outline_of(messages, tools, {}, lambda: texts(messages, tools))  # noqa: B023
            except InvalidRequest:
                continue
            known = texts(messages, tools)
            assert "".join(known[owner][1] if own is None else own for owner, own in outline.parts) == wanted
            shown += sum(owner != NOBODY for owner, _ in outline.parts)
    assert shown


def test_a_position_counts_over_all_texts_of_its_message() -> None:
    owners = [TextOwner(0, "system", 0), TextOwner(1, "user", 0), TextOwner(1, "user", 4)]
    parts = [(NOBODY, 2), (0, 3), (NOBODY, 4), (1, 3), (NOBODY, 1), (2, 5)]
    assert position_at(parts, owners, 0) == PromptPosition(NOBODY, "", 0)
    assert position_at(parts, owners, 4) == PromptPosition(0, "system", 2)
    assert position_at(parts, owners, 8) == PromptPosition(NOBODY, "", 3)
    assert position_at(parts, owners, 9) == PromptPosition(1, "user", 0)
    assert position_at(parts, owners, 17) == PromptPosition(1, "user", 8)
    assert position_at(parts, owners, 18) is None


def test_a_text_equal_to_the_templates_own_is_mapped_correctly() -> None:
    """The role before the text is the same word as the text."""
    template = ChatTemplate(NAMED.read_text("utf-8"), SPECIAL)
    messages = [{"role": "user", "content": "user"}]
    outline = OutlineBuilder(template).outline_of(messages, [], {}, lambda: texts(messages, []))
    before, owned, _ = outline.parts
    assert owned == (0, None)
    assert before[1] is not None
    assert before[1].endswith("user\n")


def test_outlines_without_placeholders_are_not_cached() -> None:
    """If a template transforms its texts, every prompt is rendered and none is cached."""
    source = "{% for m in messages %}{{ m.content | upper }}|{% endfor %}"
    builder = OutlineBuilder(ChatTemplate(source, SPECIAL))
    for number in range(5):
        messages = [{"role": "user", "content": f"text {number}"}, {"role": "user", "content": "CAPS"}]
        outline = builder.outline_of(messages, [], {}, lambda: texts(messages, []))  # noqa: B023
        assert "".join(own or "" for _, own in outline.parts) == f"TEXT {number}|CAPS|"
        assert outline.parts[-2][0] == 1
    assert not builder._known

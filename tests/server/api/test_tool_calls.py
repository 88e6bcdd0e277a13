from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.server.api.tool_calls import ToolCallParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"x":  1}}\n</tool_call>'


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser()
    text = "".join(parser.feed(piece) for piece in pieces) + parser.finish()
    return text, [(call.name, call.arguments) for call in parser.calls]


@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        ("no call at all ", "no call at all ", []),
        (CALL, "", [("f", '{"x":  1}')]),
        ("first\n" + CALL + "\n" + CALL + "\n", "first", [("f", '{"x":  1}')] * 2),
        (CALL + "\nafter", "\nafter", [("f", '{"x":  1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("a <tool_call>{broken</tool_call> b", "a <tool_call>{broken</tool_call> b", []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        ('x <tool_call>{"name": "f"', 'x <tool_call>{"name": "f"', []),
        ("1 <tool 2 < 3 <tool_call", "1 <tool 2 < 3 <tool_call", []),
    ],
)
def test_calls_are_separated_from_text(text: str, plain: str, calls: list[tuple[str, str]]) -> None:
    assert read([text]) == (plain, calls)
    assert read(list(text)) == (plain, calls)


@given(
    st.lists(st.sampled_from([CALL, "<tool", "_call>", "</tool_call>", "x", " ", "\n", "<"]), max_size=12), st.data()
)
def test_the_split_into_deltas_makes_no_difference(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text])


def test_text_is_held_back_only_while_it_can_become_a_call() -> None:
    parser = ToolCallParser()
    assert parser.feed("a <too") == "a"
    assert parser.feed("th") == " <tooth"
    assert parser.feed(" <tool_call>{") == ""
    assert parser.finish() == " <tool_call>{"

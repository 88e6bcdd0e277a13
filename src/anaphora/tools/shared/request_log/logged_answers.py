"""Reads the model's answer from a logged response: its text, and its tokens as they were generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """``token_ids`` are the generated ids, ``parts`` the text of each generated token; empty where the log has none."""

    text: str
    token_ids: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()


def answer_of(*places: Any) -> Answer | None:
    """Returns the answer in the first of ``places`` that has one.

    Returns None if the generated text is unknown: with several choices, tool calls, or reasoning that was removed.
    """
    for place in places:
        if isinstance(place, dict):
            inner = place.get("body")
            answer = _answer(place) or (_answer(inner) if isinstance(inner, dict) else None)
            if answer is not None:
                return answer
    return None


def _answer(response: dict[str, Any]) -> Answer | None:
    choices = response.get("choices")
    if isinstance(choices, list):
        if len(choices) != 1 or not isinstance(choice := choices[0], dict):
            return None
        message = choice.get("message")
        source = message if isinstance(message, dict) else choice
        if any(source.get(key) for key in ("tool_calls", "reasoning_content", "reasoning", "refusal")):
            return None
        text = source.get("content", source.get("text"))
        return _with_tokens(text, choice) if isinstance(text, str) and text else None
    blocks = response.get("content")
    if response.get("role") == "assistant" and isinstance(blocks, list) and len(blocks) == 1:
        block = blocks[0]
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        return Answer(text) if isinstance(text, str) and text else None
    return None


def _with_tokens(text: str, choice: dict[str, Any]) -> Answer:
    ids = choice.get("token_ids")
    logprobs = choice.get("logprobs")
    listed: Any = logprobs.get("content", logprobs.get("tokens")) if isinstance(logprobs, dict) else None
    parts: list[Any] = [part.get("token") if isinstance(part, dict) else part for part in listed or ()]
    return Answer(text, _ids(ids), tuple(parts) if all(isinstance(part, str) for part in parts) else ())


def _ids(ids: Any) -> tuple[int, ...]:
    good = (
        isinstance(ids, Sequence) and not isinstance(ids, str) and all(type(i) is int and 0 <= i < 2**31 for i in ids)
    )
    return tuple(ids) if good else ()

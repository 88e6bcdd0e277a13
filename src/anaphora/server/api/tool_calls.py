"""Parses tool calls as Hermes and Qwen models write them: JSON with name and arguments between two tags."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class _CallJson(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class ToolCall(msgspec.Struct):
    """One call. ``arguments`` is the model's JSON text byte for byte, so that it hits the cache when sent back."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """Returns OpenAI's format."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits the text of one choice, as it is generated, into plain text and ``calls``.

    Text is held back only while it may become a tag, or is inside a call. White space around calls is dropped. A call
    that is not valid JSON, or is never closed, stays in the text as the model wrote it.

    Args:
        only_first: drop all calls after the first (``parallel_tool_calls: false``).
    """

    def __init__(self, *, only_first: bool = False) -> None:
        self.calls: list[ToolCall] = []
        self._only_first = only_first
        self._held = ""

    def feed(self, text: str) -> str:
        """Adds generated text; returns the plain text that is certain now."""
        self._held += text
        plain = ""
        while (start := self._held.find(OPEN)) >= 0:
            before = self._held[:start].rstrip()
            plain += before
            end = self._held.find(CLOSE, start)
            if end < 0:
                self._held = self._held[len(before) :]
                return plain
            call = _parse_call(self._held[start + len(OPEN) : end])
            if call is None:
                plain += self._held[len(before) : end + len(CLOSE)]
            elif not (self._only_first and self.calls):
                self.calls.append(call)
            self._held = self._held[end + len(CLOSE) :]
        certain = len(self._held) - _possible_tag_length(self._held)
        plain += self._held[:certain]
        self._held = self._held[certain:]
        return plain

    def finish(self) -> str:
        """Returns the rest of the plain text; the choice is complete."""
        rest, self._held = self._held, ""
        return "" if self.calls and not rest.strip() else rest


def _parse_call(text: str) -> ToolCall | None:
    try:
        parsed = msgspec.json.decode(text.strip().encode(), type=_CallJson)
        raw = bytes(parsed.arguments)
        arguments = msgspec.json.decode(raw) if raw.startswith(b'"') else raw.decode()
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return ToolCall(f"chatcmpl-tool-{uuid.uuid4().hex}", parsed.name, arguments)


def _possible_tag_length(text: str) -> int:
    """Returns the length of the longest suffix that may become OPEN, including white space before it."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            return len(text) - len(text[:-length].rstrip())
    return len(text) - len(text.rstrip())

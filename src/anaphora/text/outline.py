"""Maps each part of a rendered prompt back to the message or tool that it comes from.

A template is rendered with placeholders instead of texts, and the result is split at the placeholders. So the source of
each part is known exactly, and conversations of the same structure need only one rendering:

    messages   [user "Hi"]              placeholders   [user "<0>"]
    rendering  "<|user|><0><|end|>"     outline        (NOBODY, "<|user|>") (0, None) (NOBODY, "<|end|>")

A text is not replaced if templates are known to look into it (thinking tags, outer spaces). The first renderings, and
later ones more and more rarely, are compared with the rendering of the texts themselves; if they differ, placeholders
are no longer used for the template, and texts are searched in the rendering instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from anaphora.errors import InvalidRequest
from anaphora.text.chat_template import ChatTemplate, Message

NOBODY = -1
"""The owner of text that the template itself writes."""
TOOLS = -1
"""The message index of tools."""
ALWAYS_COMPARED = 12
"""Outlines that are compared with a full rendering; after these, only number 16, 32, 64 and so on."""
CACHED_OUTLINES = 4096
CACHED_CHARACTERS = 2**24
_MARK = "\ue000{}\ue001"
_MARKED = re.compile("\ue000([0-9]{1,9})\ue001")
_LOOKED_AT = re.compile(r"</?think|</?tool_|/no_think|\[/?INST|<\|")
"""Strings in texts that some templates act on."""

Texts = Callable[[], Sequence[tuple[str, str]]]
"""Returns (kind, text) of all texts of a request: of the tools, then of the messages in the order of ``texts_of``."""


class PromptOutline:
    """A prompt in ``parts``: (index of the source text or NOBODY, the rendered text; None if equal to the source)."""

    __slots__ = ("__weakref__", "parts")

    def __init__(self, parts: Iterable[tuple[int, str | None]]) -> None:
        self.parts = tuple(parts)


@dataclass(frozen=True, slots=True)
class PromptPosition:
    """A character in a message's texts (joined by line breaks), or in the tools' texts (TOOLS, "tools").

    In text of the template, ``message`` is NOBODY, ``role`` is "" and ``character`` counts from the part's start.
    """

    message: int
    role: str
    character: int


@dataclass(frozen=True, slots=True)
class TextOwner:
    """The message that a text belongs to, and the text's offset in characters within the message's texts."""

    message: int
    role: str
    offset: int


def position_at(parts: Iterable[tuple[int, int]], owners: Sequence[TextOwner], at: int) -> PromptPosition | None:
    """Returns the position of character ``at`` of a prompt whose ``parts`` are (owner, length); None after its end."""
    done = 0
    for number, length in parts:
        if at < done + length:
            if number == NOBODY:
                return PromptPosition(NOBODY, "", at - done)
            owner = owners[number]
            return PromptPosition(owner.message, owner.role, owner.offset + at - done)
        done += length
    return None


def tool_text(tool: Any) -> str:
    """Returns a tool definition as JSON text."""
    return json.dumps(tool, ensure_ascii=False)


def texts_of(message: Message) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, JSON path in the message, text) of every text of a message.

    ``kind`` is ``reasoning``, ``content``, ``name`` or ``arguments``.
    """
    if isinstance(reasoning := message.get("reasoning_content"), str):
        yield "reasoning", ".reasoning_content", reasoning
    content = message.get("content")
    if isinstance(content, str):
        yield "content", ".content", content
    elif isinstance(content, list):
        for index, part in enumerate(content):
            yield "content", f".content[{index}].text", _part_text(part)
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        yield "name", f".tool_calls[{index}].function.name", function["name"]
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield "arguments", f".tool_calls[{index}].function.arguments", text


def _part_text(part: Any) -> str:
    return part if isinstance(part, str) else str(part.get("text") or part.get("refusal") or "")


class OutlineBuilder:
    """Builds and caches the outlines of prompts of one template. Safe to use from several threads."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._marks = True
        self._marks_calls, self._shows_ids = _probe(template)
        self._keeps_spaces = _keeps_spaces(template)
        self._misses = 0
        self._known: dict[bytes, PromptOutline] = {}
        self._characters = 0

    def outline_of(
        self, messages: list[Message], tools: list[Any], kwargs: dict[str, Any], texts: Texts, **options: Any
    ) -> PromptOutline:
        """Returns the outline of a prompt. ``options`` are those of ChatTemplate.render.

        Raises InvalidRequest if the template refuses the messages.
        """

        def render(messages: list[Message]) -> str:
            return self._template.render(messages, tools=tools, kwargs=kwargs, **options)

        if self._marks:
            marked = self._marked(messages, len(tools))
            key = _key(marked, tools, kwargs, options)
            if (known := self._known.get(key)) is not None:
                return known
            outline = split_rendering(render(marked), texts(), marked=True)
            if self._is_true(outline, lambda: render(messages), texts):
                return self._keep(key, outline)
            self._marks = False
            self._known.clear()
        return split_rendering(render(messages), texts())

    def _keep(self, key: bytes, outline: PromptOutline) -> PromptOutline:
        characters = sum(len(own) for _, own in outline.parts if own is not None)
        if len(self._known) >= CACHED_OUTLINES or self._characters + characters > CACHED_CHARACTERS:
            self._known.clear()
            self._characters = 0
        self._known[key] = outline
        self._characters += characters
        return outline

    def _is_true(self, outline: PromptOutline, rendered: Callable[[], str], texts: Texts) -> bool:
        """Whether the outline gives the true rendering. After the first few, most outlines are trusted unchecked."""
        self._misses += 1
        if self._misses > ALWAYS_COMPARED and self._misses & (self._misses - 1):
            return True
        known = texts()
        return "".join(known[owner][1] if own is None else own for owner, own in outline.parts) == rendered()

    def _marked(self, messages: list[Message], first: int) -> list[Message]:
        """Returns the messages with placeholders for the texts that the template copies unchanged.

        Placeholders are numbered from ``first`` in the order of ``texts_of``.
        """
        number = first
        ready = []
        for message in messages:
            changed = dict(message)
            number += isinstance(message.get("reasoning_content"), str)
            content = message.get("content")
            if isinstance(content, str):
                changed["content"] = self._mark(content, number)
                number += 1
            elif isinstance(content, list):
                parts = enumerate(content, number)
                changed["content"] = [{"type": "text", "text": self._mark(_part_text(part), n)} for n, part in parts]
                number += len(content)
            if calls := message.get("tool_calls"):
                changed["tool_calls"] = [self._marked_call(call, number + 2 * i) for i, call in enumerate(calls)]
                number += 2 * len(calls)
            if not self._shows_ids:
                changed.pop("tool_call_id", None)
            ready.append(changed)
        return ready

    def _marked_call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        function = call["function"]
        if self._marks_calls and isinstance(function.get("arguments"), str) and function["arguments"]:
            function = {**function, "name": _MARK.format(number), "arguments": _MARK.format(number + 1)}
        return {"type": "function", "function": function} | ({"id": call.get("id")} if self._shows_ids else {})

    def _mark(self, text: str, number: int) -> str:
        outer_space = not self._keeps_spaces and text[:1].isspace() | text[-1:].isspace()
        return text if not text or outer_space or _LOOKED_AT.search(text) else _MARK.format(number)


def _key(*values: Any) -> bytes:
    return blake2b(json.dumps(values).encode(), digest_size=16).digest()


def split_rendering(text: str, texts: Sequence[tuple[str, str]], *, marked: bool = False) -> PromptOutline:
    """Splits a rendering at the ``texts`` (kind, text) that occur in it and, if ``marked``, at placeholders."""
    found: list[tuple[int, int, int, bool]] = []
    marks: dict[int, int] = {}
    for match in _MARKED.finditer(text) if marked else ():
        if int(match[1]) >= len(texts):
            continue  # the request itself contains these characters
        marks.setdefault(int(match[1]), match.end())
        found.append((match.start(), match.end(), int(match[1]), True))
    cursor = 0
    for number, (kind, own) in enumerate(texts):
        if number in marks:
            cursor = max(cursor, marks[number])
            continue
        for needle in _shown(kind, own):
            at = text.find(needle, cursor)
            if at < 0 and len(needle) > 24:
                at = text.find(needle)
            if at >= 0:
                found.append((at, at + len(needle), number, False))
                cursor = max(cursor, at + len(needle))
                break
    return PromptOutline(_cut(text, sorted(found)))


def _cut(text: str, found: list[tuple[int, int, int, bool]]) -> Iterator[tuple[int, str | None]]:
    done = 0
    for start, end, index, marked in found:
        if start < done:
            continue
        if start > done:
            yield NOBODY, text[done:start]
        yield index, None if marked else text[start:end]
        done = end
    if done < len(text):
        yield NOBODY, text[done:]


def _shown(kind: str, text: str) -> Iterator[str]:
    """Yields the forms in which a text may occur in the prompt, the likeliest first."""
    if kind == "tool":
        yield text
        tool = json.loads(text)
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict):
            yield json.dumps(function, ensure_ascii=False)
            if isinstance(function.get("name"), str) and function["name"]:
                yield function["name"]
    elif text.strip():
        yield text
        yield text.strip()
        if kind == "arguments":
            try:
                yield json.dumps(json.loads(text), ensure_ascii=False)
            except ValueError:
                return


def _probe(template: ChatTemplate) -> tuple[bool, bool]:
    """Whether names and arguments of tool calls may be placeholders, and whether call ids occur in the prompt."""
    name, mark, called = _MARK.format(0), _MARK.format(1), "probe1234"
    call = {"id": called, "type": "function", "function": {"name": name, "arguments": mark}}
    messages: list[Message] = [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": called, "content": "probe"},
    ]
    try:
        text = template.render(messages)
        return name in text and mark in text, called in text
    except InvalidRequest:
        pass
    call["function"] = {"name": "probe", "arguments": "{}"}
    try:
        return False, called in template.render(messages)
    except InvalidRequest:
        return False, True


def _keeps_spaces(template: ChatTemplate) -> bool:
    """Whether the template keeps spaces and line breaks around a text, in every role."""
    texts = [f"\n {role} \n" for role in ("system", "user", "assistant", "user")]
    messages = [{"role": text.strip(), "content": text} for text in texts]
    try:
        rendered = template.render(messages)
    except InvalidRequest:
        return False
    return all(text in rendered for text in texts)

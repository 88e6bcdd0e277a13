"""Requests to prompts through the chat template, with a map from the prompt back to the body.

A template is rendered with marks in the place of the texts; the result is cut at the marks. So it is known exactly
which part of the prompt is whose, and conversations of the same structure need one rendering only. A text stays itself
where templates are known to look into texts (thinking, outer spaces); and the first renderings of a log, and ever
rarer ones after them, are compared with what the template makes of the texts themselves: if they differ, no marks are
used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from anaphora.errors import InvalidRequest
from anaphora.text.chat import ChatTemplate
from anaphora.tools.doctor.bodies import Logged
from anaphora.tools.doctor.prompts import NOBODY, TOOLS, Prompt, Run, Segment
from anaphora.tools.doctor.store import Store

ALWAYS_COMPARED = 12
CACHED_SKELETONS = 4096
_MARK = "\ue000{}\ue001"
_MARKED = re.compile("\ue000(\\d+)\ue001")
_LOOKED_AT = re.compile(r"</?think|</?tool_|/no_think|\[/?INST|<\|")
"""What templates look for in texts."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

Skeleton = list[tuple[int, int]]
"""(segment or NOBODY, number of its text as rendered; OWN: the segment's own text)."""
OWN = -1


class Renderer:
    """Renders the requests of one log, numbering them from 0."""

    def __init__(self, template: ChatTemplate, store: Store) -> None:
        self.template = template
        self._store = store
        self._marks = True
        self._marks_calls, self._shows_ids = _probe(template)
        self._keeps_spaces = _keeps_spaces(template)
        self._compared = 0
        self._misses = 0
        self._skeletons: dict[bytes, Skeleton] = {}
        self._message_ids: dict[tuple[str, tuple[int, ...]], int] = {}
        self._number = 0
        self._last_tools: tuple[bytes, list[Segment]] = b"", []
        self.dropped_tools = 0

    def plain(self, logged: Logged) -> str:
        """The whole prompt as one text."""
        if logged.prompt is not None:
            return logged.prompt
        messages = [_known_role(message) for message in logged.messages] or [{"role": "user", "content": ""}]
        return self.template.render(messages, tools=logged.tools, kwargs=logged.kwargs)

    def render(self, logged: Logged) -> Prompt:
        """Raises InvalidRequest where the template refuses the messages."""
        segments = list(self._segments(logged))
        if logged.prompt is not None:
            runs: list[Run] = [(0, segments[0].text)]
        else:
            runs = self._runs(logged, segments)
        if logged.tools and self.template.drops_tools:
            self.dropped_tools += 1
        prompt = Prompt(
            number=self._number,
            line=logged.line,
            model=logged.model,
            time=logged.time,
            session=logged.session,
            salt=logged.salt,
            segments=segments,
            runs=runs,
            pieces=self._store.join(text for _, text in runs),
            roles=[str(message["role"]) for message in logged.messages],
            message_ids=self._ids(len(logged.messages), segments, logged),
            tool_texts=tuple(segment.text for segment in segments if segment.message == TOOLS),
            usage=logged.usage,
            prefill_s=logged.prefill_s,
        )
        self._number += 1
        return prompt

    def _ids(self, count: int, segments: list[Segment], logged: Logged) -> list[int]:
        texts: list[list[int]] = [[] for _ in range(count)]
        for segment in segments:
            if segment.kind not in ("tool", "prompt"):
                texts[segment.message].append(segment.text)
        keys = [(str(message["role"]), tuple(texts[i])) for i, message in enumerate(logged.messages)]
        return [self._message_ids.setdefault(key, len(self._message_ids)) for key in keys]

    # --- segments ------------------------------------------------------------------------------------------------

    def _segments(self, logged: Logged) -> Iterator[Segment]:
        intern = self._store.intern
        if logged.prompt is not None:
            yield Segment(0, "prompt", "prompt", "prompt", intern(logged.prompt))
            return
        yield from self._tool_segments(logged.tools)
        for index, (message, origin) in enumerate(zip(logged.messages, logged.origins, strict=True)):
            offset = 0
            for kind, path, text in _texts(message):
                yield Segment(index, str(message["role"]), kind, _path(origin, path), intern(text), offset)
                offset += len(text) + 1

    def _tool_segments(self, tools: list[Any]) -> list[Segment]:
        key = msgspec.json.encode(tools)
        if key == self._last_tools[0]:
            return self._last_tools[1]
        ready, offset = [], 0
        for index, tool in enumerate(tools):
            text = json.dumps(tool, ensure_ascii=False)
            ready.append(Segment(TOOLS, "tools", "tool", f"tools[{index}]", self._store.intern(text), offset))
            offset += len(text) + 1
        self._last_tools = key, ready
        return ready

    # --- runs ----------------------------------------------------------------------------------------------------

    def _runs(self, logged: Logged, segments: list[Segment]) -> list[Run]:
        first = len(logged.tools)
        messages = [_known_role(message) for message in logged.messages] or [{"role": "user", "content": ""}]
        marked = self._marked(messages, first) if self._marks else messages
        key = blake2b(msgspec.json.encode([marked, logged.tools, logged.kwargs]), digest_size=16).digest()
        skeleton = self._skeletons.get(key)
        if skeleton is None:
            skeleton = self._skeleton(marked, logged, segments)
            if self._marks and not self._same(skeleton, messages, logged, segments):
                self._marks = False
                self._skeletons.clear()
                skeleton = self._skeleton(messages, logged, segments)
            if len(self._skeletons) >= CACHED_SKELETONS:
                self._skeletons.clear()
            self._skeletons[key] = skeleton
        return [(owner, segments[owner].text if text == OWN else text) for owner, text in skeleton]

    def _marked(self, messages: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
        """The messages with marks for the texts that the template passes on as they are; the rest is left.

        Marks count the segments as ``_texts`` yields them, from ``first`` on.
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
                changed["content"] = [{"type": "text", "text": self._mark(part["text"], n)} for n, part in parts]
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

    def _same(
        self, skeleton: Skeleton, messages: list[dict[str, Any]], logged: Logged, segments: list[Segment]
    ) -> bool:
        """Whether the marks made no difference; true unasked for most of those after the first few."""
        self._misses += 1
        if self._misses > ALWAYS_COMPARED and self._misses & (self._misses - 1):
            return True
        texts = (segments[owner].text if text == OWN else text for owner, text in skeleton)
        filled = "".join(map(self._store.text, texts))
        return filled == self.template.render(messages, tools=logged.tools, kwargs=logged.kwargs)

    def _skeleton(self, messages: list[dict[str, Any]], logged: Logged, segments: list[Segment]) -> Skeleton:
        text = self.template.render(messages, tools=logged.tools, kwargs=logged.kwargs)
        found: list[tuple[int, int, int, bool]] = []
        marks: dict[int, int] = {}
        for match in _MARKED.finditer(text):
            if int(match[1]) >= len(segments):
                continue  # a body with these characters in it
            marks.setdefault(int(match[1]), match.end())
            found.append((match.start(), match.end(), int(match[1]), True))
        cursor = 0
        for index, segment in enumerate(segments):
            if index in marks:
                cursor = max(cursor, marks[index])
                continue
            for needle in _shown(segment, self._store.text(segment.text), logged.tools):
                at = text.find(needle, cursor)
                if at < 0 and len(needle) > 24:
                    at = text.find(needle)
                if at >= 0:
                    found.append((at, at + len(needle), index, False))
                    cursor = max(cursor, at + len(needle))
                    break
        intern = self._store.intern
        return [(owner, OWN if part is None else intern(part)) for owner, part in _cut(text, sorted(found))]


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


def _shown(segment: Segment, text: str, tools: list[Any]) -> Iterator[str]:
    """How a segment may stand in the prompt, the likeliest first."""
    if segment.kind == "tool":
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
        if segment.kind == "arguments":
            try:
                yield json.dumps(json.loads(text), ensure_ascii=False)
            except ValueError:
                return


def _path(origin: str, path: str) -> str:
    """A system text beside the messages is its own content."""
    return f"{origin}{path}" if origin.endswith("]") else f"{origin}{path.removeprefix('.content')}"


def _texts(message: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(kind, JSON path inside the message, text) of every text of a message, in the order of its fields."""
    if isinstance(reasoning := message.get("reasoning_content"), str):
        yield "reasoning", ".reasoning_content", reasoning
    content = message.get("content")
    if isinstance(content, str):
        yield "content", ".content", content
    elif isinstance(content, list):
        for index, part in enumerate(content):
            yield "content", f".content[{index}].text", part["text"]
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        yield "name", f".tool_calls[{index}].function.name", function["name"]
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield "arguments", f".tool_calls[{index}].function.arguments", text


def _known_role(message: dict[str, Any]) -> dict[str, Any]:
    return message if message["role"] in _ROLES else {**message, "role": "user"}


def _probe(template: ChatTemplate) -> tuple[bool, bool]:
    """Whether names and arguments of tool calls may be marks, and whether the ids of calls show in the prompt."""
    name, mark, called = _MARK.format(0), _MARK.format(1), "probe1234"
    call = {"id": called, "type": "function", "function": {"name": name, "arguments": mark}}
    messages: list[dict[str, Any]] = [
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
    """Whether spaces and line breaks around a text come through, in every role."""
    texts = [f"\n {role} \n" for role in ("system", "user", "assistant", "user")]
    messages = [{"role": text.strip(), "content": text} for text in texts]
    try:
        rendered = template.render(messages)
    except InvalidRequest:
        return False
    return all(text in rendered for text in texts)

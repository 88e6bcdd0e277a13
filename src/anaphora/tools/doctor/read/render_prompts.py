"""Renders requests through the chat template and maps each part of the prompt back to the request body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from anaphora.text.chat_template import ChatTemplate
from anaphora.text.outline import NOBODY, TOOLS, OutlineBuilder, PromptOutline, texts_of, tool_text
from anaphora.tools.doctor.read.prompts import TEMPLATE, Prompt, Run, Segment
from anaphora.tools.doctor.read.token_store import TokenStore
from anaphora.tools.shared.request_log.bodies import LoggedRequest

MIN_VARIABLE_LENGTH = 4
"""Characters; shorter values of ``chat_template_kwargs`` occur in templates by chance."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class Renderer:
    """Renders the requests of one log and numbers them from 0.

    ``dropped_tools`` counts the requests whose tools the template leaves out.
    """

    def __init__(self, template: ChatTemplate, store: TokenStore) -> None:
        self.template = template
        self._store = store
        self._outlines = OutlineBuilder(template)
        self._interned: WeakKeyDictionary[PromptOutline, list[tuple[int, int | None]]] = WeakKeyDictionary()
        self._message_ids: dict[tuple[str, tuple[int, ...]], int] = {}
        self._number = 0
        self._last_tools: tuple[bytes, list[Segment]] = b"", []
        self.dropped_tools = 0

    def text(self, logged: LoggedRequest) -> str:
        """Returns the whole prompt as one text. Raises InvalidRequest if the template refuses the messages."""
        if logged.prompt is not None:
            return logged.prompt
        messages = [_known_role(message) for message in logged.messages] or [{"role": "user", "content": ""}]
        return self.template.render(messages, tools=logged.tools, kwargs=logged.kwargs)

    def render(self, logged: LoggedRequest) -> Prompt:
        """Returns the prompt with its segments, runs and tokens. Raises InvalidRequest as ``text`` does."""
        segments = list(self._segments(logged))
        if logged.prompt is not None:
            runs: list[Run] = [(0, segments[0].text)]
        else:
            runs = self._with_variables(logged, segments, self._runs(logged, segments))
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
            message_ids=self._ids_of_messages(segments, logged),
            tool_texts=tuple(segment.text for segment in segments if segment.message == TOOLS),
            route=logged.route,
            usage=logged.usage,
            prefill_s=logged.prefill_s,
            answer=None if logged.answer is None else self._store.intern_answer(logged.answer),
        )
        self._number += 1
        return prompt

    def _ids_of_messages(self, segments: list[Segment], logged: LoggedRequest) -> list[int]:
        texts: list[list[int]] = [[] for _ in logged.messages]
        for segment in segments:
            if segment.kind not in ("tool", "prompt", "variable"):
                texts[segment.message].append(segment.text)
        keys = [(str(message["role"]), tuple(texts[i])) for i, message in enumerate(logged.messages)]
        return [self._message_ids.setdefault(key, len(self._message_ids)) for key in keys]

    # --- segments ------------------------------------------------------------------------------------------------

    def _segments(self, logged: LoggedRequest) -> Iterator[Segment]:
        intern = self._store.intern
        if logged.prompt is not None:
            yield Segment(0, "prompt", "prompt", "prompt", intern(logged.prompt))
            return
        yield from self._tool_segments(logged.tools)
        for index, (message, origin) in enumerate(zip(logged.messages, logged.origins, strict=True)):
            offset = 0
            for kind, path, text in texts_of(message):
                yield Segment(index, str(message["role"]), kind, _path(origin, path), intern(text), offset)
                offset += len(text) + 1

    def _tool_segments(self, tools: list[Any]) -> list[Segment]:
        encoded = msgspec.json.encode(tools)
        if encoded == self._last_tools[0]:
            return self._last_tools[1]
        segments, offset = [], 0
        for index, tool in enumerate(tools):
            text = tool_text(tool)
            segments.append(Segment(TOOLS, "tools", "tool", f"tools[{index}]", self._store.intern(text), offset))
            offset += len(text) + 1
        self._last_tools = encoded, segments
        return segments

    # --- runs ----------------------------------------------------------------------------------------------------

    def _runs(self, logged: LoggedRequest, segments: list[Segment]) -> list[Run]:
        messages = [_known_role(message) for message in logged.messages] or [{"role": "user", "content": ""}]

        def texts() -> list[tuple[str, str]]:
            return [(segment.kind, self._store.text(segment.text)) for segment in segments]

        outline = self._outlines.outline_of(messages, logged.tools, logged.kwargs, texts)
        if (parts := self._interned.get(outline)) is None:
            intern = self._store.intern
            parts = [(owner, None if own is None else intern(own)) for owner, own in outline.parts]
            self._interned[outline] = parts
        return [(owner, segments[owner].text if own is None else own) for owner, own in parts]

    def _with_variables(self, logged: LoggedRequest, segments: list[Segment], runs: list[Run]) -> list[Run]:
        """Appends a segment for each run of template text that shows a value of ``chat_template_kwargs``."""
        values = {name: v for name, v in logged.kwargs.items() if isinstance(v, str) and len(v) >= MIN_VARIABLE_LENGTH}
        for index, (owner, text) in enumerate(runs) if values else ():
            shown = self._store.text(text) if owner == NOBODY else ""
            if (name := next((name for name, value in values.items() if value in shown), None)) is not None:
                runs[index] = len(segments), text
                segments.append(Segment(TEMPLATE, "template", "variable", f"chat_template_kwargs.{name}", text))
        return runs


def _path(origin: str, path: str) -> str:
    """Joins the paths of a message and of its text; a system text outside the messages has no ``content``."""
    return f"{origin}{path}" if origin.endswith("]") else f"{origin}{path.removeprefix('.content')}"


def _known_role(message: dict[str, Any]) -> dict[str, Any]:
    return message if message["role"] in _ROLES else {**message, "role": "user"}

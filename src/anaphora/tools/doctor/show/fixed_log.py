"""Writes the log again with the repairs (``--fix``): bodies say the same, in the order that would be reused."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.tools.doctor.find.history_rewriter import HistoryRewriter
from anaphora.tools.doctor.find.span_rewriter import DESTINATIONS, SpanRewriter
from anaphora.tools.doctor.find.tool_rewriter import ToolRewriter
from anaphora.tools.doctor.price.diagnose import Diagnosis
from anaphora.tools.doctor.read.prompts import SYSTEM_ROLES, Prompt
from anaphora.tools.doctor.read.render_prompts import Renderer
from anaphora.tools.shared.request_log.log_files import read_requests

_STEP = re.compile(r"([A-Za-z_]+)|\[(\d+)\]")
_ORIGIN = re.compile(r"(\w+)\[(\d+)\]")
_SAMPLE_LENGTH, _MAX_SAMPLES = 80, 3

Move = tuple[str, str, str]
"""(class, from where, to where)"""


@dataclass(slots=True)
class FixReport:
    """What was written. ``moves`` counts requests, ``samples`` holds some of the texts that moved.

    ``left`` lists what moving texts cannot repair, as (class, JSON path): a tool's description, or missing tools.
    """

    written: int = 0
    changed: int = 0
    moves: Counter[Move] = field(default_factory=Counter)
    samples: dict[Move, list[str]] = field(default_factory=dict)
    templates: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the report as plain values, most frequent moves first."""
        names = ("class", "from", "to")
        moved = [
            {**dict(zip(names, move, strict=True)), "requests": count, "samples": self.samples[move]}
            for move, count in self.moves.most_common()
        ]
        left = [{"class": kind, "place": path} for kind, path in self.left]
        written = {"requests": self.written, "changed": self.changed}
        return {**written, "moved": moved, "left": left, "templates": self.templates}

    def add(self, move: Move, text: str) -> None:
        """Counts a move of ``text`` in one request."""
        self.moves[move] += 1
        shown = re.sub(r"\s+", " ", text).strip()
        shown = shown if len(shown) <= _SAMPLE_LENGTH else shown[: _SAMPLE_LENGTH - 1] + "…"
        samples = self.samples.setdefault(move, [])
        if len(samples) < _MAX_SAMPLES and shown not in samples:
            samples.append(shown)


def write_fixed_log(diagnosis: Diagnosis, source: str, target: str) -> FixReport:
    """Writes the log ``source`` with the accepted repairs to ``target``, and its prompt templates next to it.

    Parts of texts move, tools come in one order, earlier messages are as they were first sent, and old messages are
    dropped many at once. No text changes its words. Raises ConfigError if a file cannot be written.
    """
    if source == "-":
        raise ConfigError("--fix reads the log a second time; give a file instead of standard input")
    if Path(target).exists() and Path(target).samefile(source):
        raise ConfigError(f"--fix would overwrite the log {source}; name another file")
    fixer = _BodyFixer(diagnosis)
    report = fixer.report
    renderer = Renderer(diagnosis.log.model.template, diagnosis.log.store)
    try:
        with open(target, "wb") as out:
            for request in read_requests(source, lambda *_: None):
                try:
                    prompt = renderer.render(request)
                except InvalidRequest:
                    continue
                report.changed += fixer.fix(request.body, prompt, request.origins)
                out.write(msgspec.json.encode(request.outer) + b"\n")
                report.written += 1
        for number, text in enumerate(fixer.spans.prompt_templates(), 1):
            name = f"{target}.template{number if number > 1 else ''}.txt"
            Path(name).write_text(text, encoding="utf-8")
            report.templates.append(name)
    except OSError as error:
        raise ConfigError(f"--fix cannot write {target}: {error.strerror}") from None
    return report


class _BodyFixer:
    """Rewrites request bodies; call ``fix`` in log order."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        mended = [item for item in diagnosis.breaks if item.repair is not None]
        not_rewritten = [item.finding for item in mended if item.repair is not None and not item.repair.rewrites]
        self.report = FixReport(left=[(finding.kind, finding.location.path) for finding in not_rewritten])
        self.spans = next(rewriter for rewriter in diagnosis.rewriters if isinstance(rewriter, SpanRewriter))
        self._tools = next(rewriter for rewriter in diagnosis.rewriters if isinstance(rewriter, ToolRewriter))
        self._history = next(rewriter for rewriter in diagnosis.rewriters if isinstance(rewriter, HistoryRewriter))
        for rewriter in diagnosis.rewriters:
            rewriter.reset()
        self._continued = set(self._history.previous)
        self._sent: dict[int, list[Any]] = {}
        """The history of each continued request as it is sent now."""

    def fix(self, body: dict[str, Any], prompt: Prompt, origins: list[str]) -> bool:
        """Changes one body in place; returns whether it changed.

        ``origins[i]`` is the JSON path of the prompt's message ``i`` in the body.
        """
        appended = self._cut_texts(body, prompt)
        messages = self._fix_messages(body, prompt, origins)
        for destination, text in appended.items():
            self._append(body, prompt, destination, text)
        return any((bool(appended), messages, self._fix_tools(body, prompt)))

    # --- texts ---------------------------------------------------------------------------------------------------

    def _cut_texts(self, body: dict[str, Any], prompt: Prompt) -> dict[str, str]:
        """Cuts what moves out of its texts; returns what is to be appended, by destination.

        For a text that moves within its message, the text to append is empty.
        """
        appended: dict[str, str] = {}
        for segment in prompt.segments:
            if segment.text not in self.spans.regions_of_text or segment.message < 0:
                continue
            rewritten, moved = self.spans.rewritten(segment.text)
            if rewritten == segment.text:
                continue
            _set(body, segment.path, self.spans.store.text(rewritten))
            for kind, part, destination in self.spans.moved_parts(segment.text):
                origin = f"message {segment.message} ({segment.role})"
                self.report.add((kind, origin, DESTINATIONS[destination]), part)
                appended.setdefault(destination, "")
            for destination, text in moved.items():
                appended[destination] = appended.get(destination, "") + text
        return appended

    def _append(self, body: dict[str, Any], prompt: Prompt, destination: str, text: str) -> None:
        if not text:
            return
        if prompt.segments and prompt.segments[0].kind == "prompt":
            path = prompt.segments[0].path
            _set(body, path, f"{_get(body, path)}\n{text}")
            return
        listed = next(
            (body[name] for name in ("messages", "input", "contents") if isinstance(body.get(name), list)), None
        )
        users = [i for i, message in enumerate(listed or ()) if message.get("role") == "user"]
        if listed is None:
            body["input"] = f"{body.get('input') or ''}\n{text}"
        elif destination == "end" or not users:
            listed.append({"role": "user", "content": text.strip("\n")})
        else:
            last = listed[users[-1]]
            key = "content" if "content" in last else "parts"
            content = last.get(key) or ""
            longer = f"{content}\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
            listed[users[-1]] = {**last, key: longer}

    # --- messages ------------------------------------------------------------------------------------------------

    def _fix_messages(self, body: dict[str, Any], prompt: Prompt, origins: list[str]) -> bool:
        """Puts system texts first, drops old messages many at once, or sends messages as they were first sent."""
        history, number = self._history, prompt.number
        found = [match for origin in origins if (match := _ORIGIN.fullmatch(origin))]
        if not history.active or not found:
            return False
        name, indices = found[0][1], [int(match[2]) for match in found]
        outside = len(origins) - len(indices)  # system texts that are not in the list of messages
        messages = list(body[name])
        difference = history.differences.get(number)
        if "moved_system" in history.active:
            kind, destination = "moved_system", "the front"
            system = [message for message in messages if _is_system(message)]
            new = [*system, *(message for message in messages if not _is_system(message))]
        elif "trimmed_history" in history.active and number in history.trim:
            kind, destination = "trimmed_history", "dropped"
            start, count = history.trim[number]
            dropped = set(indices[start - outside : start - outside + count])
            new = [message for i, message in enumerate(messages) if i not in dropped]
        else:
            kind, destination = difference.kind if difference else "", "as first sent"
            new = self._as_first_sent(prompt, messages, indices, outside)
        if new == messages:
            return False
        body[name] = new
        if kind:
            self.report.add((kind, name, destination), "earlier messages")
        return True

    def _as_first_sent(self, prompt: Prompt, messages: list[Any], indices: list[int], outside: int) -> list[Any]:
        first = prompt.num_leading_system() - outside
        start = indices[first] if 0 <= first < len(indices) else len(messages)
        before = self._history.previous[prompt.number]
        last = self._history.last_repeated(prompt)
        new = messages
        if last is not None and before in self._sent:
            end = indices[last - outside] + 1 if last - outside >= 0 else start
            new = [*messages[:start], *self._sent.pop(before), *messages[end:]]
        if prompt.number in self._continued:
            self._sent[prompt.number] = new[start:]
        return new

    # --- tools ---------------------------------------------------------------------------------------------------

    def _fix_tools(self, body: dict[str, Any], prompt: Prompt) -> bool:
        tools, listed = self._tools, body.get("tools")
        if not tools.active or not isinstance(listed, list):
            return False
        new = list(listed)
        if "key_order" in tools.active:
            new = [json.loads(tools.first_form(text)) for text in prompt.tool_texts]
        if tools.active & {"tool_order", "tool_set"}:
            new = [new[i] for i in tools.order(prompt.tool_texts)]
        if json.dumps(new) == json.dumps(listed):
            return False
        body["tools"] = new
        for kind in sorted(tools.active):
            self.report.add((kind, "tools", "one order"), "the tools")
        return True


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in SYSTEM_ROLES


def _set(body: dict[str, Any], path: str, text: str) -> None:
    """Replaces the text at ``path``, such as ``messages[0].content[1].text``."""
    *steps, last = _steps(path)
    container: Any = body
    for step in steps:
        container = container[step]
    container[last] = text


def _get(body: dict[str, Any], path: str) -> Any:
    value: Any = body
    for step in _steps(path):
        value = value[step]
    return value


def _steps(path: str) -> list[Any]:
    return [name or int(index) for name, index in _STEP.findall(path)]

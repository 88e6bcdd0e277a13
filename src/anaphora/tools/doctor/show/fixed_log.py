"""The log written again with the repairs: bodies say the same, in the order that would be reused."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.tools.doctor.find.changed_history import HistoryRewriter
from anaphora.tools.doctor.find.span_rewriter import PLACES, SpanRewriter
from anaphora.tools.doctor.find.tool_definitions import ToolRewriter
from anaphora.tools.doctor.price.diagnose import Diagnosis
from anaphora.tools.doctor.read.prompts import Prompt
from anaphora.tools.doctor.read.render_prompts import Renderer
from anaphora.tools.shared.request_log.log_files import read_requests

_STEP = re.compile(r"([A-Za-z_]+)|\[(\d+)\]")
_ORIGIN = re.compile(r"(\w+)\[(\d+)\]")
_SHOWN, _SAMPLES = 80, 3
_SYSTEM = ("system", "developer")


@dataclass(slots=True)
class Fixed:
    """What was written. ``counts`` has the requests by (class, from where, to where), ``moved`` some of the texts.

    ``left`` has what moving texts cannot mend, as (class, place): a tool's description, or tools that are not there.
    """

    written: int = 0
    changed: int = 0
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    moved: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    templates: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        names = ("class", "from", "to")
        moves = [
            {**dict(zip(names, key, strict=True)), "requests": count, "samples": self.moved[key]}
            for key, count in self.counts.most_common()
        ]
        left = [{"class": kind, "place": place} for kind, place in self.left]
        written = {"requests": self.written, "changed": self.changed}
        return {**written, "moved": moves, "left": left, "templates": self.templates}

    def tell(self, key: tuple[str, str, str], what: str) -> None:
        self.counts[key] += 1
        shown = re.sub(r"\s+", " ", what).strip()
        shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
        samples = self.moved.setdefault(key, [])
        if len(samples) < _SAMPLES and shown not in samples:
            samples.append(shown)


def write(diagnosis: Diagnosis, source: str, target: str) -> Fixed:
    """Write ``source`` with the accepted repairs to ``target``, and its prompts as templates beside it.

    Parts of texts move, tools come in one order, earlier messages are as they were first sent, and old messages are
    dropped many at once; what a text says is not changed. Raises ConfigError.
    """
    if source == "-":
        raise ConfigError("--fix reads the log a second time; give a file instead of standard input")
    if Path(target).exists() and Path(target).samefile(source):
        raise ConfigError(f"--fix would overwrite the log {source}; name another file")
    writer = _Writer(diagnosis)
    renderer = Renderer(diagnosis.log.model.template, diagnosis.log.store)
    try:
        with open(target, "wb") as out:
            for logged in read_requests(source, lambda *_: None):
                try:
                    prompt = renderer.render(logged)
                except InvalidRequest:
                    continue
                writer.fixed.changed += writer.rewrite(logged.body, prompt, logged.origins)
                out.write(msgspec.json.encode(logged.outer) + b"\n")
                writer.fixed.written += 1
        for number, text in enumerate(writer.moves.templates(), 1):
            name = f"{target}.template{number if number > 1 else ''}.txt"
            Path(name).write_text(text, encoding="utf-8")
            writer.fixed.templates.append(name)
    except OSError as error:
        raise ConfigError(f"--fix cannot write {target}: {error.strerror}") from None
    return writer.fixed


class _Writer:
    """Rewrites bodies in log order."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        kept = [item for item in diagnosis.breaks if item.repair is not None and not item.repair.rewrites]
        self.fixed = Fixed(left=[(item.finding.kind, item.finding.path) for item in kept])
        self.moves = next(stage for stage in diagnosis.rewriters if isinstance(stage, SpanRewriter))
        self._tools = next(stage for stage in diagnosis.rewriters if isinstance(stage, ToolRewriter))
        self._history = next(stage for stage in diagnosis.rewriters if isinstance(stage, HistoryRewriter))
        for stage in diagnosis.rewriters:
            stage.reset()
        self._sent: dict[int, list[Any]] = {}
        self._continued = set(self._history.previous)
        """Messages behind the system text as they are sent now, of the requests that others continue."""

    def rewrite(self, body: dict[str, Any], prompt: Prompt, origins: list[str]) -> bool:
        """Change one body in place; whether it changed."""
        texts = self._texts(body, prompt)
        messages = self._messages(body, prompt, origins)
        for place, late in texts.items():
            self._append(body, prompt, place, late)
        return any((bool(texts), messages, self._schemas(body, prompt)))

    # --- texts ---------------------------------------------------------------------------------------------------

    def _texts(self, body: dict[str, Any], prompt: Prompt) -> dict[str, str]:
        """Cut what moves out of its texts; what goes behind the messages, by place (empty texts: it stays inside)."""
        late: dict[str, str] = {}
        for segment in prompt.segments:
            if segment.text not in self.moves.of_text or segment.message < 0:
                continue
            mended, behind = self.moves.mended(segment.text)
            if mended == segment.text:
                continue
            _set(body, segment.path, self.moves.store.text(mended))
            for kind, unit, where in self.moves.moved(segment.text):
                self.fixed.tell((kind, f"message {segment.message} ({segment.role})", PLACES[where]), unit)
                late.setdefault(where, "")
            for where, text in behind.items():
                late[where] = late.get(where, "") + text
        return late

    def _append(self, body: dict[str, Any], prompt: Prompt, place: str, late: str) -> None:
        if not late:
            return
        if prompt.segments and prompt.segments[0].kind == "prompt":
            _set(body, prompt.segments[0].path, f"{_get(body, prompt.segments[0].path)}\n{late}")
            return
        listed = next(
            (body[name] for name in ("messages", "input", "contents") if isinstance(body.get(name), list)), None
        )
        users = [i for i, message in enumerate(listed or ()) if message.get("role") == "user"]
        if listed is None:
            body["input"] = f"{body.get('input') or ''}\n{late}"
        elif place == "end" or not users:
            listed.append({"role": "user", "content": late.strip("\n")})
        else:
            last = listed[users[-1]]
            key = "content" if "content" in last else "parts"
            content = last.get(key) or ""
            more = f"{content}\n{late}" if isinstance(content, str) else [*content, {"type": "text", "text": late}]
            listed[users[-1]] = {**last, key: more}

    # --- messages ------------------------------------------------------------------------------------------------

    def _messages(self, body: dict[str, Any], prompt: Prompt, origins: list[str]) -> bool:
        """Send earlier messages as they were sent first; drop old ones many at once; put system texts first."""
        history, number = self._history, prompt.number
        found = [match for origin in origins if (match := _ORIGIN.fullmatch(origin))]
        if not history.active or not found:
            return False
        name, at = found[0][1], [int(match[2]) for match in found]
        offset = len(origins) - len(at)
        raw = list(body[name])
        kinds = "moved_system" in history.active, "trimmed_history" in history.active and number in history.window
        if kinds[0]:
            first = [m for m in raw if isinstance(m, dict) and m.get("role") in _SYSTEM]
            new = first + [m for m in raw if not (isinstance(m, dict) and m.get("role") in _SYSTEM)]
        elif kinds[1]:
            start, count = history.window[number]
            gone = set(at[start - offset : start - offset + count])
            new = [message for i, message in enumerate(raw) if i not in gone]
        else:
            new = self._as_sent(prompt, raw, at, offset)
        if new == raw:
            return False
        body[name] = new
        difference = history.differences.get(number)
        kind = "moved_system" if kinds[0] else "trimmed_history" if kinds[1] else difference.kind if difference else ""
        if kind:
            told = {"moved_system": "the front", "trimmed_history": "dropped"}.get(kind, "as first sent")
            self.fixed.tell((kind, name, told), "earlier messages")
        return True

    def _as_sent(self, prompt: Prompt, raw: list[Any], at: list[int], offset: int) -> list[Any]:
        head = prompt.head_length() - offset
        start = at[head] if 0 <= head < len(at) else len(raw)
        before = self._history.previous[prompt.number]
        last = self._history.repeated(prompt)
        new = raw
        if last is not None and before in self._sent:
            behind = at[last - offset] + 1 if last - offset >= 0 else start
            new = [*raw[:start], *self._sent.pop(before), *raw[behind:]]
        if prompt.number in self._continued:
            self._sent[prompt.number] = new[start:]
        return new

    # --- tools ---------------------------------------------------------------------------------------------------

    def _schemas(self, body: dict[str, Any], prompt: Prompt) -> bool:
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
            self.fixed.tell((kind, "tools", "one order"), "the tools")
        return True


def _set(body: dict[str, Any], path: str, text: str) -> None:
    """Put a text where ``path`` (``messages[0].content[1].text``) says."""
    *steps, last = _steps(path)
    place: Any = body
    for step in steps:
        place = place[step]
    place[last] = text


def _get(body: dict[str, Any], path: str) -> Any:
    place: Any = body
    for step in _steps(path):
        place = place[step]
    return place


def _steps(path: str) -> list[Any]:
    return [name or int(index) for name, index in _STEP.findall(path)]

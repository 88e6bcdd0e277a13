"""Reads the body of a response as it passes: token usage, time of the first token, finish reason, error."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from anaphora.tools.record.http1 import Head
from anaphora.tools.shared.sse import EventParser

KEPT_BYTES = 32 * 2**20
"""Largest body that is read; a larger one is passed on without being read."""


@dataclass(slots=True)
class ResponseSummary:
    """What a response says. ``usage`` merges all usage objects, later values win; ``timings`` are llama.cpp's."""

    id: str = ""
    model: str = ""
    finish: str = ""
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    def take(self, message: Any) -> None:
        """Reads one JSON document: the whole body, or one event of a stream."""
        if not isinstance(message, dict):
            return
        inner = [value for key in ("message", "response") if isinstance(value := message.get(key), dict)]
        for place in (message, *inner):
            self.id = self.id or _text(place.get("id"))
            self.model = self.model or _text(place.get("model"))
            for key in ("usage", "meta_info"):
                if isinstance(found := place.get(key), dict):
                    self.usage |= {name: value for name, value in found.items() if value is not None}
            self.finish = _text(place.get("stop_reason")) or self.finish
        if isinstance(timings := message.get("timings"), dict):
            self.timings |= timings
        if isinstance(delta := message.get("delta"), dict):
            self.finish = _text(delta.get("stop_reason")) or self.finish
        for choice in _objects(message.get("choices")):
            self.finish = _text(choice.get("finish_reason")) or self.finish
        error = message.get("error") or (message if message.get("object") == "error" else message.get("detail"))
        if error:
            message = error.get("message") if isinstance(error, dict) else error
            self.error = str(message or error)[:300]


def has_token(event: Any) -> bool:
    """Returns whether a stream's event carries content, in any of the known APIs."""
    if not isinstance(event, dict):
        return False
    kind = event.get("type")
    if isinstance(kind, str):
        return kind == "content_block_delta" or (kind.startswith("response.") and kind.endswith(".delta"))
    if event.get("content") or event.get("text"):
        return True
    for choice in _objects(event.get("choices")):
        delta = choice.get("delta")
        named = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
        if choice.get("text") or (isinstance(delta, dict) and any(delta.get(name) for name in named)):
            return True
    return False


class ResponseReader:
    """Reads the body of one response: events as they come, any other body in ``finish``."""

    def __init__(self, head: Head) -> None:
        self.summary = ResponseSummary()
        self.first_token: float | None = None
        kind = head.get(b"content-type").lower()
        self.streamed = kind.startswith(b"text/event-stream")
        self._json = b"json" in kind
        encoding = head.get(b"content-encoding").lower()
        self.readable = encoding in (b"", b"identity", b"gzip", b"deflate")
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32) if encoding in (b"gzip", b"deflate") else None
        self._events = EventParser()
        self._kept = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the body, as the server sent them."""
        if not (self.readable and (self.streamed or self._json)):
            return
        try:
            data = self._inflate.decompress(data, KEPT_BYTES) if self._inflate else data
        except zlib.error:
            self._give_up()
            return
        if self.streamed:
            for event in self._events.feed(data):
                self._take_event(event)
        else:
            self._kept += data
        if self.size > KEPT_BYTES:
            self._give_up()

    @property
    def size(self) -> int:
        """Bytes of the body held in memory."""
        return len(self._kept) + self._events.held_bytes

    def finish(self) -> ResponseSummary:
        """Reads what is left of the body, which may take long, and returns the summary."""
        for event in self._events.close():
            self._take_event(event)
        if self._kept:
            self._take(bytes(self._kept))
        return self.summary

    def _take_event(self, data: bytes) -> None:
        event = self._take(data)
        if self.first_token is None and has_token(event):
            self.first_token = time.monotonic()

    def _take(self, data: bytes) -> Any:
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        self.summary.take(value)
        return value

    def _give_up(self) -> None:
        self.readable = False
        self._events = EventParser()
        self._kept.clear()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []

"""One request and its answer on their way past, and the record that comes of them."""

from __future__ import annotations

import time
import uuid
import zlib
from typing import Any

import msgspec

from anaphora.observe.record import RequestRecord, salt_digest
from anaphora.tools.record.answer_stream import KEPT_BYTES, Answer
from anaphora.tools.record.http1 import Head
from anaphora.tools.shared.usage import usage_of

ROUTES = ("/completions", "/completion", "/messages", "/responses", "/generate", "/invocations")
"""Ends of the paths whose POST requests are recorded: the ways to ask for text of the known servers."""


def is_recorded(head: Head) -> bool:
    return head.method == b"POST" and _path(head).endswith(ROUTES)


def _path(head: Head) -> str:
    return head.target.split(b"?", 1)[0].decode("ascii", "replace").rstrip("/")


class Exchange:
    """Gathers what passes. ``complete`` makes the record of it; it takes long and belongs into another thread."""

    def __init__(self, head: Head, keep_prompts: bool) -> None:
        self.method = head.method
        self.ended = False
        self._keep_prompts = keep_prompts
        self._route = _path(head)
        self._encoding = head.get(b"content-encoding").lower()
        self._time, self._began = time.time(), time.monotonic()
        self._end = self._began
        self._body: bytearray | None = bytearray()
        self._status = 0
        self._answer: Answer | None = None
        self._finish = self._error = ""

    def asked(self, data: bytes) -> None:
        """A part of the request's body."""
        if self._body is not None:
            self._body += data
            if len(self._body) > KEPT_BYTES:
                self._body = None

    def answered(self, head: Head) -> None:
        self._status = head.status
        self._answer = Answer(head)

    def answer(self, data: bytes) -> None:
        """A part of the answer's body."""
        if self._answer is not None:
            self._answer.feed(data)

    def end(self, finish: str = "", error: str = "", status: int = 0) -> None:
        """The answer is over. Where it was none, ``finish`` and ``error`` say how, ``status`` what was sent instead."""
        self.ended = True
        self._end = time.monotonic()
        self._finish, self._error, self._status = finish, error, status or self._status

    @property
    def size(self) -> int:
        """Bytes kept until the record is made."""
        return len(self._body or b"") + (self._answer.size if self._answer else 0)

    def record(self) -> RequestRecord:
        """What is known at once."""
        first = self._answer.first_token if self._answer else None
        return RequestRecord(
            time=self._time,
            id=uuid.uuid4().hex,
            model="",
            route=self._route,
            ttft_s=None if first is None else first - self._began,
            total_s=self._end - self._began,
            status=self._status,
        )

    def complete(self, record: RequestRecord) -> None:
        """Fill in what the bodies say."""
        self._from_request(record)
        if self._answer is not None:
            self._from_answer(record, self._answer)
        record.finish = self._finish or record.finish
        record.error = self._error or record.error
        if record.status >= 400 or record.error:
            record.finish = record.finish or "error"

    def _from_request(self, record: RequestRecord) -> None:
        body = self._decoded()
        if body is None:
            return
        record.model = _text(body.get("model"))
        record.stream = body.get("stream") is True
        record.n = n if type(n := body.get("n")) is int and n > 0 else 1
        record.salt = salt_digest(_text(body.get("cache_salt")) or None)
        if self._keep_prompts:
            record.body = {name: value for name, value in body.items() if name != "cache_salt"}

    def _decoded(self) -> dict[str, Any] | None:
        if self._body is None:
            return None
        data = bytes(self._body)
        try:
            if self._encoding in (b"gzip", b"deflate"):
                data = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data, KEPT_BYTES)
            value = msgspec.json.decode(data)
        except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def _from_answer(self, record: RequestRecord, answer: Answer) -> None:
        told = answer.finish()
        record.id = told.id or record.id
        record.model = record.model or told.model
        record.finish, record.error = told.finish, told.error
        usage = usage_of({"usage": told.usage}) if told.usage else None
        if usage is not None:
            record.prompt_tokens, record.cached_tokens, record.output_tokens = usage.prompt, usage.cached, usage.output
        cached, prefill_ms = told.timings.get("cache_n"), told.timings.get("prompt_ms")
        if record.cached_tokens is None and type(cached) is int and cached >= 0:
            record.cached_tokens = cached
        if isinstance(prefill_ms, (int, float)):
            record.prefill_s = prefill_ms / 1000


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""

"""One request and its response as they pass the recorder, and the log record made from them."""

from __future__ import annotations

import time
import uuid
import zlib
from typing import Any

import msgspec

from anaphora.observe.record import RequestRecord, salt_digest
from anaphora.tools.record.http1 import Head
from anaphora.tools.record.response_reader import KEPT_BYTES, ResponseReader
from anaphora.tools.shared.usage import usage_of

ROUTES = ("/completions", "/completion", "/messages", "/responses", "/generate", "/invocations")
"""Ends of the paths whose POST requests are recorded: the text generation routes of the known servers."""


def is_recorded(head: Head) -> bool:
    """Returns whether a request with this head gets a record."""
    return head.method == b"POST" and _path(head).endswith(ROUTES)


def _path(head: Head) -> str:
    return head.target.split(b"?", 1)[0].decode("ascii", "replace").rstrip("/")


class Exchange:
    """Collects the bodies of one request and its response.

    Call ``record`` when the response has ended, then ``complete`` in another thread: it parses the bodies.
    """

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
        self._response: ResponseReader | None = None
        self._finish = self._error = ""

    def request_body(self, data: bytes) -> None:
        """Takes a part of the request's body."""
        if self._body is not None:
            self._body += data
            if len(self._body) > KEPT_BYTES:
                self._body = None

    def response_head(self, head: Head) -> None:
        """Takes the head of the response."""
        self._status = head.status
        self._response = ResponseReader(head)

    def response_body(self, data: bytes) -> None:
        """Takes a part of the response's body."""
        if self._response is not None:
            self._response.feed(data)

    def end(self, finish: str = "", error: str = "", status: int = 0) -> None:
        """Notes that the response has ended.

        For a response that is incomplete or missing, ``finish`` and ``error`` say why, and ``status`` is the status
        that the recorder sent itself (0: none).
        """
        self.ended = True
        self._end = time.monotonic()
        self._finish, self._error, self._status = finish, error, status or self._status

    @property
    def size(self) -> int:
        """Bytes held in memory until the record is complete."""
        return len(self._body or b"") + (self._response.size if self._response else 0)

    def record(self) -> RequestRecord:
        """Returns the record with everything that needs no parsing."""
        first = self._response.first_token if self._response else None
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
        """Fills in the fields that come from the two bodies."""
        self._from_request(record)
        if self._response is not None:
            self._from_response(record, self._response)
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

    def _from_response(self, record: RequestRecord, response: ResponseReader) -> None:
        summary = response.finish()
        record.id = summary.id or record.id
        record.model = record.model or summary.model
        record.finish, record.error = summary.finish, summary.error
        usage = usage_of({"usage": summary.usage}) if summary.usage else None
        if usage is not None:
            record.prompt_tokens, record.cached_tokens, record.output_tokens = usage.prompt, usage.cached, usage.output
        cached, prefill_ms = summary.timings.get("cache_n"), summary.timings.get("prompt_ms")
        if record.cached_tokens is None and type(cached) is int and cached >= 0:
            record.cached_tokens = cached
        if isinstance(prefill_ms, (int, float)):
            record.prefill_s = prefill_ms / 1000


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""

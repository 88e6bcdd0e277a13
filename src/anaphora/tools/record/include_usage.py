"""``--ask-usage``: adds ``stream_options.include_usage`` to streamed requests without ``stream_options``."""

from __future__ import annotations

import re

import msgspec

from anaphora.tools.record.http1 import Kind, Piece
from anaphora.tools.record.response_reader import KEPT_BYTES

_INCLUDE_USAGE = b'"stream_options":{"include_usage":true},'
_LENGTH = re.compile(rb"(?im)^(content-length:[ \t]*)\d+")
_OPENAI = (b"/chat/completions", b"/completions")


class UsageInserter:
    """Holds a request until it is complete, then inserts the field in front of the others.

    All other bytes stay as they are. Not changed at all are requests of other APIs, chunked, compressed or very large
    ones, and those of clients that wait for permission to send (Expect).
    """

    def __init__(self) -> None:
        self._head: bytes | None = None
        self._body = bytearray()

    def rewrite(self, piece: Piece, raw: bytes, recorded: bool) -> bytes:
        """Returns the bytes to send now for a piece of a request; ``raw`` are its bytes without a change.

        ``recorded``: whether the request is one that gets a record.
        """
        head = piece.head
        if head is not None:
            eligible = recorded and head.target.split(b"?", 1)[0].endswith(_OPENAI)
            barred = head.get(b"expect") or head.get(b"content-encoding") or head.get(b"transfer-encoding")
            if eligible and not barred and head.length is not None and head.length <= KEPT_BYTES:
                self._head = raw
                return b""
            return raw
        if self._head is None:
            return raw
        self._body += raw
        if piece.kind is not Kind.END:
            return b""
        whole = self._with_usage(self._head, bytes(self._body))
        self._head = None
        self._body.clear()
        return whole

    def _with_usage(self, head: bytes, body: bytes) -> bytes:
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or fields.get("stream") is not True or "stream_options" in fields:
            return head + body
        at = body.index(b"{") + 1
        changed = body[:at] + _INCLUDE_USAGE + body[at:]
        return _LENGTH.sub(lambda match: match[1] + str(len(changed)).encode(), head, count=1) + changed

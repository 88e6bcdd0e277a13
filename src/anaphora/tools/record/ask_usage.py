"""``--ask-usage``: streamed requests that do not say whether they want usage are made to ask for it."""

from __future__ import annotations

import re

import msgspec

from anaphora.tools.record.answer_stream import KEPT_BYTES
from anaphora.tools.record.http1 import Kind, Piece

_ASK = b'"stream_options":{"include_usage":true},'
_LENGTH = re.compile(rb"(?im)^(content-length:[ \t]*)\d+")
_OPENAI = (b"/chat/completions", b"/completions")


class UsageAsker:
    """Holds a request back until it is whole, and sends it on with the wish put in front of its fields.

    All else in it stays byte for byte. Requests of other APIs, in chunks, packed, very large, or from clients that wait
    for leave to send (Expect) pass as they are.
    """

    def __init__(self) -> None:
        self._head: bytes | None = None
        self._body = bytearray()

    def pass_on(self, piece: Piece, raw: bytes, recorded: bool) -> bytes:
        """The bytes to send now for a piece; ``raw`` are those that would be sent without it."""
        head = piece.head
        if head is not None:
            asks = recorded and head.target.split(b"?", 1)[0].endswith(_OPENAI)
            barred = head.get(b"expect") or head.get(b"content-encoding") or head.get(b"transfer-encoding")
            if asks and not barred and head.length is not None and head.length <= KEPT_BYTES:
                self._head = raw
                return b""
            return raw
        if self._head is None:
            return raw
        self._body += raw
        if piece.kind is not Kind.END:
            return b""
        whole = self._asking(self._head, bytes(self._body))
        self._head = None
        self._body.clear()
        return whole

    def _asking(self, head: bytes, body: bytes) -> bytes:
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or fields.get("stream") is not True or "stream_options" in fields:
            return head + body
        at = body.index(b"{") + 1
        changed = body[:at] + _ASK + body[at:]
        return _LENGTH.sub(lambda match: match[1] + str(len(changed)).encode(), head, count=1) + changed

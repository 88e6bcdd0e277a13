"""Finds HTTP/1 messages in a stream without changing it: the pieces that come out add up to the bytes that went in.

A message that cannot be read ends the reading, not the stream: from there on all bytes are passed on as RAW pieces.

Why not h11: it reads the same messages (``test_http1_against_h11.py`` compares the two), but it returns parsed events
instead of bytes, needs a connection object per message to watch one direction alone, and takes 2 to 3 times as long per
request and per streamed event. It also refuses messages that servers and clients in use send, whose requests would go
unrecorded: ``Transfer-Encoding: chunked`` twice (proxies in a row), ``identity``, an empty line between requests, raw
UTF-8 in a target, LF line ends of chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

MAX_HEAD_BYTES = 256 * 1024
"""A larger head is passed on unread, and so is everything after it on the connection."""
MAX_LINE_BYTES = 64 * 1024

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_FOLD = re.compile(rb"\r?\n[ \t]+")
"""Where the value of a field goes on in the next line (obs-fold in RFC 9112)."""


class Kind(Enum):
    """What a piece of a stream is. END has no bytes; RAW could not be read."""

    HEAD = auto()
    BODY = auto()
    END = auto()
    RAW = auto()


class Framing(Enum):
    """How the end of a body is found. Where a length is known, the functions return the length instead."""

    CHUNKED = auto()
    UNTIL_CLOSE = auto()
    LENGTH = auto()
    INTERIM = auto()  # a 1xx response: another head follows for the same request
    RAW = auto()


@dataclass(frozen=True, slots=True)
class Head:
    """First line and header fields (names in lower case) of a message. ``raw`` are all of its bytes."""

    raw: bytes
    line: bytes
    fields: tuple[tuple[bytes, bytes], ...]

    def get(self, name: bytes) -> bytes:
        """Returns all values of a field, joined by commas; empty if there is none."""
        return b", ".join(value for key, value in self.fields if key == name)

    @property
    def method(self) -> bytes:
        """Method of a request."""
        return self.line.split(b" ", 1)[0]

    @property
    def target(self) -> bytes:
        """Target of a request: path and query, usually."""
        parts = self.line.split(b" ")
        return parts[1] if len(parts) > 1 else b""

    @property
    def status(self) -> int:
        """Status of a response; 0 if it is invalid."""
        parts = self.line.split(b" ")
        return int(parts[1]) if len(parts) > 1 and re.fullmatch(rb"\d{3}", parts[1]) else 0

    @property
    def length(self) -> int | None:
        """Content-Length; None if it is missing or invalid."""
        lengths = {value.strip() for value in self.get(b"content-length").split(b",")} - {b""}
        return int(lengths.pop()) if len(lengths) == 1 and re.fullmatch(rb"\d{1,18}", min(lengths)) else None


@dataclass(frozen=True, slots=True)
class Piece:
    """``raw`` are bytes of the stream; ``body`` is the content among them, without chunk sizes and trailers."""

    kind: Kind
    raw: bytes = b""
    body: bytes = b""
    head: Head | None = None


def request_framing(head: Head) -> Framing | int:
    """Returns how the body of a request ends."""
    if head.get(b"transfer-encoding"):
        return Framing.CHUNKED if b"chunked" in head.get(b"transfer-encoding").lower() else Framing.RAW
    return _length(head, 0)


def response_framing(head: Head, method: bytes) -> Framing | int:
    """Returns how the body of the response to a request with ``method`` ends (RFC 9112, section 6.3)."""
    status = head.status
    if status < 100 or status == 101:
        return Framing.RAW
    if status < 200:
        return Framing.INTERIM
    if method == b"CONNECT" and status < 300:
        return Framing.RAW
    if method == b"HEAD" or status in (204, 304):
        return 0
    if b"chunked" in head.get(b"transfer-encoding").lower():
        return Framing.CHUNKED
    return _length(head, Framing.UNTIL_CLOSE)


def _length(head: Head, otherwise: Framing | int) -> Framing | int:
    if not head.get(b"content-length").strip(b", "):
        return otherwise
    return Framing.RAW if head.length is None else head.length


@dataclass(slots=True)
class Splitter:
    """Splits a stream of messages into pieces. ``framing`` returns for a head how its body ends."""

    framing: Callable[[Head], Framing | int]
    _state: Framing | None = None  # None: a head comes next
    _left: int = 0
    _held: bytes = b""
    _chunks: _Chunks = field(default_factory=lambda: _Chunks())

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Yields the pieces of ``data``. Only heads are held back until they are complete."""
        while data:
            if self._state is None:
                data = self._held + data
                self._held = b""
                head, data = self._head(data)
                if head is None:
                    if self._state is None:
                        self._held, data = data, b""
                    continue
                yield Piece(Kind.HEAD, head.raw, head=head)
                if self._state is Framing.LENGTH and not self._left:
                    yield self._end()
            elif self._state is Framing.RAW:
                yield Piece(Kind.RAW, data)
                return
            elif self._state is Framing.UNTIL_CLOSE:
                yield Piece(Kind.BODY, data, data)
                return
            elif self._state is Framing.CHUNKED:
                taken, body, done = self._chunks.take(data)
                yield Piece(Kind.BODY, data[:taken], body)
                data = data[taken:]
                if self._chunks.broken:
                    self._state = Framing.RAW
                elif done:
                    yield self._end()
            else:
                part, data = data[: self._left], data[self._left :]
                self._left -= len(part)
                yield Piece(Kind.BODY, part, part)
                if not self._left:
                    yield self._end()

    def close(self) -> Iterator[Piece]:
        """Yields what the end of the stream completes: held bytes, and the end of a body without a length."""
        if self._held:
            yield Piece(Kind.RAW, self._held)
            self._held = b""
        if self._state is Framing.UNTIL_CLOSE:
            yield self._end()

    def give_up(self) -> None:
        """Stops reading messages, from the next one on."""
        if self._state is None:
            self._state = Framing.RAW

    @property
    def gave_up(self) -> bool:
        """Whether the rest of the stream is passed on unread."""
        return self._state is Framing.RAW

    def _end(self) -> Piece:
        self._state = None
        self._chunks = _Chunks()
        return Piece(Kind.END)

    def _head(self, data: bytes) -> tuple[Head | None, bytes]:
        """Returns a complete head and the bytes after it, or (None, data), with state RAW if no head can come."""
        start = len(data) - len(data.lstrip(b"\r\n"))  # empty lines before a message are ignored
        match = _HEAD_END.search(data, start)
        if match is None or match.end() > MAX_HEAD_BYTES:
            if len(data) > MAX_HEAD_BYTES:
                self._state = Framing.RAW
            return None, data
        raw, rest = data[: match.end()], data[match.end() :]
        text = raw[start:].rstrip(b"\r\n")
        if b"\n " in text or b"\n\t" in text:
            text = _FOLD.sub(b" ", text)
        line, *lines = re.split(rb"\r?\n", text)
        if b"HTTP/1." not in line or any(b":" not in one for one in lines):
            self._state = Framing.RAW
            return None, data
        named = (one.split(b":", 1) for one in lines)
        head = Head(raw, line, tuple((name.strip().lower(), value.strip()) for name, value in named))
        framing = self.framing(head)
        if isinstance(framing, int):
            self._state, self._left = Framing.LENGTH, framing
        else:
            self._state = None if framing is Framing.INTERIM else framing
        return head, rest


class _Chunks:
    """Reads one chunked body. ``broken``: it is not one."""

    def __init__(self) -> None:
        self.broken = False
        self._line = b""
        self._left = 0
        self._next_part = "size"

    def take(self, data: bytes) -> tuple[int, bytes, bool]:
        """Returns how many bytes belong to this body, the content among them, and whether the body has ended."""
        at, content = 0, []
        while at < len(data) and not self.broken:
            if self._next_part == "data":
                part = data[at : at + self._left]
                content.append(part)
                at += len(part)
                self._left -= len(part)
                if not self._left:
                    self._next_part = "after"
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            at = end or len(data)
            if end:
                line, self._line = self._line.strip(), b""
                if self._next_part == "trailers" and not line:
                    return at, b"".join(content), True
                self._read_line(line)
            elif len(self._line) > MAX_LINE_BYTES:
                self.broken = True
        return at, b"".join(content), False

    def _read_line(self, line: bytes) -> None:
        if self._next_part == "trailers":
            return
        if self._next_part == "after":
            self.broken = bool(line)
            self._next_part = "size"
            return
        size = line.split(b";", 1)[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", size):
            self.broken = True
            return
        self._left = int(size, 16)
        self._next_part = "data" if self._left else "trailers"

"""HTTP/1 as it passes by: where messages begin and end, without a byte of it changed.

A library's parser gives back meaning, not bytes, and refuses what it holds to be wrong. Here whatever comes in comes
out, and what cannot be followed is passed on without being followed: the pieces of a stream add up to the stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

MAX_HEAD_BYTES = 256 * 1024
"""Beyond it a head is passed on unread, and so is all that follows on the connection."""
MAX_LINE_BYTES = 64 * 1024

_HEAD_END = re.compile(rb"\r?\n\r?\n")


class Kind(Enum):
    HEAD = auto()
    BODY = auto()
    END = auto()
    RAW = auto()


class Framing(Enum):
    """How the end of a body is known. A function that tells it gives a length as the number itself."""

    CHUNKED = auto()
    UNTIL_CLOSE = auto()
    LENGTH = auto()
    INTERIM = auto()  # a 1xx answer: another head follows, for the same request
    RAW = auto()


@dataclass(frozen=True, slots=True)
class Head:
    """The first line and the fields, their names in lower case, of a message. ``raw`` is all of it as it came."""

    raw: bytes
    line: bytes
    fields: tuple[tuple[bytes, bytes], ...]

    def get(self, name: bytes) -> bytes:
        """All values of a field, joined as HTTP allows; empty where there is none."""
        return b", ".join(value for key, value in self.fields if key == name)

    @property
    def method(self) -> bytes:
        return self.line.split(b" ", 1)[0]

    @property
    def target(self) -> bytes:
        parts = self.line.split(b" ")
        return parts[1] if len(parts) > 1 else b""

    @property
    def status(self) -> int:
        parts = self.line.split(b" ")
        return int(parts[1]) if len(parts) > 1 and re.fullmatch(rb"\d{3}", parts[1]) else 0

    @property
    def length(self) -> int | None:
        """Content-Length; None where there is none, or none that can be."""
        lengths = {value for value in self.get(b"content-length").split(b", ") if value}
        return int(lengths.pop()) if len(lengths) == 1 and re.fullmatch(rb"\d{1,18}", min(lengths)) else None


@dataclass(frozen=True, slots=True)
class Piece:
    """``raw`` are bytes of the stream; ``body`` those of them that are content, without chunk sizes and the like."""

    kind: Kind
    raw: bytes = b""
    body: bytes = b""
    head: Head | None = None


def request_framing(head: Head) -> Framing | int:
    if head.get(b"transfer-encoding"):
        return Framing.CHUNKED if b"chunked" in head.get(b"transfer-encoding").lower() else Framing.RAW
    return _length(head, 0)


def answer_framing(head: Head, method: bytes) -> Framing | int:
    """Of the answer to a request with ``method``."""
    status = head.status
    if not 100 <= status <= 599 or status == 101 or (method == b"CONNECT" and status < 300):
        return Framing.RAW
    if status < 200:
        return Framing.INTERIM
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
    """Splits a stream of messages into pieces. ``framing`` says of each head how its body ends."""

    framing: Callable[[Head], Framing | int]
    _state: Framing | None = None  # None: a head is awaited
    _left: int = 0
    _held: bytes = b""
    _chunks: _Chunks = field(default_factory=lambda: _Chunks())

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces that ``data`` completes. Only heads are held back, until they are whole."""
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
        """What the end of the stream completes: held bytes, and a body that lasts until then."""
        if self._held:
            yield Piece(Kind.RAW, self._held)
            self._held = b""
        if self._state is Framing.UNTIL_CLOSE:
            yield self._end()

    def lose(self) -> None:
        """Follow the stream no longer, from the next message on."""
        if self._state is None:
            self._state = Framing.RAW

    @property
    def lost(self) -> bool:
        """Whether the stream can no longer be followed."""
        return self._state is Framing.RAW

    def _end(self) -> Piece:
        self._state = None
        self._chunks = _Chunks()
        return Piece(Kind.END)

    def _head(self, data: bytes) -> tuple[Head | None, bytes]:
        """A whole head and what follows it; without one ``data`` as it is, and RAW as the state if none will come."""
        start = len(data) - len(data.lstrip(b"\r\n"))  # empty lines before a message are of no meaning
        match = _HEAD_END.search(data, start)
        if match is None or match.end() > MAX_HEAD_BYTES:
            if len(data) > MAX_HEAD_BYTES:
                self._state = Framing.RAW
            return None, data
        raw, rest = data[: match.end()], data[match.end() :]
        line, *lines = re.split(rb"\r?\n", raw[start:].rstrip(b"\r\n"))
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
    """Follows one body in chunks. ``broken``: it is none."""

    def __init__(self) -> None:
        self.broken = False
        self._line = b""
        self._left = 0
        self._where = "size"

    def take(self, data: bytes) -> tuple[int, bytes, bool]:
        """How many bytes belong to this body, the content among them, and whether it has ended with them."""
        at, content = 0, []
        while at < len(data) and not self.broken:
            if self._where == "data":
                part = data[at : at + self._left]
                content.append(part)
                at += len(part)
                self._left -= len(part)
                if not self._left:
                    self._where = "after"
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            at = end or len(data)
            if end:
                line, self._line = self._line.strip(), b""
                if self._where == "trailers" and not line:
                    return at, b"".join(content), True
                self._next(line)
            elif len(self._line) > MAX_LINE_BYTES:
                self.broken = True
        return at, b"".join(content), False

    def _next(self, line: bytes) -> None:
        if self._where == "trailers":
            return
        if self._where == "after":
            self.broken = bool(line)
            self._where = "size"
            return
        size = line.split(b";", 1)[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", size):
            self.broken = True
            return
        self._left = int(size, 16)
        self._where = "data" if self._left else "trailers"

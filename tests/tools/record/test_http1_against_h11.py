"""Messages that h11 can read are read the same way by the recorder, which also follows some that h11 refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.tools.record.http1 import (
    MAX_HEAD_BYTES,
    Head,
    Kind,
    Splitter,
    request_framing,
    response_framing,
)


class Message(NamedTuple):
    """``line`` is (method, target) of a request and (status,) of a response.

    ``fields`` are (name, value), without Content-Length, of which h11 joins several.
    """

    line: tuple[Any, ...]
    fields: list[tuple[bytes, bytes]]
    body: bytes


def without_length(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in fields if name != b"content-length"]


def by_h11(stream: bytes, method: bytes | None) -> tuple[list[Message], bool]:
    """The complete messages of a stream of requests, or, with ``method``, of responses to requests with it.

    Also returns whether h11 could read the stream to its end. Each message gets a connection of its own, since h11
    expects both directions to take their turns.
    """
    found: list[Message] = []
    while stream:
        reader = h11.Connection(h11.SERVER if method is None else h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        if method is not None:
            target = b"a:1" if method == b"CONNECT" else b"/"
            reader.send(h11.Request(method=method, target=target, headers=[(b"Host", b"a"), (b"Upgrade", b"x")]))
            reader.send(h11.EndOfMessage())
        line: tuple[Any, ...] = ()
        fields: list[tuple[bytes, bytes]] = []
        body = b""
        try:
            reader.receive_data(stream)
            reader.receive_data(b"")
            while True:
                event = reader.next_event()
                if isinstance(event, h11.Request):
                    line, fields = (event.method, event.target), list(event.headers)
                elif isinstance(event, h11.Response):
                    line, fields = (event.status_code,), list(event.headers)
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    break
                elif not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
                    return found, False
        except h11.RemoteProtocolError:
            return found, False
        if reader.their_state in (h11.MIGHT_SWITCH_PROTOCOL, h11.SWITCHED_PROTOCOL) and b"CONNECT" in (method, *line):
            return found, False
        found.append(Message(line, without_length(fields), body))
        stream = reader.trailing_data[0]
    return found, True


def by_the_recorder(stream: bytes, cuts: list[int], method: bytes | None) -> tuple[list[Message], bool]:
    """The same, read in pieces, with a check that the pieces add up to the stream."""
    splitter = Splitter(request_framing if method is None else lambda head: response_framing(head, method))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [piece for a, b in itertools.pairwise(edges) for piece in splitter.feed(stream[a:b])]
    followed = not splitter.gave_up
    pieces += splitter.close()
    assert b"".join(piece.raw for piece in pieces) == stream
    found: list[Message] = []
    head, body = Head(b"", b"", ()), b""
    for piece in pieces:
        head, body = piece.head or head, body + piece.body
        if piece.kind is Kind.HEAD:
            body = b""
        elif piece.kind is Kind.END:
            line = (head.method, head.target) if method is None else (head.status,)
            found.append(Message(line, without_length(head.fields), body))
    return found, followed


def assert_same(stream: bytes, cuts: list[int], method: bytes | None) -> None:
    wanted, all_of_it = by_h11(stream, method)
    found, followed = by_the_recorder(stream, cuts, method)
    assert found[: len(wanted)] == wanted
    if all_of_it:
        assert followed
        assert len(found) == len(wanted)


CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n006\r\n world\r\n0\r\nTrailer: t\r\n\r\n"
BODIES = [
    b"\r\n",
    b"Content-Length: 5\r\n\r\nhello",
    b"content-length: 5\r\nContent-Length: 5\r\n\r\nhello",
    b"Content-Length: 5, 5\r\n\r\nhello",
    CHUNKS,
    b"Content-Length: 99\r\n" + CHUNKS,
    b"Content-Length: 0\r\n\r\n",
]
FIELDS = [
    b"Host: a\r\n",
    b"host:a\r\nX:\r\n",
    b"Host: a\r\nX: a\r\n b\r\n\tc\r\n",
    b"Host: a\r\nX: \xc3\xa9\r\nY:  z \r\n",
]
REQUEST_LINES = [b"POST /v1/completions?q=%20 HTTP/1.1\r\n", b"GET * HTTP/1.0\r\n", b"M-SEARCH http://a/ HTTP/1.1\r\n"]
STATUS_LINES = [
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.0 404 Not Found\r\n",
    b"HTTP/1.1 200\r\n",
    b"HTTP/1.1 304 Not Modified\r\n",
    b"HTTP/1.1 204 No Content\r\n",
    b"HTTP/1.1 999 Request denied\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 500 x\r\n",
]
ODD = [
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b":",
    b"0",
    b"5\r\n",
    b";",
    b"\x00",
    b"HTTP/1.1",
    b"Upgrade: h2c\r\n",
    b"-",
    b",",
]


def streams(lines: list[bytes]) -> st.SearchStrategy[bytes]:
    """Messages one behind the other, with a few insertions anywhere in them."""
    message = st.builds(lambda *parts: b"".join(parts), *(st.sampled_from(parts) for parts in (lines, FIELDS, BODIES)))
    oddities = st.lists(st.tuples(st.integers(0, 400), st.sampled_from(ODD)), max_size=2)

    def insert(stream: bytes, odd: list[tuple[int, bytes]]) -> bytes:
        for at, part in odd:
            stream = stream[:at] + part + stream[at:]
        return stream

    return st.builds(insert, st.lists(message, min_size=1, max_size=4).map(b"".join), oddities)


CUTS = st.lists(st.integers(0, 600), max_size=5)


@settings(max_examples=300, deadline=None)
@given(streams(REQUEST_LINES), CUTS)
def test_requests(stream: bytes, cuts: list[int]) -> None:
    assert_same(stream, cuts, None)


@settings(max_examples=300, deadline=None)
@given(streams(STATUS_LINES), CUTS, st.sampled_from([b"POST", b"GET", b"HEAD", b"CONNECT"]))
def test_responses(stream: bytes, cuts: list[int], method: bytes) -> None:
    assert_same(stream, cuts, method)


TWO = b"Content-Length: 2\r\n\r\nhi"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("stream", "method"),
    [
        (b"\r\nPOST / HTTP/1.1\r\nHost: a\r\n" + TWO, None),  # an empty line after a body, as old clients send it
        (b"POST / HTTP/1.1\r\n" + TWO, None),  # without Host
        (b"POST /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n" + TWO, None),
        (b"POST / HTTP/1.1\r\nHost : a\r\n" + TWO, None),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, " + CHUNKED[19:], None),
        (b"HTTP/1.1 200 OK\r\n" + CHUNKED[:28] + CHUNKED, b"POST"),  # chunked twice, as proxies in a row send it
        (b"HTTP/1.1 200 OK\r\n" + CHUNKED.replace(b"2\r\n", b"2 ;q\r\n"), b"POST"),
        (b"HTTP/1.1 200 OK\n" + CHUNKED.replace(b"\r\n", b"\n"), b"POST"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nhi", b"POST"),
    ],
)
def test_messages_that_h11_refuses_are_followed(stream: bytes, method: bytes | None) -> None:
    assert by_h11(stream, method) == ([], False)
    found, followed = by_the_recorder(stream, [9], method)
    assert followed
    assert [message.body for message in found] == [b"hi"]

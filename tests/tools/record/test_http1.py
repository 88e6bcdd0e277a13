"""The splitter of HTTP/1 streams: not a byte changes, whatever comes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.tools.record.http1 import (
    MAX_HEAD_BYTES,
    Framing,
    Head,
    Kind,
    Piece,
    Splitter,
    request_framing,
    response_framing,
)

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: t\r\n\r\n"
)
GET = b"GET /metrics HTTP/1.1\r\n\r\n"


def split(data: bytes, *cuts: int) -> list[Piece]:
    splitter = Splitter(request_framing)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [p for a, b in itertools.pairwise(edges) for p in splitter.feed(data[a:b])]
    return [*pieces, *splitter.close()]


def bodies(pieces: list[Piece]) -> list[bytes]:
    """The body of each message that has ended."""
    found, body = [], b""
    for piece in pieces:
        body += piece.body
        if piece.kind is Kind.END:
            found.append(body)
            body = b""
    return found


PARTS = st.one_of(
    st.sampled_from([POST, CHUNKED, GET, b"\r\n", b"\n\n", b"GET / HTTP/1.0\n\n", b"5\r\nhello\r\n", b": x\r\n"]),
    st.binary(max_size=40),
)


@given(st.lists(PARTS, max_size=8), st.lists(st.integers(0, 600), max_size=6))
def test_the_pieces_add_up_to_the_stream_whatever_it_is(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    assert b"".join(piece.raw for piece in split(data, *cuts)) == data


@given(st.lists(st.sampled_from([POST, CHUNKED, GET, b"\r\n" + POST]), max_size=5), st.lists(st.integers(0, 900)))
def test_messages_are_split_wherever_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    expected = {POST: b"hello", CHUNKED: b"hello world", GET: b"", b"\r\n" + POST: b"hello"}
    pieces = split(b"".join(messages), *cuts)
    assert bodies(pieces) == [expected[message] for message in messages]
    heads = [piece.head for piece in pieces if piece.head is not None]
    assert len(heads) == len(messages)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 no http at all\r\n\r\n",
        b"GET / HTTP/1.1\r\nno field\r\n\r\nmore",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\nhello",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1),
    ],
)
def test_what_cannot_be_read_is_passed_on_raw_from_there_on(data: bytes) -> None:
    splitter = Splitter(request_framing)
    assert b"".join(piece.raw for piece in splitter.feed(data)) == data
    assert splitter.gave_up
    assert [piece.raw for piece in splitter.feed(GET)] == [GET]


def test_bodies_are_passed_on_at_once_and_only_heads_are_held() -> None:
    splitter = Splitter(request_framing)
    assert list(splitter.feed(POST[:20])) == []
    assert b"".join(piece.raw for piece in splitter.feed(POST[20:-3])) == POST[:-3]
    assert b"".join(piece.raw for piece in splitter.feed(b"l")) == b"l"


def test_impossible_numbers_are_none() -> None:
    assert head("9" * 5000).status == 0
    assert head("200", b"content-length: " + b"9" * 5000).length is None
    assert head("200", b"content-length: 7, 7").length == 7
    assert head("200", b"content-length: 7, 8").length is None


def head(status: str, *fields: bytes) -> Head:
    return Head(b"", f"HTTP/1.1 {status}".encode(), tuple(tuple(f.split(b": ", 1)) for f in fields))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("answer", "method", "framing"),
    [
        (head("200 OK", b"content-length: 7"), b"GET", 7),
        (head("200 OK", b"content-length: 7"), b"HEAD", 0),
        (head("204 No Content"), b"POST", 0),
        (head("304 Not Modified", b"content-length: 7"), b"GET", 0),
        (head("200 OK", b"transfer-encoding: Chunked"), b"POST", Framing.CHUNKED),
        (head("200 OK"), b"POST", Framing.UNTIL_CLOSE),
        (head("100 Continue"), b"POST", Framing.INTERIM),
        (head("101 Switching Protocols"), b"GET", Framing.RAW),
        (head("200 OK"), b"CONNECT", Framing.RAW),
        (head("abc"), b"GET", Framing.RAW),
    ],
)
def test_how_a_response_ends(answer: Head, method: bytes, framing: object) -> None:
    assert response_framing(answer, method) == framing


def test_a_response_without_a_length_lasts_until_the_connection_closes() -> None:
    splitter = Splitter(lambda head: response_framing(head, b"GET"))
    pieces = list(splitter.feed(b"HTTP/1.0 200 OK\r\n\r\npart"))
    assert [piece.kind for piece in [*pieces, *splitter.close()]] == [Kind.HEAD, Kind.BODY, Kind.END]

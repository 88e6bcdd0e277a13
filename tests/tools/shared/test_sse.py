"""The parser of server-sent events against a plain reading of the HTML standard."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.tools.shared.sse import EventParser


def parse(stream: bytes, *cuts: int) -> list[bytes]:
    parser = EventParser()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    events = [event for a, b in itertools.pairwise(edges) for event in parser.feed(stream[a:b])]
    events += parser.close()
    assert parser.held_bytes == 0
    return events


def by_the_standard(stream: bytes) -> list[bytes]:
    """The whole stream at once, step by step as the standard words it, except that a last event needs no end."""
    found, data = [], b""
    for line in re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf") + b"\n\n"):
        field, colon, value = line.partition(b":")
        if not line:
            if data:
                found.append(data.removesuffix(b"\n"))
            data = b""
        elif field == b"data":
            data += (value.removeprefix(b" ") if colon else b"") + b"\n"
    return found


FIELDS = [b"data: a", b"data:b", b"data", b"data:", b"data:  c", b"datax: d", b": comment", b":", b"event: e", b"id: 1"]
ENDS = [b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n"]
NO_ENDS = [b"\xef\xbb\xbf", b'data: {"x": "\xc2\x85"}', b"\x0c", b"\x1e"]  # str.splitlines() would split at three
PARTS = st.sampled_from([*FIELDS, *ENDS, *NO_ENDS])


@given(st.lists(PARTS, max_size=16), st.lists(st.integers(0, 80), max_size=8))
def test_events_are_those_of_the_standard_wherever_the_stream_is_cut(parts: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(parts)
    assert parse(stream, *cuts) == by_the_standard(stream)


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_all_line_ends_at_every_cut(end: bytes) -> None:
    stream = end.join([b": hello", b"data: one", b"data: two", b"", b"event: x", b"data:three", b"", b""])
    for cut in range(len(stream)):
        assert parse(stream, cut) == [b"one\ntwo", b"three"]


def test_an_event_comes_with_the_empty_line_after_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.held_bytes == 1
    assert parser.feed(b"\ndata: bc") == [b"a"]
    assert parser.held_bytes == len(b"data: bc")
    assert parser.feed(b"d\r\r") == [b"bcd"]
    assert parser.feed(b"\n\ndata: e\n\n") == [b"e"]
    assert parser.close() == []


def test_a_last_event_without_an_end_is_returned_at_the_close() -> None:
    assert parse(b"data: a\n\ndata: [DONE]") == [b"a", b"[DONE]"]
    assert parse(b"data: a\n\n: only a comment") == [b"a"]

"""Reads requests from log files of many formats, also mixed; line by line, so that a log may be larger than memory."""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from anaphora.errors import ConfigError
from anaphora.tools.shared.request_log.bodies import LoggedRequest, NotARequest, requests_of
from anaphora.tools.shared.request_log.vllm_log import VllmLogReader

_NOTHING = object()
_ADDRESS = re.compile(r"[\w.-]+:\d+")
_GZIP = b"\x1f\x8b"

BadLine = Callable[[int, str], None]


def read_requests(path: str, bad: BadLine, seen: Callable[[int], None] = lambda _: None) -> Iterator[LoggedRequest]:
    """Yields the requests of a log in order; ``-`` is standard input.

    ``bad`` is called with the number of each line without a request and the reason, ``seen`` with the bytes read so
    far. Raises ConfigError if the file cannot be read.
    """
    try:
        with _open(path) as lines:
            yield from _requests(lines, Path(path).suffix in (".txt", ".prompts"), bad, seen)
    except (OSError, EOFError) as error:
        hint = f"; a running server is named http://{path}" if _ADDRESS.fullmatch(path) else ""
        raise ConfigError(f"cannot read the log {path}: {getattr(error, 'strerror', None) or error}{hint}") from None


def _open(path: str) -> IO[bytes]:
    if path == "-":
        stdin = sys.stdin.buffer
        packed = hasattr(stdin, "peek") and stdin.peek(2)[:2] == _GZIP
        return cast(IO[bytes], gzip.GzipFile(fileobj=stdin)) if packed else stdin
    with open(path, "rb") as file:
        packed = file.read(2) == _GZIP
    return cast(IO[bytes], gzip.open(path)) if packed else open(path, "rb")


def _requests(lines: IO[bytes], plain: bool, bad: BadLine, seen: Callable[[int], None]) -> Iterator[LoggedRequest]:
    decoder, log = msgspec.json.Decoder(), VllmLogReader()
    done, number, first = 0, 0, True
    for number, line in enumerate(lines, 1):
        done += len(line)
        seen(done)
        line = line.strip()
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            continue
        try:
            value = _value(line, decoder, log, plain)
        except ValueError as error:
            if first and line[:1] in b"{[":
                yield from _document(line + b"\n" + lines.read(), number, log, bad)
                return
            bad(number, str(error))
            continue
        first = False
        if value is not _NOTHING:
            yield from checked_requests(value, number, bad)


def _value(line: bytes, decoder: msgspec.json.Decoder[Any], log: VllmLogReader, plain: bool) -> Any:
    """Returns the value of one line, or _NOTHING for a server's line about something else.

    Raises ValueError with the reason if the line cannot be used.
    """
    if plain:
        return {"prompt": line.decode("utf-8", "replace")}
    try:
        value = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if line[:1] in b"{[":
            raise ValueError(f"not JSON: {error}") from None
        return log.read(line.decode("utf-8", "replace")) or _NOTHING
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if isinstance(value, dict) and (text := log.unwrap(value)) is not None:
        return log.read(text) or _NOTHING
    return {"prompt": value} if isinstance(value, str) else value


def checked_requests(value: Any, number: int, bad: BadLine) -> Iterator[LoggedRequest]:
    """Yields the requests in one JSON value; if it cannot be used, calls ``bad`` with ``number`` and the reason."""
    try:
        yield from requests_of(value, number)
    except NotARequest as error:
        bad(number, str(error))
    except RecursionError:
        bad(number, "it is nested too deeply")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # In an unknown format any field may have an unexpected type: only this line is lost, not the log.
        bad(number, f"a field does not hold what belongs there: {error}"[:300])


def _document(text: bytes, number: int, log: VllmLogReader, bad: BadLine) -> Iterator[LoggedRequest]:
    """Reads a file that is one JSON value over several lines: an array of requests, a trace, or one request."""
    decoder = msgspec.json.Decoder()
    try:
        value = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # It is not one value, so the first line is just a bad line.
        _first, _, rest = text.partition(b"\n")
        bad(number, f"not JSON: {error}")
        for offset, line in enumerate(rest.split(b"\n"), 1):
            if line.strip():
                try:
                    value = _value(line.strip(), decoder, log, False)
                except ValueError as reason:
                    bad(number + offset, str(reason))
                    continue
                if value is not _NOTHING:
                    yield from checked_requests(value, number + offset, bad)
        return
    for item in value if isinstance(value, list) else [value]:
        yield from checked_requests(item, number, bad)

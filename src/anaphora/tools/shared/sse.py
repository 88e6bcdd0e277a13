"""Server-sent events: an incremental parser, bytes in, events out."""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class EventParser:
    """Parses a stream of server-sent events that may be split anywhere.

    Follows the HTML standard, section 9.2.6: lines end with LF, CR or CRLF, an empty line ends an event, several
    ``data`` lines of one event are joined with LF, comments are skipped. Only the data of an event is returned: the
    fields ``event``, ``id`` and ``retry`` are ignored, because every API that the tools know repeats its event type in
    the data.

    >>> parser = EventParser()
    >>> parser.feed(b'data: {"n": 1}\\n\\nda')
    [b'{"n": 1}']
    >>> parser.feed(b"ta: [DONE]\\r\\n\\r\\n")
    [b'[DONE]']
    """

    __slots__ = ("_after_cr", "_at_start", "_data", "_line", "held_bytes")

    def __init__(self) -> None:
        self.held_bytes = 0
        self._data: list[bytes] = []  # data lines of the event that has not ended
        self._line: list[bytes] = []  # pieces of the line that has not ended
        self._after_cr = False  # an LF that comes next belongs to the line before
        self._at_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of each event that ``data`` completes. ``held_bytes`` counts what waits for its end."""
        # What nearly every server sends: whole events of one line each.
        if data.startswith(b"data: ") and data.endswith(b"\n\n") and not self.held_bytes:
            events = data[6:-2].split(b"\n\ndata: ")
            if data.count(b"\n") == 2 * len(events) and b"\r" not in data and not self._data:
                self._after_cr = self._at_start = False
                return events
        if self._after_cr and data:
            data = data.removeprefix(b"\n")
            self._after_cr = False
        lines = data.splitlines()  # of bytes: at LF, CR and CRLF only
        if not lines:
            return []
        rest = b""
        if not data.endswith((b"\n", b"\r")):
            rest = lines.pop()
        elif data.endswith(b"\r"):
            self._after_cr = True
        if not lines:
            self._line.append(rest)  # joined once, so that a long line in many pieces takes linear time
            self.held_bytes += len(rest)
            return []
        if self._line:
            lines[0] = b"".join([*self._line, lines[0]])
        self._line = [rest] if rest else []
        if self._at_start:
            lines[0] = lines[0].removeprefix(_BOM)
            self._at_start = False
        events = self._events(lines)
        self.held_bytes = len(rest) + sum(map(len, self._data))
        return events

    def close(self) -> list[bytes]:
        """Ends the stream. Returns the data of a last event without an empty line after it, which the standard drops
        and some servers send."""
        return self.feed(b"\n\n") if self._data or self._line else []

    def _events(self, lines: list[bytes]) -> list[bytes]:
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                self._data.append(b"")
        return events

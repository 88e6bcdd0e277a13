"""Server-sent events of a streamed response.

A chunk with only text is joined from three byte strings: a prefix built once for each choice, the text as JSON, and a
constant suffix. Chunks with more fields (log-probabilities, token ids, the finish reason) are encoded as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from anaphora.errors import AnaphoraError
from anaphora.server.http.asgi import DIRECT_SEND
from anaphora.server.http.json_responses import error_body

logger = logging.getLogger("anaphora.server")

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """Returns one server-sent event with ``value`` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


class Chunks:
    """Encodes the chunks of one response. ``envelope`` has its id, object, created and model."""

    def __init__(self, envelope: dict[str, Any]) -> None:
        self._envelope = envelope
        self._start = b"data: " + _encode(envelope)[:-1] + b',"choices":[{"index":'
        self._prefixes: dict[int, bytes] = {}

    def text(self, choice: int, text: str) -> bytes:
        """Returns the usual chunk: text only."""
        prefix = self._prefixes.get(choice)
        if prefix is None:
            prefix = self._prefixes[choice] = self._start + b"%d," % choice + self.before_text
        return prefix + _encode(text) + self.after_text

    def full(self, choice: dict[str, Any], **top: Any) -> bytes:
        """Returns a chunk of one choice with any fields; ``top`` are fields next to ``choices``."""
        return event(self._envelope | {"choices": [choice]} | top)

    def last(self, **top: Any) -> bytes:
        """Returns the chunk after the last choice: no choices, and the fields in ``top``."""
        return event(self._envelope | {"choices": []} | top)

    before_text: bytes
    after_text: bytes


class ChatChunks(Chunks):
    """Chunks of /v1/chat/completions."""

    before_text = b'"delta":{"content":'
    after_text = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class CompletionChunks(Chunks):
    """Chunks of /v1/completions."""

    before_text = b'"text":'
    after_text = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'


class EventStream:
    """An ASGI response that sends events as they come and then [DONE].

    The status and ``headers()`` are sent with the first event: an error before it has its own HTTP status, a later one
    becomes an event.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Callable[[], dict[str, str]] = dict) -> None:
        self._events = events
        self._more_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            chunk = await anext(events, DONE)
            headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in self._more_headers().items())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            send = scope.get(DIRECT_SEND, send)
            try:
                while chunk is not DONE:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    chunk = await anext(events, DONE)
            except AnaphoraError as error:
                await send({"type": "http.response.body", "body": event(error_body(error)), "more_body": True})
            except Exception:
                logger.exception("a stream failed")
                failure = event(error_body(AnaphoraError("internal error; the server's log has the details")))
                await send({"type": "http.response.body", "body": failure, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

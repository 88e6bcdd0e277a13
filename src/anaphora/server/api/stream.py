"""Server-sent events: what a streamed answer looks like on the wire.

A chunk is three pieces of bytes: a head made once for each choice, the JSON text of the delta, and a constant tail.
Only chunks that carry more (log-probabilities, token ids, the end) are built field by field.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from anaphora.errors import AnaphoraError
from anaphora.server.api.responses import error_body

logger = logging.getLogger("anaphora.server")

STRAIGHT = "anaphora.send"
"""In the scope: the server's own ``send``. The chunks of a stream take it, past the application's middleware."""

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


class Chunks:
    """Encodes the chunks of one answer. ``envelope`` is id, object, created and model."""

    def __init__(self, envelope: dict[str, Any]) -> None:
        self._envelope = envelope
        self._open = b"data: " + _encode(envelope)[:-1] + b',"choices":[{"index":'
        self._heads: dict[int, bytes] = {}

    def text(self, choice: int, text: str) -> bytes:
        """The usual chunk: nothing but text."""
        head = self._heads.get(choice)
        if head is None:
            head = self._heads[choice] = self._open + b"%d," % choice + self.before_text
        return head + _encode(text) + self.after_text

    def full(self, choice: dict[str, Any], **top: Any) -> bytes:
        """A chunk of one choice with any fields, and fields beside ``choices``."""
        return event(self._envelope | {"choices": [choice]} | top)

    def last(self, **top: Any) -> bytes:
        """The last chunk, where the client asked for it: no choice, but the usage of all, or what else is asked for."""
        return event(self._envelope | {"choices": []} | top)

    before_text: bytes
    after_text: bytes


class ChatChunks(Chunks):
    before_text = b'"delta":{"content":'
    after_text = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class CompletionChunks(Chunks):
    before_text = b'"text":'
    after_text = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'


class EventStream:
    """An ASGI response. The status is sent with the first event, so an error before it gets a status of its own; one
    after it becomes an event, and the stream still ends in [DONE]. ``headers`` are asked for with the first event."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Callable[[], dict[str, str]] = dict) -> None:
        self._events = events
        self._more_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            chunk = await anext(events, DONE)
            headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in self._more_headers().items())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            send = scope.get(STRAIGHT, send)
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

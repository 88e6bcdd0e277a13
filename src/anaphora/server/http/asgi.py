"""Between HTTP and the routes: keys, body size, disconnects. Plain ASGI, so that a streamed chunk passes no layer."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from anaphora.errors import AnaphoraError, BodyTooLarge, InvalidRequest, Unauthorized
from anaphora.server.api.protocol import MAX_REQUEST_ID_LENGTH, Body, parse
from anaphora.server.api.responses import error_response
from anaphora.server.api.stream import STRAIGHT
from anaphora.server.service import Call, Service

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
"""What probes and scrapers read without a key."""

DRAIN_BYTES = 64 * 2**20
"""How much of a body over the limit is read and thrown away, so that its sender gets to read the answer."""


class KeyGuard:
    """Asks for ``Authorization: Bearer KEY`` on the paths of ``routes`` but for the open ones; others are not there."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._guards(scope) or self._admits(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("the API key is missing or wrong: send the header Authorization: Bearer KEY")
        await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _guards(self, scope: Scope) -> bool:
        known = any(route.matches(scope)[0] != Match.NONE for route in self._routes)
        return known and scope["path"] not in OPEN_PATHS

    def _admits(self, scope: Scope) -> bool:
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "replace")
        # All keys are compared, each in constant time: the answer's time tells nothing.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class Straight:
    """The outermost layer: leaves its ``send`` in the scope for streams (server.stream.STRAIGHT)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[STRAIGHT] = send
        await self._app(scope, receive, send)


Handler = Callable[[Service, Call], Awaitable[Any]]


class Post:
    """A route that takes a JSON body of one of ``kinds`` and stops its work when the client leaves."""

    def __init__(self, service: Service, kinds: type[Body] | tuple[type[Body], ...], handler: Handler) -> None:
        self._service = service
        self._kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header_id = request_id(scope)
        answer_send = _with_id(send, header_id)
        if (coding := Headers(scope=scope).get("content-encoding", "identity")) != "identity":
            raise InvalidRequest(f"the body must not be compressed, got Content-Encoding: {coding!r:.80}")
        try:
            body = await read_body(scope, receive, self._service.config.max_body_bytes)
        except BodyTooLarge as error:
            await error_response(error, {"connection": "close"})(scope, receive, answer_send)
            return
        except ClientGone:
            return
        self._service.in_flight += 1
        try:
            await until_disconnect(self._answer(body, header_id, scope, answer_send), receive)
        finally:
            self._service.in_flight -= 1

    async def _answer(self, body: bytes, header_id: str | None, scope: Scope, send: Send) -> None:
        arrival = time.monotonic()
        try:
            request, plain = await self._service.in_thread(parse, body, *self._kinds)
            self._service.model_name(request.model)
            client_id = getattr(request, "request_id", None) or header_id
            call = Call(request, plain, scope["path"], arrival, client_id)
            response = await self._handler(self._service, call)
            await response(scope, _nothing_more, send)
        except AnaphoraError as error:
            await error_response(error)(scope, _nothing_more, send)
        except RecursionError:
            # Raised before anything was sent: rendering and encoding go down into what the client nested.
            await error_response(InvalidRequest("the body is nested too deeply"))(scope, _nothing_more, send)


class ClientGone(Exception):
    """The client left before its body was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. BodyTooLarge beyond ``limit``, whether Content-Length says so or the chunks add up to it."""
    error = BodyTooLarge(f"the request body is over the limit of {limit} bytes (--max-body-size)")
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdigit() and int(declared) > limit + DRAIN_BYTES:
        raise error
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False)
        if size > limit + DRAIN_BYTES:
            raise error
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
    if size > limit:
        raise error
    return b"".join(parts)


async def until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do ``work``, or cancel it when the client leaves: streaming or not, nobody generates for a closed connection."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone = not task.done()
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not gone:
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing_more() -> dict[str, Any]:
    raise RuntimeError("the body was read already")


def request_id(scope: Scope) -> str | None:
    """The client's X-Request-Id, where it is printable and not too long."""
    given = Headers(scope=scope).get("x-request-id")
    if given is not None and not (0 < len(given) <= MAX_REQUEST_ID_LENGTH and given.isascii() and given.isprintable()):
        raise InvalidRequest(
            f"X-Request-Id must be 1 to {MAX_REQUEST_ID_LENGTH} printable ASCII characters", param="X-Request-Id"
        )
    return given


def _with_id(send: Send, client_id: str | None) -> Send:
    """``send``, which puts the client's X-Request-Id into the answer's head where it gave one."""
    if client_id is None:
        return send
    header = (b"x-request-id", client_id.encode())

    async def with_id(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], header]
        await send(message)

    return with_id

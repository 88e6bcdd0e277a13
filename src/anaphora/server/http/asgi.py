"""ASGI below the routes: API keys, body size, disconnects. Plain ASGI, so that streamed chunks pass no middleware."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from anaphora.errors import BodyTooLarge, Unauthorized
from anaphora.server.http.json_responses import error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
"""Paths that probes and scrapers read without an API key."""

DRAIN_BYTES = 64 * 2**20
"""How much of a body over the limit is read and dropped. A sender that is cut off earlier does not read the answer."""

DIRECT_SEND = "anaphora.send"
"""Key in the ASGI scope of the server's own ``send``, which streams use to bypass the application's middleware."""


class ApiKeyMiddleware:
    """Requires a bearer token on all known routes except OPEN_PATHS; unknown routes are 404 without a token.

    Args:
        app: the application behind it.
        keys: accepted API keys.
        routes: the routes of ``app``.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_guarded(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("the API key is missing or wrong: send the header Authorization: Bearer KEY")
        await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _is_guarded(self, scope: Scope) -> bool:
        known = any(route.matches(scope)[0] != Match.NONE for route in self._routes)
        return known and scope["path"] not in OPEN_PATHS

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "replace")
        # Compare with all keys, each in constant time, so that timing does not reveal which one was close.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class DirectSendMiddleware:
    """The outermost layer: stores its ``send`` in the scope under DIRECT_SEND."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        await self._app(scope, receive, send)


class ClientDisconnected(Exception):
    """The client disconnected before its body was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Returns the whole request body.

    Raises:
        BodyTooLarge: Content-Length, or what was received, is over ``limit`` bytes.
        ClientDisconnected: the body is incomplete.
    """
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
            raise ClientDisconnected
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


async def cancel_on_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs ``work``, and cancels it if the client disconnects: nobody reads what it would generate."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        cancelled = not task.done()
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not cancelled:
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

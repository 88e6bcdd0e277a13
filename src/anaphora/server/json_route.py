"""JsonRoute: reads and checks a JSON body, runs a handler, and stops it if the client disconnects."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from anaphora.errors import AnaphoraError, BodyTooLarge, InvalidRequest
from anaphora.server.api.body_parsing import parse
from anaphora.server.api.protocol import MAX_REQUEST_ID_LENGTH, Body
from anaphora.server.api.request_context import RequestContext
from anaphora.server.http.asgi import ClientDisconnected, cancel_on_disconnect, read_body
from anaphora.server.http.json_responses import error_response
from anaphora.server.service import Service

Handler = Callable[[Service, RequestContext], Awaitable[Any]]
"""Returns an ASGI response."""


class JsonRoute:
    """An ASGI application for one route.

    Args:
        service: what all routes share.
        body_types: the body's class, or several that differ in their required fields.
        handler: answers the request.
    """

    def __init__(self, service: Service, body_types: type[Body] | tuple[type[Body], ...], handler: Handler) -> None:
        self._service = service
        self._body_types = body_types if isinstance(body_types, tuple) else (body_types,)
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header_id = _request_id(scope)
        send = _with_request_id(send, header_id)
        if (coding := Headers(scope=scope).get("content-encoding", "identity")) != "identity":
            raise InvalidRequest(f"the body must not be compressed, got Content-Encoding: {coding!r:.80}")
        try:
            body = await read_body(scope, receive, self._service.config.max_body_bytes)
        except BodyTooLarge as error:
            await error_response(error, {"connection": "close"})(scope, receive, send)
            return
        except ClientDisconnected:
            return
        self._service.in_flight += 1
        try:
            await cancel_on_disconnect(self._respond(body, header_id, scope, send), receive)
        finally:
            self._service.in_flight -= 1

    async def _respond(self, body: bytes, header_id: str | None, scope: Scope, send: Send) -> None:
        arrival = time.monotonic()
        try:
            parsed, raw = await self._service.in_thread(parse, body, *self._body_types)
            self._service.model_name(parsed.model)
            client_id = getattr(parsed, "request_id", None) or header_id
            context = RequestContext(parsed, raw, scope["path"], arrival, client_id)
            response = await self._handler(self._service, context)
            await response(scope, _body_already_read, send)
        except AnaphoraError as error:
            await error_response(error)(scope, _body_already_read, send)
        except RecursionError:
            # Raised before anything was sent: rendering and encoding recurse into what the client nested.
            await error_response(InvalidRequest("the body is nested too deeply"))(scope, _body_already_read, send)


async def _body_already_read() -> dict[str, Any]:
    raise RuntimeError("the body was read already")


def _request_id(scope: Scope) -> str | None:
    given = Headers(scope=scope).get("x-request-id")
    if given is not None and not (0 < len(given) <= MAX_REQUEST_ID_LENGTH and given.isascii() and given.isprintable()):
        raise InvalidRequest(
            f"X-Request-Id must be 1 to {MAX_REQUEST_ID_LENGTH} printable ASCII characters", param="X-Request-Id"
        )
    return given


def _with_request_id(send: Send, client_id: str | None) -> Send:
    """Returns ``send``, extended to put the client's X-Request-Id into the response headers."""
    if client_id is None:
        return send
    header = (b"x-request-id", client_id.encode())

    async def with_request_id(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], header]
        await send(message)

    return with_request_id

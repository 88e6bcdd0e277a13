"""JSON over HTTP: the response of a route, and the body that every error has."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from anaphora.errors import AnaphoraError


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a response with ``value`` encoded as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_body(error: AnaphoraError) -> dict[str, Any]:
    """Returns the body of an error in OpenAI's format; ``code`` is the HTTP status."""
    # A message may quote the client's text; lone surrogates in it cannot be encoded as UTF-8.
    message = error.message.encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": error.code, "param": error.param, "code": error.status}}


def error_response(error: AnaphoraError, headers: dict[str, str] | None = None) -> Response:
    """Returns the HTTP response of an error."""
    return json_response(error_body(error), error.status, headers)

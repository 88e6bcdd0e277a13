"""The route table: which handler answers which path, and how errors are answered."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from anaphora.errors import AnaphoraError, InvalidRequest, NotFound
from anaphora.server.api.chat import chat
from anaphora.server.api.completions import complete
from anaphora.server.api.protocol import (
    ChatPrefix,
    ChatRequest,
    CompletionPrefix,
    CompletionRequest,
    DetokenizeRequest,
    PinIds,
    TokenizeRequest,
)
from anaphora.server.api.render import render_chat, render_completion
from anaphora.server.api.tokenize import detokenize, tokenize
from anaphora.server.cache_api import prefix_routes
from anaphora.server.cache_api.explain_route import explain
from anaphora.server.http.json_responses import error_body, error_response, json_response
from anaphora.server.json_route import JsonRoute
from anaphora.server.plain_routes import PlainRoutes
from anaphora.server.service import Service


def routes(service: Service) -> list[BaseRoute]:
    """Returns every route of the server. tests/test_docs.py compares them with docs/api.md."""
    plain = PlainRoutes(service)
    pin_body = (ChatPrefix, CompletionPrefix)
    unpin_body = (*pin_body, PinIds)
    return [
        Route("/v1/chat/completions", JsonRoute(service, ChatRequest, chat), methods=["POST"]),
        Route("/v1/completions", JsonRoute(service, CompletionRequest, complete), methods=["POST"]),
        Route("/v1/chat/completions/render", JsonRoute(service, ChatRequest, render_chat), methods=["POST"]),
        Route("/v1/completions/render", JsonRoute(service, CompletionRequest, render_completion), methods=["POST"]),
        Route("/v1/cache/prefixes", plain.prefixes),
        Route("/v1/cache/warm", JsonRoute(service, pin_body, prefix_routes.warm), methods=["POST"]),
        Route("/v1/cache/pin", JsonRoute(service, pin_body, prefix_routes.pin), methods=["POST"]),
        Route("/v1/cache/unpin", JsonRoute(service, unpin_body, prefix_routes.unpin), methods=["POST"]),
        Route("/v1/cache/explain", JsonRoute(service, (ChatRequest, CompletionRequest), explain), methods=["POST"]),
        Route("/v1/models", plain.models),
        Route("/v1/models/{model:path}", plain.model),
        Route("/tokenize", JsonRoute(service, TokenizeRequest, tokenize), methods=["POST"]),
        Route("/detokenize", JsonRoute(service, DetokenizeRequest, detokenize), methods=["POST"]),
        Route("/reset_prefix_cache", plain.reset, methods=["POST"]),
        Route("/health", plain.health),
        Route("/ping", plain.health, methods=["GET", "POST"]),
        Route("/version", plain.version),
        Route("/load", plain.load),
        Route("/metrics", plain.metrics),
    ]


async def on_error(_: Request, error: Exception) -> Response:
    """Answers an AnaphoraError with its status."""
    assert isinstance(error, AnaphoraError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answers unknown paths and methods in the format of every other error."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound(f"there is no route {request.url.path:.200}"))
    body = error_body(InvalidRequest(f"{request.method} {request.url.path:.200}: {error.detail}"))
    body["error"]["code"] = error.status_code
    return json_response(body, error.status_code, dict(error.headers or {}))


async def on_crash(_: Request, __: Exception) -> Response:
    """Answers any other exception with 500; uvicorn logs the exception itself."""
    return error_response(AnaphoraError("internal error; the server's log has the details"))

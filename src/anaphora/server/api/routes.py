"""The routes: what each path answers."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from anaphora.errors import AnaphoraError, CacheInvariantError, Conflict, EngineDead, InvalidRequest, NotFound
from anaphora.server.api import prompts
from anaphora.server.api.chat import chat
from anaphora.server.api.completions import complete
from anaphora.server.api.protocol import (
    ChatPrefix,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinId,
    TextPrefix,
    TokenizeRequest,
)
from anaphora.server.api.render import render_chat, render_text
from anaphora.server.api.responses import error_body, error_response, json_response
from anaphora.server.cache_api import prefix_routes
from anaphora.server.cache_api.explanations import explain
from anaphora.server.http.asgi import Post
from anaphora.server.service import Call, Service

logger = logging.getLogger("anaphora.server")


def routes(service: Service) -> list[BaseRoute]:
    """Every path of the server; docs and tests read this list."""
    reads = Reads(service)
    return [
        Route("/v1/chat/completions", Post(service, ChatRequest, chat), methods=["POST"]),
        Route("/v1/completions", Post(service, CompletionRequest, complete), methods=["POST"]),
        Route("/v1/chat/completions/render", Post(service, ChatRequest, render_chat), methods=["POST"]),
        Route("/v1/completions/render", Post(service, CompletionRequest, render_text), methods=["POST"]),
        Route("/v1/cache/prefixes", reads.prefixes),
        Route("/v1/cache/warm", Post(service, (ChatPrefix, TextPrefix), prefix_routes.warm), methods=["POST"]),
        Route("/v1/cache/pin", Post(service, (ChatPrefix, TextPrefix), prefix_routes.pin), methods=["POST"]),
        Route("/v1/cache/unpin", Post(service, (ChatPrefix, TextPrefix, PinId), prefix_routes.unpin), methods=["POST"]),
        Route("/v1/cache/explain", Post(service, (ChatRequest, CompletionRequest), explain), methods=["POST"]),
        Route("/v1/models", reads.models),
        Route("/v1/models/{model:path}", reads.model),
        Route("/tokenize", Post(service, TokenizeRequest, tokenize), methods=["POST"]),
        Route("/detokenize", Post(service, DetokenizeRequest, detokenize), methods=["POST"]),
        Route("/reset_prefix_cache", reads.reset, methods=["POST"]),
        Route("/health", reads.health),
        Route("/ping", reads.health, methods=["GET", "POST"]),
        Route("/version", reads.version),
        Route("/load", reads.load),
        Route("/metrics", reads.metrics),
    ]


class Reads:
    """Routes without a body."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self._service.names]})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(self._service.model_name(request.path_params["model"])))

    def _card(self, name: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "anaphora",
            "root": service.root,
            "parent": None,
            "max_model_len": service.info.max_model_len,
        }

    async def health(self, _: Request) -> Response:
        """200 while the engine works as it should, else 503 with the reason."""
        engine = self._service.engine
        if (trouble := engine.dead or engine.hung) is not None:
            return error_response(EngineDead(trouble))
        if engine.cache_fault is not None:
            return error_response(CacheInvariantError(engine.cache_fault))
        return json_response({"status": "ok"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": version("anaphora")})

    async def load(self, _: Request) -> Response:
        return json_response({"server_load": self._service.in_flight})

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._service.metrics.export(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    async def prefixes(self, request: Request) -> Response:
        return await prefix_routes.listing(self._service, request)

    async def reset(self, _: Request) -> Response:
        """Says whether the cache was emptied; it is not while requests use its blocks. Pins stay, to be filled anew."""
        if await self._service.engine.reset_prefix_cache():
            logger.info("the prefix cache was emptied (POST /reset_prefix_cache)")
            return json_response({"reset": True})
        logger.info("the prefix cache was not emptied: requests are running (POST /reset_prefix_cache)")
        conflict = Conflict("the prefix cache was not reset: requests are running; send it again when they are done")
        return json_response({"reset": False} | error_body(conflict), conflict.status)


async def tokenize(service: Service, call: Call) -> Response:
    return json_response(await service.aside(_tokenize, service, call.request))


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = service.text.tokenizer
    if body.prompt is not None:
        prompt = prompts.encode(body.prompt, tokenizer, add_special_tokens=body.add_special_tokens is not False)
    else:
        prompt = prompts.chat_prompt(body, tokenizer, service.text.template)
    ids = prompt.token_ids
    return {
        "count": len(ids),
        "max_model_len": service.info.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None,
    }


async def detokenize(service: Service, call: Call) -> Response:
    return json_response(await service.aside(_detokenize, service, call.request))


def _detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    if body.tokens:
        prompts.check_ids(body.tokens, service.info.model.vocab_size, "tokens")
    return {"prompt": service.text.tokenizer.decode(body.tokens, False)}


async def on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, AnaphoraError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the form of every other error."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound(f"there is no route {request.url.path:.200}"))
    body = error_body(InvalidRequest(f"{request.method} {request.url.path:.200}: {error.detail}"))
    body["error"]["code"] = error.status_code
    return json_response(body, error.status_code, dict(error.headers or {}))


async def on_crash(_: Request, __: Exception) -> Response:
    """uvicorn logs the exception itself."""
    return error_response(AnaphoraError("internal error; the server's log has the details"))

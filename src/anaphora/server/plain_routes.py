"""Routes without a body: models, health, load, metrics, the list of prefixes, and the reset of the cache."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from anaphora.errors import CacheInvariantError, Conflict, EngineDead
from anaphora.server.cache_api import prefix_routes
from anaphora.server.http.json_responses import error_body, error_response, json_response
from anaphora.server.service import Service

logger = logging.getLogger("anaphora.server")


class PlainRoutes:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, _: Request) -> Response:
        """GET /v1/models: one entry for each name of the model."""
        return json_response({"object": "list", "data": [self._card(name) for name in self._service.names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
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
        """GET /health: 200 while the engine works, else 503 with the reason.

        After a failed cache check the engine may answer from the wrong blocks, so the server asks to be restarted.
        """
        engine = self._service.engine
        if (trouble := engine.dead or engine.hung) is not None:
            return error_response(EngineDead(trouble))
        if engine.cache_fault is not None:
            return error_response(CacheInvariantError(engine.cache_fault))
        return json_response({"status": "ok"})

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return json_response({"version": version("anaphora")})

    async def load(self, _: Request) -> Response:
        """GET /load: the number of requests in flight."""
        return json_response({"server_load": self._service.in_flight})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        body, content_type = self._service.metrics.export(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    async def prefixes(self, request: Request) -> Response:
        """GET /v1/cache/prefixes."""
        return await prefix_routes.list_prefixes(self._service, request)

    async def reset(self, _: Request) -> Response:
        """POST /reset_prefix_cache: empties the cache, or 409 while requests use its blocks.

        Pins stay; the next request with a pinned prefix computes it again.
        """
        if await self._service.engine.reset_prefix_cache():
            logger.info("the prefix cache was emptied (POST /reset_prefix_cache)")
            return json_response({"reset": True})
        logger.info("the prefix cache was not emptied: requests are running (POST /reset_prefix_cache)")
        conflict = Conflict("the prefix cache was not reset: requests are running; send it again when they are done")
        return json_response({"reset": False} | error_body(conflict), conflict.status)

"""POST /v1/cache/explain: what a body's prompts would find in the cache now."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from anaphora.observe.engine_metrics import hits_at_sizes
from anaphora.server.api.cache_explanations import FIELD, explanation
from anaphora.server.api.engine_requests import engine_requests
from anaphora.server.api.request_context import RequestContext
from anaphora.server.http.json_responses import json_response
from anaphora.server.service import Service
from anaphora.types.outputs import EngineStats


async def explain(service: Service, context: RequestContext) -> Response:
    """Answers with an explanation for each prompt. Generates nothing and changes nothing in the cache."""
    requests = await service.in_thread(engine_requests, service, context)
    reports = await asyncio.gather(*(service.engine.explain(request) for _, request in requests))
    explained = [
        await service.in_background_thread(explanation, service, context, prompt, report)
        for (prompt, _), report in zip(requests, reports, strict=True)
    ]
    return json_response(
        {
            "object": "cache.explanation",
            "model": service.model_name(context.body.model),
            FIELD: explained,
            "hit_rate_at_size": hit_rates(service.metrics.totals.read()),
        }
    )


def hit_rates(stats: EngineStats) -> dict[str, float | None]:
    """Returns the hit rate in tokens since the start by multiple of the cache's size; None before the first lookup."""
    hits = hits_at_sizes(stats).items()
    return {size: round(tokens / stats.queries, 4) if stats.queries else None for size, tokens in hits}

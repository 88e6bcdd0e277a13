"""What a request is told of its own lookup in the prefix cache: in a header, in the body, and without generating.

Reports hold nothing of another salt (cache.explain), so neither does what is made of them here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from anaphora.observe.metrics import hits_at_sizes
from anaphora.server.api.answers import Answer
from anaphora.server.api.prompts import Prompt
from anaphora.server.api.responses import json_response
from anaphora.server.cache_api import prompt_positions
from anaphora.server.service import Call, Service
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import EngineStats, PromptDone
from anaphora.types.reports import CacheReport, Neighbour

HEADER = "x-anaphora-cache"
FIELD = "cache_explanations"
HEADER_PROMPTS = 16
"""A body may hold many prompts, a header should not be long."""
SHOWN_TOKENS = 32
"""Tokens of the prompt that are shown before and behind the place where it parts from an earlier one."""


def header(answers: Sequence[Answer]) -> dict[str, str]:
    """The short form: an RFC 8941 list with one item a prompt, as ``diverged;cached=1536;prompt=2042;at=1536``.

    Of several prompts it names those that have been scheduled, at most ``HEADER_PROMPTS``.
    """
    items = [_item(answer.done) for answer in answers[:HEADER_PROMPTS] if answer.done is not None]
    return {HEADER: ", ".join(items)} if items else {}


def _item(done: PromptDone) -> str:
    report = done.cache
    item = f"{report.reason};cached={report.cached_tokens};prompt={report.prompt_tokens};at={report.position}"
    return f"{item};waited={done.waited_s:.3f}" if report.waited else item


async def explain(service: Service, call: Call) -> Response:
    """POST /v1/cache/explain: what the body's prompts would find now. Generates nothing, changes nothing."""
    ready = await service.in_thread(service.engine_requests, call)
    reports = await asyncio.gather(*(service.engine.explain(request) for _, request in ready))
    explained = [
        await service.aside(explanation, service, call, prompt, report)
        for (prompt, _), report in zip(ready, reports, strict=True)
    ]
    return json_response(
        {
            "object": "cache.explanation",
            "model": service.model_name(call.request.model),
            FIELD: explained,
            "hit_rate_at_size": hit_rates(service.metrics.totals.read()),
        }
    )


def hit_rates(stats: EngineStats) -> dict[str, float | None]:
    """The hit rate in tokens since the start in a cache of so many times the size; None before the first lookup."""
    hits = hits_at_sizes(stats).items()
    return {size: round(tokens / stats.queries, 4) if stats.queries else None for size, tokens in hits}


async def of_answers(service: Service, call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
    """The field of an answer's body, where the request asks for it."""
    if not call.request.explain_cache:
        return {}
    return {
        FIELD: [
            await service.aside(explanation, service, call, answer.prompt, answer.done.cache)
            for answer in answers
            if answer.done is not None
        ]
    }


def explanation(service: Service, call: Call, prompt: Prompt, report: CacheReport) -> dict[str, Any]:
    """A report in full: with the texts on both sides, and where in the body the first token that missed stands."""
    tokenizer = service.text.tokenizer
    told: dict[str, Any] = {
        "reason": report.reason,
        "detail": report.detail,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "position": report.position,
        "waited": report.waited,
        "place": None,
    }
    if report.feature:
        told["feature"] = report.feature
    told["place"] = prompt_positions.find(service.text, call.request, prompt, report)
    if report.neighbour is not None:
        told["diverged"] = _diverged(tokenizer, prompt.token_ids, report.position, report.neighbour)
    if (eviction := report.eviction) is not None:
        model = service.info.model
        told["evicted"] = {
            "seconds_ago": round(eviction.seconds_ago, 3),
            "by": eviction.by or "other traffic",
            "lost_tokens": eviction.lost_tokens,
            "more_tokens": eviction.more_tokens or None,
            "more_bytes": eviction.more_tokens // model.block_size * model.bytes_per_block or None,
        }
    return told


def _diverged(tokenizer: Tokenizer, ids: Sequence[int], at: int, neighbour: Neighbour) -> dict[str, Any]:
    own, other = ids[at : at + SHOWN_TOKENS], neighbour.token_ids[:SHOWN_TOKENS]
    text, other_text = tokenizer.decode(own, False), tokenizer.decode(other, False)
    shorter = min(len(text), len(other_text))
    return {
        "request_id": neighbour.request_id,
        "seconds_ago": round(neighbour.seconds_ago, 3),
        "before": tokenizer.decode(ids[max(0, at - SHOWN_TOKENS) : at], False),
        "text": text,
        "other_text": other_text,
        "token_id": own[0],
        "other_token_id": other[0],
        # The same characters in other tokens: an answer came back as text and was cut into tokens differently.
        "retokenised": shorter > 0 and text[:shorter] == other_text[:shorter],
    }

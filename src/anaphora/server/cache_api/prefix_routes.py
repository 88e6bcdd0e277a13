"""Routes under /v1/cache for prefixes of prompts: compute them, pin them, list the shared ones.

A prefix is given as a request body; only its prompt is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from anaphora.errors import AnaphoraError, InvalidRequest, NotFound
from anaphora.server.api import prompts
from anaphora.server.api.prompt_run import PromptRun, finish_runs
from anaphora.server.api.protocol import ChatPrefix, CompletionPrefix, PinIds
from anaphora.server.api.request_context import RequestContext
from anaphora.server.api.response_parts import usage
from anaphora.server.http.json_responses import json_response
from anaphora.server.service import Service
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.reports import PinReport, Prefix, PrefixList
from anaphora.types.request import MAX_SALT_LENGTH, Request
from anaphora.types.sampling import SamplingParams

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
SALT_HEADER = "X-Cache-Salt"

_COMPUTE_ONLY = SamplingParams(max_tokens=0, temperature=0)


async def warm(service: Service, context: RequestContext) -> Response:
    """POST /v1/cache/warm: computes the prefixes. They stay in the cache like any prompt, until they are evicted."""
    runs = await compute(service, context, await prefix_requests(service, context))
    data = [
        {
            "index": index,
            "object": "cache.prefix",
            "tokens": len(run.request.prompt_token_ids),
            "cached_tokens": run.cached_tokens,
        }
        for index, run in enumerate(runs)
    ]
    return json_response({"object": "list", "data": data, "usage": usage(runs)})


async def pin(service: Service, context: RequestContext) -> Response:
    """POST /v1/cache/pin: computes the prefixes and pins them."""
    reports = await compute_and_pin(service, context)
    return json_response({"object": "list", "data": [_pin_json(report) | {"new": report.new} for report in reports]})


async def unpin(service: Service, context: RequestContext) -> Response:
    """POST /v1/cache/unpin. If one of the prefixes is not pinned, raises NotFound and unpins none."""
    body: ChatPrefix | CompletionPrefix | PinIds = context.body
    if isinstance(body, PinIds):
        unpinned = await service.engine.unpin(ids=[body.id] if isinstance(body.id, str) else body.id)
    else:
        unpinned = await service.engine.unpin(list(map(_prefix, await prefix_requests(service, context))))
    service.completed_pins.difference_update(report.id for report in unpinned)
    return json_response({"object": "list", "data": list(map(_pin_json, unpinned))})


async def prefix_requests(service: Service, context: RequestContext) -> list[Request]:
    """Returns requests that compute the prefixes of a body and generate nothing. Raises InvalidRequest."""
    return await service.in_thread(_prefix_requests, service, context)


def _prefix_requests(service: Service, context: RequestContext) -> list[Request]:
    body: ChatPrefix | CompletionPrefix = context.body
    tokenizer, info = service.text.tokenizer, service.info
    if isinstance(body, ChatPrefix):
        limit = info.max_model_len if body.truncate_prompt_tokens is None else None
        given = [prompts.shared_prefix(body, tokenizer, service.text.template, limit)]
    else:
        given = prompts.completion_prompts(body, tokenizer, info.max_model_len)
    fitting = [prompts.truncated(prompt, body, info) for prompt in given]
    return [
        Request(
            f"{context.engine_id}-{i}", prompt.token_ids, _COMPUTE_ONLY, context.arrival, cache_salt=body.cache_salt
        )
        for i, prompt in enumerate(fitting)
    ]


async def compute(service: Service, context: RequestContext, requests: Sequence[Request]) -> list[PromptRun]:
    """Runs the requests to their end and returns them."""
    tokenizer = service.text.tokenizer
    runs = [PromptRun(request, prompts.Prompt(request.prompt_token_ids), tokenizer) for request in requests]
    if runs:
        await finish_runs(service, context, runs)
    return runs


async def compute_and_pin(service: Service, context: RequestContext) -> tuple[PinReport, ...]:
    """Pins the prefixes of a body, then computes what is missing. If that fails, no new pin stays."""
    requests = await prefix_requests(service, context)
    prefixes = list(map(_prefix, requests))
    pinning = asyncio.ensure_future(service.engine.pin(prefixes))
    try:
        before = await asyncio.shield(pinning)
        missing = [r for r, report in zip(requests, before, strict=True) if report.kept_tokens < report.tokens]
        await compute(service, context, missing)
        after = await service.engine.pin(prefixes)
    except BaseException:
        await asyncio.shield(_unpin_new(service, pinning))
        raise
    service.completed_pins.update(report.id for report in after)
    return tuple(
        PinReport(now.id, now.tokens, now.kept_tokens, then.new) for then, now in zip(before, after, strict=True)
    )


async def _unpin_new(service: Service, pinning: asyncio.Future[tuple[PinReport, ...]]) -> None:
    """Removes the new pins, except those that another request has completed meanwhile."""
    with contextlib.suppress(AnaphoraError):  # pinning was refused, or the engine is gone
        for report in await pinning:
            if report.new and report.id not in service.completed_pins:
                with contextlib.suppress(NotFound):  # another request has unpinned it
                    await service.engine.unpin(ids=[report.id])


def _prefix(request: Request) -> Prefix:
    return Prefix(request.prompt_token_ids, request.cache_salt)


def _pin_json(report: PinReport) -> dict[str, Any]:
    return {
        "id": report.id,
        "object": "cache.pin",
        "tokens": report.tokens,
        "kept_tokens": report.kept_tokens,
    }


# --- the list -------------------------------------------------------------------------------------------------------


async def list_prefixes(service: Service, http: HttpRequest) -> Response:
    """GET /v1/cache/prefixes: the shared prefixes under the caller's salt, what they saved, and the pins."""
    limit, salt = _limit(http), _salt(http)
    found = await service.engine.list_prefixes(salt, limit)
    return json_response(await service.in_background_thread(_list_json, found, service.text.tokenizer, time.time()))


def _limit(http: HttpRequest) -> int:
    for name in http.query_params:
        if name == "cache_salt":
            raise InvalidRequest(f"send the salt as the header {SALT_HEADER}: URLs are written to logs", param=name)
        if name != "limit":
            raise InvalidRequest(f"there is no parameter {name!r:.80}; there is limit", param=name[:80])
    text = http.query_params.get("limit", str(DEFAULT_LIMIT))
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not 1 <= int(text) <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_LIMIT}, got {text!r:.80}", param="limit")
    return int(text)


def _salt(http: HttpRequest) -> str | None:
    """Returns the salt from the header, decoded as UTF-8 like a body."""
    given = http.headers.get(SALT_HEADER)
    try:
        salt = None if given is None else given.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{SALT_HEADER} must be text in UTF-8", param=SALT_HEADER) from None
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise InvalidRequest(f"{SALT_HEADER} must be text of 1 to {MAX_SALT_LENGTH} characters", param=SALT_HEADER)
    return salt


def _list_json(found: PrefixList, tokenizer: Tokenizer, now: float) -> dict[str, Any]:
    shared = [
        {
            "object": "cache.prefix",
            "tokens": prefix.tokens,
            "hits": prefix.hits,
            "tokens_saved": prefix.tokens_saved,
            "last_used": round(now - prefix.idle_s, 3),
            "pinned": prefix.pinned,
            **_texts(tokenizer, prefix.start, prefix.end),
        }
        for prefix in found.shared
    ]
    return {
        "object": "list",
        "data": shared,
        "total": found.total,
        "pins": [_pin_json(report) | _texts(tokenizer, report.start, report.end) for report in found.pins],
        "pinned_blocks": found.pinned_blocks,
        "max_pinned_blocks": found.max_pinned_blocks,
    }


def _texts(tokenizer: Tokenizer, start: Sequence[int], end: Sequence[int]) -> dict[str, str]:
    """Returns the texts at both ends of the prefix, without characters that the cut has split."""
    return {
        "text_start": tokenizer.decode(start, False).rstrip("\ufffd"),
        "text_end": tokenizer.decode(end, False).strip("\ufffd"),
    }

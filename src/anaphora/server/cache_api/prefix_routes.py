"""The routes under /v1/cache about beginnings of prompts: compute them, keep them, list what is shared.

A beginning is named by a request body: its prompt counts, what it says of the answer does not.
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
from anaphora.server.api import prompts, responses
from anaphora.server.api.answers import Answer
from anaphora.server.api.protocol import ChatPrefix, PinId, TextPrefix
from anaphora.server.service import Call, Service, internal_id
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.reports import PinReport, Prefix, PrefixList
from anaphora.types.request import MAX_SALT_LENGTH, Request
from anaphora.types.sampling import SamplingParams

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
SALT_HEADER = "X-Cache-Salt"

_COMPUTE_ONLY = SamplingParams(max_tokens=0, temperature=0)


async def warm(service: Service, call: Call) -> Response:
    """Compute the beginnings; they stay like any prompt, until they are evicted."""
    answers = await compute(service, call, await requests(service, call))
    data = [
        {"index": index, "object": "cache.prefix", **_lengths(answer.request, answer.cached_tokens)}
        for index, answer in enumerate(answers)
    ]
    return responses.json_response({"object": "list", "data": data, "usage": responses.usage(answers)})


async def pin(service: Service, call: Call) -> Response:
    """Compute the beginnings and keep them."""
    reports = await keep(service, call)
    return responses.json_response(
        {"object": "list", "data": [_kept(report) | {"new": report.new} for report in reports]}
    )


async def unpin(service: Service, call: Call) -> Response:
    """Keep the beginnings no longer. NotFound, and nothing done, where one is not pinned."""
    body: ChatPrefix | TextPrefix | PinId = call.request
    if isinstance(body, PinId):
        gone = await service.engine.unpin(ids=[body.id] if isinstance(body.id, str) else body.id)
    else:
        gone = await service.engine.unpin(list(map(_prefix, await requests(service, call))))
    service.firm_pins.difference_update(report.id for report in gone)
    return responses.json_response({"object": "list", "data": list(map(_kept, gone))})


async def requests(service: Service, call: Call) -> list[Request]:
    """The beginnings that a body names, as requests that compute them and generate nothing."""
    return await service.in_thread(_requests, service, call)


def _requests(service: Service, call: Call) -> list[Request]:
    body: ChatPrefix | TextPrefix = call.request
    tokenizer, info = service.text.tokenizer, service.info
    if isinstance(body, ChatPrefix):
        limit = info.max_model_len if body.truncate_prompt_tokens is None else None
        given = [prompts.beginning(body, tokenizer, service.text.template, limit)]
    else:
        given = prompts.completion_prompts(body, tokenizer, info.max_model_len)
    usable = [prompts.usable(prompt, body, info) for prompt in given]
    return [
        Request(f"{internal_id(call)}-{i}", prompt.token_ids, _COMPUTE_ONLY, call.arrival, cache_salt=body.cache_salt)
        for i, prompt in enumerate(usable)
    ]


async def compute(service: Service, call: Call, wanted: Sequence[Request]) -> list[Answer]:
    """Run the requests to their end."""
    answers = [Answer(request, prompts.Prompt(request.prompt_token_ids), service.text.tokenizer) for request in wanted]
    if answers:
        async with contextlib.aclosing(service.run(call, answers)) as pieces:
            async for _ in pieces:
                pass
    return answers


async def keep(service: Service, call: Call) -> tuple[PinReport, ...]:
    """Pin the beginnings of a call and compute what is missing. If that fails none is pinned that was not before."""
    wanted = await requests(service, call)
    prefixes = list(map(_prefix, wanted))
    pinning = asyncio.ensure_future(service.engine.pin(prefixes))
    try:
        before = await asyncio.shield(pinning)
        missing = [r for r, report in zip(wanted, before, strict=True) if report.kept_tokens < report.tokens]
        await compute(service, call, missing)
        after = await service.engine.pin(prefixes)
    except BaseException:
        await asyncio.shield(_undo(service, pinning))
        raise
    service.firm_pins.update(report.id for report in after)
    return tuple(
        PinReport(now.id, now.tokens, now.kept_tokens, then.new) for then, now in zip(before, after, strict=True)
    )


async def _undo(service: Service, pinning: asyncio.Future[tuple[PinReport, ...]]) -> None:
    """Unpin what was pinned anew, but for what another call has completed meanwhile."""
    with contextlib.suppress(AnaphoraError):  # it was refused, or the engine is gone
        for report in await pinning:
            if report.new and report.id not in service.firm_pins:
                with contextlib.suppress(NotFound):  # another has unpinned it
                    await service.engine.unpin(ids=[report.id])


def _prefix(request: Request) -> Prefix:
    return Prefix(request.prompt_token_ids, request.cache_salt)


def _lengths(request: Request, cached: int) -> dict[str, int]:
    return {"tokens": len(request.prompt_token_ids), "cached_tokens": cached}


def _kept(report: PinReport) -> dict[str, Any]:
    return {
        "id": report.id,
        "object": "cache.pin",
        "tokens": report.tokens,
        "kept_tokens": report.kept_tokens,
    }


# --- the list -------------------------------------------------------------------------------------------------------


async def listing(service: Service, http: HttpRequest) -> Response:
    """What prompts under the caller's salt share and what that saved, and what is pinned under it."""
    limit, salt = _limit(http), _salt(http)
    found = await service.engine.list_prefixes(salt, limit)
    return responses.json_response(await service.aside(_list, found, service.text.tokenizer, time.time()))


def _limit(http: HttpRequest) -> int:
    for name in http.query_params:
        if name == "cache_salt":
            raise InvalidRequest(f"send the salt as the header {SALT_HEADER}: addresses get into logs", param=name)
        if name != "limit":
            raise InvalidRequest(f"there is no parameter {name!r:.80}; there is limit", param=name[:80])
    text = http.query_params.get("limit", str(DEFAULT_LIMIT))
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not 1 <= int(text) <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_LIMIT}, got {text!r:.80}", param="limit")
    return int(text)


def _salt(http: HttpRequest) -> str | None:
    """Of the header, in UTF-8 as in a body."""
    given = http.headers.get(SALT_HEADER)
    try:
        salt = None if given is None else given.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{SALT_HEADER} must be text in UTF-8", param=SALT_HEADER) from None
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise InvalidRequest(f"{SALT_HEADER} must be text of 1 to {MAX_SALT_LENGTH} characters", param=SALT_HEADER)
    return salt


def _list(found: PrefixList, tokenizer: Tokenizer, now: float) -> dict[str, Any]:
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
        "pins": [_kept(report) | _texts(tokenizer, report.start, report.end) for report in found.pins],
        "pinned_blocks": found.pinned_blocks,
        "max_pinned_blocks": found.max_pinned_blocks,
    }


def _texts(tokenizer: Tokenizer, start: Sequence[int], end: Sequence[int]) -> dict[str, str]:
    """How the beginning starts and ends; characters that are cut apart there are left out."""
    return {
        "text_start": tokenizer.decode(start, False).rstrip("\ufffd"),
        "text_end": tokenizer.decode(end, False).strip("\ufffd"),
    }

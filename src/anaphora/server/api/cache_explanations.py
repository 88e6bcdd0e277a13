"""Explains a request's lookup in the prefix cache: as a response header, and as a field of the body.

The engine's reports contain nothing of another salt (cache.explain), so neither do the explanations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anaphora.server.api import prompt_positions
from anaphora.server.api.prompt_run import PromptRun
from anaphora.server.api.prompts import Prompt
from anaphora.server.api.request_context import RequestContext
from anaphora.server.service import Service
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import PromptDone
from anaphora.types.reports import CacheReport, Neighbour

HEADER = "x-anaphora-cache"
FIELD = "cache_explanations"
MAX_HEADER_PROMPTS = 16
"""A body may have many prompts; a header must stay short."""
SHOWN_TOKENS = 32
"""How many tokens are shown before and after the position at which a prompt differs from an earlier one."""


def header(runs: Sequence[PromptRun]) -> dict[str, str]:
    """Returns the header: an RFC 8941 list with one item per prompt: ``diverged;cached=1536;prompt=2042;at=1536``.

    Covers the prompts that have been scheduled, among the first MAX_HEADER_PROMPTS.
    """
    items = [_item(run.done) for run in runs[:MAX_HEADER_PROMPTS] if run.done is not None]
    return {HEADER: ", ".join(items)} if items else {}


def _item(done: PromptDone) -> str:
    report = done.cache
    item = f"{report.reason};cached={report.cached_tokens};prompt={report.prompt_tokens};at={report.position}"
    return f"{item};waited={done.waited_s:.3f}" if report.waited else item


async def body_field(service: Service, context: RequestContext, runs: Sequence[PromptRun]) -> dict[str, Any]:
    """Returns the field of the response's body; empty if the request does not set ``explain_cache``."""
    if not context.body.explain_cache:
        return {}
    return {
        FIELD: [
            await service.in_background_thread(explanation, service, context, run.prompt, run.done.cache)
            for run in runs
            if run.done is not None
        ]
    }


def explanation(service: Service, context: RequestContext, prompt: Prompt, report: CacheReport) -> dict[str, Any]:
    """Returns a report in full, with the texts that differ and the place in the body of the first token that missed."""
    tokenizer = service.text.tokenizer
    result: dict[str, Any] = {
        "reason": report.reason,
        "detail": report.detail,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "position": report.position,
        "waited": report.waited,
        "place": None,
    }
    if report.feature:
        result["feature"] = report.feature
    result["place"] = prompt_positions.first_miss(service.text, context.body, prompt, report)
    if report.neighbour is not None:
        result["diverged"] = _diverged(tokenizer, prompt.token_ids, report.position, report.neighbour)
    if (eviction := report.eviction) is not None:
        model = service.info.model
        result["evicted"] = {
            "seconds_ago": round(eviction.seconds_ago, 3),
            "by": eviction.by or "other traffic",
            "lost_tokens": eviction.lost_tokens,
            "more_tokens": eviction.more_tokens or None,
            "more_bytes": eviction.more_tokens // model.block_size * model.bytes_per_block or None,
        }
    return result


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
        # The same text in other tokens: the client sent an answer back as text, and it was tokenized differently.
        "retokenised": shorter > 0 and text[:shorter] == other_text[:shorter],
    }

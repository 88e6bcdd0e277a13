"""POST …/render: the prompt that the model would get, and how it differs from what was sent. Computes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.responses import Response

from anaphora.server.api.engine_requests import engine_requests
from anaphora.server.api.prompts import Prompt
from anaphora.server.api.protocol import ChatRequest, CompletionRequest
from anaphora.server.api.request_context import RequestContext
from anaphora.server.http.json_responses import json_response
from anaphora.server.service import Service


async def render_chat(service: Service, context: RequestContext) -> Response:
    """Answers with the prompt of a chat. The fields that vLLM has, too, have its names."""
    (rendered,) = await service.in_background_thread(_render, service, context, "chatcmpl")
    return json_response(rendered)


async def render_completion(service: Service, context: RequestContext) -> Response:
    """Answers with a list: the same for each prompt of a completion body."""
    return json_response(await service.in_background_thread(_render, service, context, "cmpl"))


def _render(service: Service, context: RequestContext, id_prefix: str) -> list[dict[str, Any]]:
    body: ChatRequest | CompletionRequest = context.body
    requests = engine_requests(service, context)
    name = context.public_id(id_prefix)
    return [
        {
            "request_id": f"{name}-{index}" if len(requests) > 1 else name,
            "model": service.model_name(body.model),
            "prompt": service.text.tokenizer.decode(prompt.token_ids, False) if prompt.text is None else prompt.text,
            "token_ids": prompt.token_ids,
            "prompt_tokens": len(prompt.token_ids),
            "changes": _changes(service, body, index, prompt),
            "sampling_params": dataclasses.asdict(request.sampling),
            "eos_token_ids": request.eos_token_ids,
            "stream": bool(body.stream),
            "cache_salt": body.cache_salt,
        }
        for index, (prompt, request) in enumerate(requests)
    ]


def _changes(service: Service, body: ChatRequest | CompletionRequest, index: int, prompt: Prompt) -> list[str]:
    """Returns, in words, how the prompt differs from what the client sent."""
    template = service.text.template
    changes: list[str] = []
    cut = prompt.text is None
    if isinstance(body, CompletionRequest):
        given = body.prompts()[index]
        cut = cut if isinstance(given, str) else len(given) > len(prompt.token_ids)
    elif template is not None:
        changes += template.changes(body.messages)
        if body.tools and template.drops_tools:
            changes.append("tools: the chat template leaves them out")
    if cut:
        changes.append(
            f"prompt: cut to {len(prompt.token_ids)} tokens, from the {body.truncation_side or 'left'} "
            "(truncate_prompt_tokens)"
        )
    return changes

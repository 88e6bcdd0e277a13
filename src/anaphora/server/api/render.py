"""POST …/render: what the model would be given, and what was changed on the way there. Nothing is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.responses import Response

from anaphora.server.api.prompts import Prompt
from anaphora.server.api.protocol import ChatRequest, CompletionRequest
from anaphora.server.api.responses import json_response
from anaphora.server.service import Call, Service, public_id


async def render_chat(service: Service, call: Call) -> Response:
    """The prompt of a chat. ``request_id``, ``token_ids``, ``sampling_params`` and ``model`` are named as in vLLM."""
    (rendered,) = await service.aside(_rendered, service, call, "chatcmpl")
    return json_response(rendered)


async def render_text(service: Service, call: Call) -> Response:
    """The same for each prompt of a completion body."""
    return json_response(await service.aside(_rendered, service, call, "cmpl"))


def _rendered(service: Service, call: Call, kind: str) -> list[dict[str, Any]]:
    body: ChatRequest | CompletionRequest = call.request
    ready = service.engine_requests(call)
    name = public_id(call, kind)
    return [
        {
            "request_id": f"{name}-{index}" if len(ready) > 1 else name,
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
        for index, (prompt, request) in enumerate(ready)
    ]


def _changes(service: Service, body: ChatRequest | CompletionRequest, index: int, prompt: Prompt) -> list[str]:
    """What is not as the client wrote it, in words."""
    template = service.text.template
    found: list[str] = []
    cut = prompt.text is None
    if isinstance(body, CompletionRequest):
        given = body.prompts()[index]
        cut = cut if isinstance(given, str) else len(given) > len(prompt.token_ids)
    elif template is not None:
        found += template.changes(body.messages)
        if body.tools and template.drops_tools:
            found.append("tools: the chat template leaves them out")
    if cut:
        found.append(
            f"prompt: cut to {len(prompt.token_ids)} tokens, from the {body.truncation_side or 'left'} "
            "(truncate_prompt_tokens)"
        )
    return found

"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from anaphora.server.api import prompts
from anaphora.server.api.protocol import DetokenizeRequest, TokenizeRequest
from anaphora.server.api.request_context import RequestContext
from anaphora.server.http.json_responses import json_response
from anaphora.server.service import Service


async def tokenize(service: Service, context: RequestContext) -> Response:
    """Answers with the token ids of a text or of rendered messages."""
    return json_response(await service.in_background_thread(_tokenize, service, context.body))


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


async def detokenize(service: Service, context: RequestContext) -> Response:
    """Answers with the text of token ids."""
    return json_response(await service.in_background_thread(_detokenize, service, context.body))


def _detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    if body.tokens:
        prompts.check_ids(body.tokens, service.info.model.vocab_size, "tokens")
    return {"prompt": service.text.tokenizer.decode(body.tokens, False)}

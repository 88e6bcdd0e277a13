"""Turns a validated body into the requests that the engine gets: one for each prompt."""

from __future__ import annotations

import dataclasses

from anaphora.server.api import prompts
from anaphora.server.api.body_parsing import sampling_params
from anaphora.server.api.protocol import ChatRequest, CompletionRequest
from anaphora.server.api.request_context import RequestContext
from anaphora.server.service import Service
from anaphora.types.request import Request
from anaphora.types.sampling import SamplingParams


def engine_requests(service: Service, context: RequestContext) -> list[tuple[prompts.Prompt, Request]]:
    """Returns the prompts of a body, each with its engine request. Runs in a worker thread.

    Raises:
        InvalidRequest: a sampling parameter is out of range, or a prompt does not fit.
    """
    body: ChatRequest | CompletionRequest = context.body
    tokenizer, defaults, info = service.text.tokenizer, service.text.defaults, service.info
    sampling = sampling_params(body, defaults.sampling)
    sampling.check_vocabulary(info.model.vocab_size)
    _warn(service, body, sampling)
    if isinstance(body, ChatRequest):
        limit = info.max_model_len if body.truncate_prompt_tokens is None else None
        given = [prompts.chat_prompt(body, tokenizer, service.text.template, limit)]
    else:
        given = prompts.completion_prompts(body, tokenizer, info.max_model_len)
    result = []
    for index, prompt in enumerate(given):
        prompt, max_tokens = prompts.fit(prompt, sampling, body, info)
        request = Request(
            id=f"{context.engine_id}-{index}" if len(given) > 1 else context.engine_id,
            prompt_token_ids=prompt.token_ids,
            sampling=dataclasses.replace(sampling, max_tokens=max_tokens),
            arrival=context.arrival,
            eos_token_ids=defaults.eos_token_ids,
            cache_salt=body.cache_salt,
        )
        result.append((prompt, request))
    return result


def _warn(service: Service, body: ChatRequest | CompletionRequest, sampling: SamplingParams) -> None:
    """Warns, once each, of what a client may not know: tools that the model never sees, prompts that reuse nothing."""
    template = service.text.template
    if isinstance(body, ChatRequest) and body.tools and template is not None and template.drops_tools:
        service.warn_once("requests give tools, but the chat template leaves them out: the model never sees them")
    if sampling.prompt_logprobs is not None:
        service.warn_once(
            "requests ask for prompt_logprobs (or echo with logprobs), which need every position computed: they "
            "reuse nothing of the cache. Send them to a server of their own, or ask for logprobs of the answer"
        )

"""Parses request bodies: decodes JSON strictly, refuses fields by name, and reads sampling parameters.

Fields of OpenAI or vLLM that would change the answer, and that this server does not support, are refused unless they
have the value that changes nothing. Unknown fields are ignored and named in the debug log, as in vLLM.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from typing import Any, TypeVar

import msgspec

from anaphora.errors import InvalidRequest
from anaphora.server.api.protocol import Body, ChatRequest, CompletionRequest
from anaphora.types.sampling import SamplingParams

logger = logging.getLogger("anaphora.server")

T = TypeVar("T", bound=Body)

_GUIDED = "it needs guided decoding, which this server does not support"
_UNSUPPORTED = "this server does not support it"
_TEXT_FORMAT = ({"type": "text"},)

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (_TEXT_FORMAT, _GUIDED),
    "structured_outputs": ((), _GUIDED),
    "guided_json": ((), _GUIDED),
    "guided_regex": ((), _GUIDED),
    "guided_choice": ((), _GUIDED),
    "guided_grammar": ((), _GUIDED),
    "functions": (([],), "it is OpenAI's former name for tools; use tools"),
    "function_call": (("none", "auto"), "it is OpenAI's former name for tool_choice; use tool_choice"),
    "suffix": (("",), "filling in the middle is not supported"),
    "prompt_embeds": ((), _UNSUPPORTED),
    "bad_words": (([],), _UNSUPPORTED),
    "use_beam_search": ((False,), _UNSUPPORTED),
    "length_penalty": ((1.0,), "it belongs to beam search"),
    "logprob_token_ids": (([],), _UNSUPPORTED),
    "token_ids_logprob": (([],), _UNSUPPORTED),
    "spaces_between_special_tokens": ((True,), _UNSUPPORTED),
    "repetition_detection": ((), _UNSUPPORTED),
    "thinking_token_budget": ((), _UNSUPPORTED),
    "watermarking": ((False,), _UNSUPPORTED),
    "documents": (([],), _UNSUPPORTED),
    "chat_template": ((), "a template from a client is a program; the server's own is set by --chat-template"),
    "audio": ((), _UNSUPPORTED),
    "modalities": ((["text"],), _UNSUPPORTED),
    "prediction": ((), _UNSUPPORTED),
    "web_search_options": ((), _UNSUPPORTED),
    "mm_processor_kwargs": (({},), _UNSUPPORTED),
    "media_io_kwargs": (({},), _UNSUPPORTED),
    "mm_payload": ((), _UNSUPPORTED),
    "return_mm_kwargs": ((False,), _UNSUPPORTED),
    "return_tokens_as_token_ids": ((False,), _UNSUPPORTED),
    "return_token_offsets": ((False,), _UNSUPPORTED),
    "return_prompt_text": ((False,), _UNSUPPORTED),
    "routed_experts_prompt_start": ((), _UNSUPPORTED),
    "kv_transfer_params": ((), _UNSUPPORTED),
    "ec_transfer_params": ((), _UNSUPPORTED),
    "vllm_xargs": (({},), _UNSUPPORTED),
}
"""Unsupported fields that would change the answer: the values besides null that do not, and why others are refused."""

_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "priority", "session_id", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "stream_interval", "include_reasoning", "verbosity"),
}
"""Fields about a request that do not change its answer."""


def parse(body: bytes, *body_types: type[T]) -> tuple[T, dict[str, Any]]:
    """Returns the checked body, and the body as plain JSON values.

    Args:
        body: JSON.
        body_types: if several, the one whose required field (``messages``, ``prompt``, …) is present is used.

    Raises:
        InvalidRequest: names the field that is wrong.
    """
    try:
        plain = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # Covers NaN and Infinity too: JSON has no such numbers.
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(plain, dict):
        raise InvalidRequest("the body must be a JSON object")
    body_type = _body_type(plain, body_types)
    for name in plain.keys() & REFUSED.keys():
        allowed, why = REFUSED[name]
        if plain[name] is not None and plain[name] not in allowed:
            raise InvalidRequest(f"{name} is not supported: {why}", param=name)
    try:
        request = msgspec.convert(plain, body_type)
    except msgspec.ValidationError as error:
        raise _invalid_request(error) from None
    request.check()
    if body_type.strict or logger.isEnabledFor(logging.DEBUG):
        known = {field.name for field in msgspec.structs.fields(body_type)} | REFUSED.keys() | _WITHOUT_EFFECT
        unknown = sorted(plain.keys() - known)
        if unknown and body_type.strict:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidRequest(f"there is no field {unknown[0]!r:.80}{hint}", param=unknown[0][:80])
        if unknown:
            logger.debug("ignored unknown fields: %.200s", ", ".join(map(repr, unknown)))
    return request, plain


def _body_type(plain: dict[str, Any], body_types: tuple[type[T], ...]) -> type[T]:
    if len(body_types) == 1:
        return body_types[0]
    required = {field.name: kind for kind in body_types for field in msgspec.structs.fields(kind) if field.required}
    given = [name for name in required if plain.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"the body must hold one of {', '.join(required)}, it has {' and '.join(given) or 'none'}")
    return required[given[0]]


def _invalid_request(error: msgspec.ValidationError) -> InvalidRequest:
    """Names the field, which msgspec gives as "… - at `$.field`" or "Object missing required field `field`"."""
    text = str(error)
    if missing := re.match(r"Object missing required field `(\w+)`$", text):
        return InvalidRequest(f"{missing[1]} is required", param=missing[1])
    if not (at := re.search(r" - at `\$\.?(.*)`$", text)):
        return InvalidRequest(text)
    reason = text[: at.start()]
    return InvalidRequest(f"{at[1]}: {reason[0].lower()}{reason[1:]}", param=at[1].replace("[...]", ""))


def sampling_params(request: ChatRequest | CompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """Returns the request's sampling parameters over ``defaults``; ``max_tokens`` is None if neither sets it.

    Raises:
        InvalidRequest: names the field that is out of range.
    """
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAMPLING}
    given["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    given["logit_bias"] = _token_biases(request.logit_bias)
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            given["max_tokens"] = request.max_completion_tokens
        if request.top_logprobs is not None and request.top_logprobs < 0:
            raise InvalidRequest("top_logprobs must be at least 0", param="top_logprobs")
        given["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
        defaults = {"max_tokens": None} | defaults
    else:
        given["logprobs"] = request.logprobs
        if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
            given["prompt_logprobs"] = request.logprobs
    scores_only = isinstance(request, CompletionRequest) and bool(request.echo)
    if given["max_tokens"] == 0 and not scores_only:
        raise InvalidRequest("max_tokens must be at least 1 (0 only with echo in /v1/completions)", param="max_tokens")
    try:
        return SamplingParams(**defaults | {name: value for name, value in given.items() if value is not None})
    except InvalidRequest as error:
        if isinstance(request, ChatRequest) and error.param == "logprobs":
            raise InvalidRequest(f"top_{error.message}", param="top_logprobs") from None
        raise


_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("allowed_token_ids", "seed", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("ignore_eos", "min_tokens", "max_tokens", "prompt_logprobs"),
)


def _token_biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    for key, bias in biases.items():
        if not re.fullmatch(r"\d{1,10}", key, re.ASCII):
            raise InvalidRequest(f"logit_bias takes token ids as keys, got {key!r:.40}", param="logit_bias")
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of {key} must be a finite number", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}

"""The JSON forms of answers: OpenAI's fields, and vLLM's where it adds some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from anaphora.errors import AnaphoraError
from anaphora.server.api.answers import Answer
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.batch import TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have (vLLM's value)."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_body(error: AnaphoraError) -> dict[str, Any]:
    return {
        "error": {"message": printable(error.message), "type": error.code, "param": error.param, "code": error.status}
    }


def printable(text: str) -> str:
    """Without lone surrogates, which no UTF-8 message can hold."""
    return text.encode("utf-8", "replace").decode()


def error_response(error: AnaphoraError, headers: dict[str, str] | None = None) -> Response:
    return json_response(error_body(error), error.status, headers)


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """A prompt counts once, however many choices it has."""
    prompt = sum(len(answer.request.prompt_token_ids) for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers)
    return usage_of(prompt, completion, cached)


def usage_of(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """OpenAI's form for a chat: each token with its bytes and its ``top`` most likely alternatives."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}

    return {
        "content": [
            one(e.token_id, e.logprob) | {"top_logprobs": [one(t, logprob) for t, logprob in e.top[:top]]}
            for e in entries
        ]
    }


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    tokenizer: Tokenizer,
    top: int,
    offset: int = 0,
) -> dict[str, Any]:
    """OpenAI's form for a completion. ``offset`` is where the first token's text begins in the choice's text."""
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
        "top_logprobs": [
            None
            if e is None
            else {tokenizer.token_text(t): finite(lp) for t, lp in ((e.token_id, e.logprob), *e.top[:top])}
            for e in entries
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(entries: Sequence[TokenLogprobs | None] | None, tokenizer: Tokenizer) -> list[Any] | None:
    """vLLM's form: for each prompt token None (the first) or the likely ones by token id, the real one among them."""
    if entries is None:
        return None
    return [None if entry is None else _prompt_entry(entry, tokenizer) for entry in entries]


def _prompt_entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
    ranked[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, (logprob, rank) in ranked.items()
    }


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)

"""Parts of a response that routes share: usage and log-probabilities, in OpenAI's and vLLM's format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from anaphora.server.api.prompt_run import PromptRun
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.batch import TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have (vLLM's value)."""


def usage(runs: Sequence[PromptRun]) -> dict[str, Any]:
    """Returns the token counts so far. A prompt counts once, however many choices it has."""
    prompt = sum(len(run.request.prompt_token_ids) for run in runs)
    completion = sum(run.completion_tokens for run in runs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(run.cached_tokens for run in runs)},
    }


def chat_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """Returns OpenAI's format for chats: each token with its bytes and its ``top`` most likely alternatives."""

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
    """Returns OpenAI's format for completions. ``offset`` is where the first token begins in the choice's text."""
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
    """Returns vLLM's format: for each prompt token except the first, the likely ones and the real one by token id."""
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
    """Returns ``logprob``, or LOWEST_LOGPROB if it is lower."""
    return max(logprob, LOWEST_LOGPROB)

"""From a checked body to token ids and engine requests. Runs in worker threads: nothing here waits or shares state."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from anaphora.errors import InvalidRequest
from anaphora.server.api.protocol import ChatRequest, CompletionRequest, Generation, TokenizeRequest
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import EngineInfo
from anaphora.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is what the client gave or the template rendered; None where the client gave token ids."""

    token_ids: tuple[int, ...]
    text: str | None = None


def chat_prompt(
    request: ChatRequest | TokenizeRequest,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    limit: int | None = None,
) -> Prompt:
    """Render and encode a conversation of at most ``limit`` tokens.

    The template writes its own special tokens, so encoding adds none.
    """
    if template is None:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions or give the server --chat-template", param="messages"
        )
    text = template.render(request.messages or [], tools=request.tools or None, **template_options(request))
    return encode(text, tokenizer, add_special_tokens=bool(request.add_special_tokens), limit=limit, where="messages")


def template_options(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What ChatTemplate.render is told beside messages and tools."""
    kwargs: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
    return {
        "add_generation_prompt": _generation_prompt(request),
        "continue_final_message": bool(request.continue_final_message),
        "kwargs": kwargs or None,
    }


def beginning(request: ChatRequest, tokenizer: Tokenizer, template: ChatTemplate | None, limit: int | None) -> Prompt:
    """What conversations that begin with these messages share.

    Where the last message leaves the word to the user (a system text, an answer), that ends where the next user
    message begins: as far as prompts with different ones are the same. Else it is the whole prompt.
    """
    last = (request.messages or [{}])[-1].get("role")
    given = request.add_generation_prompt is not None or request.continue_final_message
    if template is None or given or last in ("user", "tool"):
        return chat_prompt(request, tokenizer, template, limit)
    following = [
        msgspec.structs.replace(request, messages=[*request.messages, {"role": "user", "content": text}])
        for text in _USERS
    ]
    prompts = [chat_prompt(body, tokenizer, template, limit) for body in following]
    columns = zip(*(prompt.token_ids for prompt in prompts), strict=False)
    shared = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    if not shared:
        raise InvalidRequest(
            "the chat template puts nothing before the user's message that conversations share", param="messages"
        )
    return Prompt(tuple(shared))


_USERS = ("a", "Z", "7", "\u4f60")
"""Beginnings of different user messages: a letter, a capital, a digit, a character of another script."""


def _generation_prompt(request: ChatRequest | TokenizeRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


def encode(
    text: str, tokenizer: Tokenizer, *, add_special_tokens: bool, limit: int | None = None, where: str = "prompt"
) -> Prompt:
    """Token ids of a text. Beyond ``limit`` tokens InvalidRequest, and then not all of a long text is encoded.

    ``where`` is the field that the error names.
    """
    if limit is not None:
        size = _CHARACTERS_A_TOKEN * limit
        while size < len(text):
            if len(tokenizer.encode(text[:size], add_special_tokens=False)) > limit + _EDGE_TOKENS:
                raise InvalidRequest(
                    f"This model's maximum context length is {limit} tokens; the first {size} of the prompt's "
                    f"{len(text)} characters have more. Shorten it",
                    param=where,
                )
            size *= 2
    return Prompt(tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens)), text)


_CHARACTERS_A_TOKEN = 16
"""A text with more characters than this for each token of the window is too long in all likelihood."""
_EDGE_TOKENS = 64
"""The end of a cut text may have more tokens than it has in the whole one."""


def completion_prompts(request: CompletionRequest, tokenizer: Tokenizer, limit: int) -> list[Prompt]:
    special = request.add_special_tokens is not False
    most = limit if request.truncate_prompt_tokens is None else None
    return [
        encode(given, tokenizer, add_special_tokens=special, limit=most)
        if isinstance(given, str)
        else Prompt(tuple(given))
        for given in request.prompts()
    ]


def fit(prompt: Prompt, sampling: SamplingParams, request: Generation, info: EngineInfo) -> tuple[Prompt, int]:
    """The prompt cut as asked, and the tokens that its answer may have.

    InvalidRequest as by ``usable``, and where the prompt is longer than the window with ``max_tokens`` as the request
    gives it; a ``max_tokens`` that the request does not give is cut to the room left.
    """
    explicit = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        explicit = request.max_completion_tokens
    prompt = usable(prompt, request, info, explicit or 1)
    limit, length = info.max_model_len, len(prompt.token_ids)
    room = limit - length
    if explicit is not None and explicit > room:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens; {length} in the prompt and {explicit} asked "
            f"for in the answer are {length + explicit}. Ask for at most {room}, or leave max_tokens out",
            param="max_tokens",
        )
    return prompt, room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def usable(prompt: Prompt, request: Generation, info: EngineInfo, answer: int = 1) -> Prompt:
    """The prompt cut as asked (-1 leaves room for ``answer`` tokens).

    InvalidRequest where it is empty, holds ids beyond the vocabulary, or leaves no room for a token.
    """
    where = "messages" if isinstance(request, ChatRequest) else "prompt"
    limit = info.max_model_len
    if request.truncate_prompt_tokens is not None:
        keep = request.truncate_prompt_tokens
        if keep > limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most {limit}, got {keep}", param="truncate_prompt_tokens"
            )
        keep = max(1, limit - answer) if keep == -1 else keep
        if len(prompt.token_ids) > keep:
            prompt = Prompt(_cut(prompt.token_ids, keep, request.truncation_side or "left"))
    ids = prompt.token_ids
    if not ids:
        raise InvalidRequest("the prompt is empty: it must hold at least one token", param=where)
    check_ids(ids, info.model.vocab_size, where)
    if len(ids) >= limit:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens; the prompt has {len(ids)} tokens, "
            "which leaves no room for an answer. Shorten it",
            param=where,
        )
    return prompt


def _cut(ids: tuple[int, ...], keep: int, side: str) -> tuple[int, ...]:
    """``side`` is the side that is cut off."""
    return ids[len(ids) - keep :] if side == "left" else ids[:keep]


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"{param} holds token id {low if low < 0 else high}; this model's ids run from 0 to {vocab_size - 1}",
            param=param,
        )

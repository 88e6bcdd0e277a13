"""Renders and encodes the prompts of a body. Runs in worker threads: nothing here blocks or shares state."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from anaphora.errors import InvalidRequest
from anaphora.server.api.protocol import ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import EngineInfo
from anaphora.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. ``text`` is the client's or the rendered one; None if the client gave token ids or it was cut."""

    token_ids: tuple[int, ...]
    text: str | None = None


def chat_prompt(
    request: ChatRequest | TokenizeRequest,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    limit: int | None = None,
) -> Prompt:
    """Renders and encodes a conversation. Encoding adds no special tokens unless asked: the template writes them.

    Raises:
        InvalidRequest: there is no template, it refuses the messages, or the prompt has more than ``limit`` tokens.
    """
    if template is None:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions or give the server --chat-template", param="messages"
        )
    text = template.render(request.messages or [], tools=request.tools or None, **template_options(request))
    return encode(text, tokenizer, add_special_tokens=bool(request.add_special_tokens), limit=limit, where="messages")


def template_options(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Returns the arguments of ChatTemplate.render other than messages and tools."""
    kwargs: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
    return {
        "add_generation_prompt": _adds_generation_prompt(request),
        "continue_final_message": bool(request.continue_final_message),
        "kwargs": kwargs or None,
    }


def shared_prefix(
    request: ChatRequest, tokenizer: Tokenizer, template: ChatTemplate | None, limit: int | None
) -> Prompt:
    """Returns the longest prefix common to all conversations that begin with these messages.

    If the user speaks next (after a system text or an answer), it ends where the text of the next user message begins,
    which is found by rendering several. Otherwise it is the whole prompt. Raises InvalidRequest as chat_prompt does.
    """
    last = (request.messages or [{}])[-1].get("role")
    given = request.add_generation_prompt is not None or request.continue_final_message
    if template is None or given or last in ("user", "tool"):
        return chat_prompt(request, tokenizer, template, limit)
    following = [
        msgspec.structs.replace(request, messages=[*request.messages, {"role": "user", "content": text}])
        for text in _SAMPLE_USER_TEXTS
    ]
    prompts = [chat_prompt(body, tokenizer, template, limit) for body in following]
    columns = zip(*(prompt.token_ids for prompt in prompts), strict=False)
    shared = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    if not shared:
        raise InvalidRequest(
            "the chat template writes nothing before the user's message that conversations share", param="messages"
        )
    return Prompt(tuple(shared))


_SAMPLE_USER_TEXTS = ("a", "Z", "7", "\u4f60")
"""Texts that share no first character or token: a letter, a capital, a digit, a character of another script."""


def _adds_generation_prompt(request: ChatRequest | TokenizeRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


def encode(
    text: str, tokenizer: Tokenizer, *, add_special_tokens: bool, limit: int | None = None, where: str = "prompt"
) -> Prompt:
    """Encodes a text.

    Args:
        text: any length.
        tokenizer: the model's.
        add_special_tokens: add the tokenizer's BOS and the like.
        limit: maximum tokens; a much longer text is refused before all of it is encoded.
        where: the field that the error names.

    Raises:
        InvalidRequest: the text is over the limit.
    """
    if limit is not None:
        size = _CHARS_PER_TOKEN * limit
        while size < len(text):
            if len(tokenizer.encode(text[:size], add_special_tokens=False)) > limit + _EDGE_TOKENS:
                raise InvalidRequest(
                    f"This model's maximum context length is {limit} tokens; the first {size} of the prompt's "
                    f"{len(text)} characters have more. Shorten it",
                    param=where,
                )
            size *= 2
    return Prompt(tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens)), text)


_CHARS_PER_TOKEN = 16
"""A text with more characters per token of the window is almost certainly too long."""
_EDGE_TOKENS = 64
"""The end of a cut text may be encoded to more tokens than in the whole text."""


def completion_prompts(request: CompletionRequest, tokenizer: Tokenizer, limit: int) -> list[Prompt]:
    """Encodes the prompts of a completion body; raises InvalidRequest if one has more than ``limit`` tokens."""
    special = request.add_special_tokens is not False
    most = limit if request.truncate_prompt_tokens is None else None
    return [
        encode(given, tokenizer, add_special_tokens=special, limit=most)
        if isinstance(given, str)
        else Prompt(tuple(given))
        for given in request.prompts()
    ]


def fit(prompt: Prompt, sampling: SamplingParams, request: GenerationRequest, info: EngineInfo) -> tuple[Prompt, int]:
    """Returns the prompt, truncated if the request asks for it, and the maximum number of tokens of its answer.

    Raises:
        InvalidRequest: as ``truncated``; or prompt and the request's ``max_tokens`` exceed the window. A ``max_tokens``
            from the defaults is reduced to what is left instead.
    """
    explicit = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        explicit = request.max_completion_tokens
    prompt = truncated(prompt, request, info, explicit or 1)
    limit, length = info.max_model_len, len(prompt.token_ids)
    room = limit - length
    if explicit is not None and explicit > room:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens; {length} in the prompt and {explicit} asked "
            f"for in the answer are {length + explicit}. Ask for at most {room}, or leave max_tokens out",
            param="max_tokens",
        )
    return prompt, room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def truncated(prompt: Prompt, request: GenerationRequest, info: EngineInfo, answer_tokens: int = 1) -> Prompt:
    """Returns the prompt, truncated if the request asks for it (-1 leaves room for ``answer_tokens``).

    Raises:
        InvalidRequest: it is empty, has ids outside the vocabulary, or leaves no room for a token.
    """
    where = "messages" if isinstance(request, ChatRequest) else "prompt"
    limit = info.max_model_len
    if request.truncate_prompt_tokens is not None:
        keep = request.truncate_prompt_tokens
        if keep > limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most {limit}, got {keep}", param="truncate_prompt_tokens"
            )
        keep = max(1, limit - answer_tokens) if keep == -1 else keep
        if len(prompt.token_ids) > keep:
            prompt = Prompt(_cut_ids(prompt.token_ids, keep, request.truncation_side or "left"))
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


def _cut_ids(ids: tuple[int, ...], keep: int, side: str) -> tuple[int, ...]:
    """Keeps ``keep`` ids; ``side`` is the side that is cut off."""
    return ids[len(ids) - keep :] if side == "left" else ids[:keep]


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest, naming ``param``, if an id is outside the vocabulary. ``ids`` must not be empty."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"{param} holds token id {low if low < 0 else high}; this model's ids run from 0 to {vocab_size - 1}",
            param=param,
        )

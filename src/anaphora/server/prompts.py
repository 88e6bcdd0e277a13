"""From a checked body to token ids and engine requests. Runs in worker threads: nothing here waits or shares state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anaphora.errors import InvalidRequest
from anaphora.server.protocol import ChatRequest, CompletionRequest, Generation, TokenizeRequest
from anaphora.text.chat import ChatTemplate
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import EngineInfo, SamplingParams


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
    kwargs: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
    text = template.render(
        request.messages or [],
        tools=request.tools or None,
        add_generation_prompt=_generation_prompt(request),
        continue_final_message=bool(request.continue_final_message),
        kwargs=kwargs or None,
    )
    return encode(text, tokenizer, add_special_tokens=bool(request.add_special_tokens), limit=limit, where="messages")


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

    InvalidRequest where the prompt is empty, holds ids beyond the vocabulary, or is longer than the window with
    ``max_tokens`` as the request gives it; a ``max_tokens`` that the request does not give is cut to the room left.
    """
    explicit = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        explicit = request.max_completion_tokens
    where = "messages" if isinstance(request, ChatRequest) else "prompt"
    limit = info.max_model_len
    if request.truncate_prompt_tokens is not None:
        keep = request.truncate_prompt_tokens
        if keep > limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most {limit}, got {keep}", param="truncate_prompt_tokens"
            )
        keep = max(1, limit - (explicit or 1)) if keep == -1 else keep
        prompt = Prompt(_truncate(prompt.token_ids, keep, request.truncation_side or "left"))
    ids = prompt.token_ids
    if not ids:
        raise InvalidRequest("the prompt is empty: it must hold at least one token", param=where)
    check_ids(ids, info.model.vocab_size, where)
    room = limit - len(ids)
    if room < 1:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens; the prompt has {len(ids)} tokens, "
            "which leaves no room for an answer. Shorten it",
            param=where,
        )
    if explicit is not None and explicit > room:
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens; {len(ids)} in the prompt and {explicit} asked "
            f"for in the answer are {len(ids) + explicit}. Ask for at most {room}, or leave max_tokens out",
            param="max_tokens",
        )
    return prompt, room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def _truncate(ids: tuple[int, ...], keep: int, side: str) -> tuple[int, ...]:
    """``side`` is the side that is cut off."""
    if len(ids) <= keep:
        return ids
    return ids[len(ids) - keep :] if side == "left" else ids[:keep]


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"{param} holds token id {low if low < 0 else high}; this model's ids run from 0 to {vocab_size - 1}",
            param=param,
        )

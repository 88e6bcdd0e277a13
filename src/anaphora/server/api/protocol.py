"""Request bodies of the API: the fields of each and their checks. SamplingParams checks the ranges of its fields."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from anaphora.errors import InvalidRequest
from anaphora.types.request import MAX_SALT_LENGTH

MAX_PROMPTS = 1024
MAX_TOTAL_CHOICES = 4096
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_BYTES = 16 * 1024
MAX_REQUEST_ID_LENGTH = 256


class StreamOptions(msgspec.Struct):
    """``stream_options`` of OpenAI and vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """Base of all bodies. None means the same as an absent field. ``strict``: unknown fields are refused."""

    strict: ClassVar[bool] = False

    model: str | None = None

    def check(self) -> None:
        """Raises InvalidRequest for values that the field types do not exclude."""


class GenerationRequest(Body, kw_only=True):
    """Fields of both chat and text completions. Names and meaning are OpenAI's and vLLM's."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    explain_cache: bool | None = None

    def check(self) -> None:
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT_LENGTH:
            raise InvalidRequest(
                f"cache_salt must be text of 1 to {MAX_SALT_LENGTH} characters, got {len(self.cache_salt)}",
                param="cache_salt",
            )
        if self.request_id is not None and not 1 <= len(self.request_id) <= MAX_REQUEST_ID_LENGTH:
            raise InvalidRequest(
                f"request_id must be text of 1 to {MAX_REQUEST_ID_LENGTH} characters", param="request_id"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs is not supported with stream", param="prompt_logprobs")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < -1:
            raise InvalidRequest("truncate_prompt_tokens must be at least -1", param="truncate_prompt_tokens")
        if self.truncation_side not in (None, "left", "right"):
            raise InvalidRequest("truncation_side must be left or right", param="truncation_side")


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions. ``messages`` are passed to the chat template unchanged."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        check_conversation(self)
        if self.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest(
                f"tool_choice {self.tool_choice!r:.80} needs guided decoding, which this server does not support; "
                "use auto or none",
                param="tool_choice",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.echo:
            raise InvalidRequest("echo is for /v1/completions", param="echo")


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions. ``prompt``: text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest(
                f"best_of must equal n ({self.n or 1}) or be left out, got {self.best_of}", param="best_of"
            )
        if len(self.prompts()) * (self.n or 1) > MAX_TOTAL_CHOICES:
            raise InvalidRequest(f"prompts times n must be at most {MAX_TOTAL_CHOICES}", param="n")

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts as a list. Raises InvalidRequest for mixed or too many prompts."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise InvalidRequest("prompt must not be an empty list", param="prompt")
        if all(isinstance(item, int) for item in given):
            return [given]  # type: ignore[list-item]
        if any(isinstance(item, int) for item in given) or len({type(item) for item in given}) > 1:
            raise InvalidRequest("prompt must be text, texts, token ids, or lists of token ids", param="prompt")
        if len(given) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt takes at most {MAX_PROMPTS} prompts, got {len(given)}", param="prompt")
        return list(given)  # type: ignore[arg-type]


class ChatPrefix(ChatRequest, kw_only=True):
    """A chat body for the routes under /v1/cache: only its prompt is used. The fields about the answer are ignored."""

    strict: ClassVar[bool] = True


class CompletionPrefix(CompletionRequest, kw_only=True):
    """The same for a completion body."""

    strict: ClassVar[bool] = True


class PinIds(Body, kw_only=True):
    """POST /v1/cache/unpin by id: one id or a list, as POST /v1/cache/pin returned them."""

    strict: ClassVar[bool] = True

    id: str | list[str]

    def check(self) -> None:
        if not self.id:
            raise InvalidRequest("id must name at least one pin", param="id")


class TokenizeRequest(Body, kw_only=True):
    """POST /tokenize: ``prompt`` or ``messages``."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if self.messages is not None:
            check_conversation(self)


class DetokenizeRequest(Body, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]


def check_conversation(request: ChatRequest | TokenizeRequest) -> None:
    """Checks what chat templates rely on: messages have a role, and their content is text. Raises InvalidRequest."""
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    for index, message in enumerate(request.messages):
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidRequest(f"messages[{index}] needs a role", param=f"messages[{index}].role")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        where = f"messages[{index}].content"
        if not isinstance(content, list):
            raise InvalidRequest(f"{where} must be text, a list of text parts, or null", param=where)
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
                raise InvalidRequest(f"{where} takes parts of type text only, got {kind!r:.40}", param=where)
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    kwargs = request.chat_template_kwargs or {}
    if len(kwargs) > MAX_TEMPLATE_KWARGS or len(msgspec.json.encode(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequest(
            f"chat_template_kwargs takes at most {MAX_TEMPLATE_KWARGS} entries of {MAX_TEMPLATE_KWARGS_BYTES} bytes "
            "in all",
            param="chat_template_kwargs",
        )
    if taken := _TEMPLATE_NAMES & kwargs.keys():
        raise InvalidRequest(
            f"chat_template_kwargs must not set {', '.join(sorted(taken))}", param="chat_template_kwargs"
        )


_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}

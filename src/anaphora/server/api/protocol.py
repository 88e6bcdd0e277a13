"""Request bodies of the API: what each field may hold, and what is refused by name.

A body is decoded strictly. Fields that this server has are checked by type here and by range in SamplingParams;
fields of OpenAI's or vLLM's that would change the answer and that it lacks are refused unless they hold the value that
changes nothing; fields that nobody knows are ignored and named in the debug log, as vLLM does.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from typing import Any, ClassVar, TypeVar

import msgspec

from anaphora.errors import InvalidRequest
from anaphora.types.request import MAX_SALT_LENGTH
from anaphora.types.sampling import SamplingParams

logger = logging.getLogger("anaphora.server")

MAX_PROMPTS = 1024
MAX_TOTAL_CHOICES = 4096
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_BYTES = 16 * 1024
MAX_REQUEST_ID_LENGTH = 256

T = TypeVar("T", bound="Body")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """What every request may hold. None is the same as leaving it out. ``strict``: unknown fields are refused."""

    strict: ClassVar[bool] = False

    model: str | None = None


class Generation(Body, kw_only=True):
    """Fields of chat and text completions alike. Names and meaning are OpenAI's and vLLM's."""

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
            raise InvalidRequest("prompt_logprobs cannot be had with stream", param="prompt_logprobs")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < -1:
            raise InvalidRequest("truncate_prompt_tokens must be at least -1", param="truncate_prompt_tokens")
        if self.truncation_side not in (None, "left", "right"):
            raise InvalidRequest("truncation_side must be left or right", param="truncation_side")


class ChatRequest(Generation, kw_only=True):
    """POST /v1/chat/completions. ``messages`` go to the chat template as they are."""

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
                f"tool_choice {self.tool_choice!r:.80} needs guided decoding, which this server does not have; "
                "use auto or none",
                param="tool_choice",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.echo:
            raise InvalidRequest("echo is for /v1/completions", param="echo")


class CompletionRequest(Generation, kw_only=True):
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
        """The prompts one by one."""
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
    """A chat body as the routes under /v1/cache take it: its prompt counts, what it says of the answer does not."""

    strict: ClassVar[bool] = True


class TextPrefix(CompletionRequest, kw_only=True):
    """The same for a completion body."""

    strict: ClassVar[bool] = True


class PinId(Body, kw_only=True):
    """POST /v1/cache/unpin by name: the id or ids that pinning gave."""

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

    def check(self) -> None:
        pass


def check_conversation(request: ChatRequest | TokenizeRequest) -> None:
    """The shape that every template may rely on: messages with a role, and text wherever there is content."""
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

_GUIDED = "it needs guided decoding, which this server does not have"
_ABSENT = "this server does not have it"
_TEXT_FORMAT = ({"type": "text"},)

# Fields that would change the answer, the values besides null that change nothing, and why any other is refused.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (_TEXT_FORMAT, _GUIDED),
    "structured_outputs": ((), _GUIDED),
    "guided_json": ((), _GUIDED),
    "guided_regex": ((), _GUIDED),
    "guided_choice": ((), _GUIDED),
    "guided_grammar": ((), _GUIDED),
    "functions": (([],), "it is OpenAI's former name for tools; use tools"),
    "function_call": (("none", "auto"), "it is OpenAI's former name for tool_choice; use tool_choice"),
    "suffix": (("",), "the model fills in no middle"),
    "prompt_embeds": ((), _ABSENT),
    "bad_words": (([],), _ABSENT),
    "use_beam_search": ((False,), _ABSENT),
    "length_penalty": ((1.0,), "it belongs to beam search"),
    "logprob_token_ids": (([],), _ABSENT),
    "token_ids_logprob": (([],), _ABSENT),
    "spaces_between_special_tokens": ((True,), _ABSENT),
    "repetition_detection": ((), _ABSENT),
    "thinking_token_budget": ((), _ABSENT),
    "watermarking": ((False,), _ABSENT),
    "documents": (([],), _ABSENT),
    "chat_template": ((), "a template from a client is a program; the server's own is set by --chat-template"),
    "audio": ((), _ABSENT),
    "modalities": ((["text"],), _ABSENT),
    "prediction": ((), _ABSENT),
    "web_search_options": ((), _ABSENT),
    "mm_processor_kwargs": (({},), _ABSENT),
    "media_io_kwargs": (({},), _ABSENT),
    "mm_payload": ((), _ABSENT),
    "return_mm_kwargs": ((False,), _ABSENT),
    "return_tokens_as_token_ids": ((False,), _ABSENT),
    "return_token_offsets": ((False,), _ABSENT),
    "return_prompt_text": ((False,), _ABSENT),
    "routed_experts_prompt_start": ((), _ABSENT),
    "kv_transfer_params": ((), _ABSENT),
    "ec_transfer_params": ((), _ABSENT),
    "vllm_xargs": (({},), _ABSENT),
}

# Fields that say something about a request without changing its answer.
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "priority", "session_id", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "stream_interval", "include_reasoning", "verbosity"),
}


def parse(body: bytes, *kinds: type[T]) -> tuple[T, dict[str, Any]]:
    """The checked request and the body as plain values; InvalidRequest names the field that is wrong.

    Of several kinds it is the one whose required field is there: ``messages``, ``prompt`` and so on.
    """
    try:
        plain = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # Covers NaN and Infinity too: JSON has no such numbers.
        raise InvalidRequest(f"the body is no valid JSON: {error}") from None
    if not isinstance(plain, dict):
        raise InvalidRequest("the body must be a JSON object")
    kind = _kind(plain, kinds)
    for name in plain.keys() & REFUSED.keys():
        allowed, why = REFUSED[name]
        if plain[name] is not None and plain[name] not in allowed:
            raise InvalidRequest(f"{name} is not supported: {why}", param=name)
    try:
        request = msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise _explain(error) from None
    request.check()  # type: ignore[attr-defined]
    if kind.strict or logger.isEnabledFor(logging.DEBUG):
        known = {field.name for field in msgspec.structs.fields(kind)} | REFUSED.keys() | _WITHOUT_EFFECT
        unknown = sorted(plain.keys() - known)
        if unknown and kind.strict:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidRequest(f"there is no field {unknown[0]!r:.80}{hint}", param=unknown[0][:80])
        if unknown:
            logger.debug("ignored unknown fields: %.200s", ", ".join(map(repr, unknown)))
    return request, plain


def _kind(plain: dict[str, Any], kinds: tuple[type[T], ...]) -> type[T]:
    if len(kinds) == 1:
        return kinds[0]
    marks = {field.name: kind for kind in kinds for field in msgspec.structs.fields(kind) if field.required}
    given = [name for name in marks if plain.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"the body must hold one of {', '.join(marks)}, it has {' and '.join(given) or 'none'}")
    return marks[given[0]]


def _explain(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec says "… - at `$.field`" or "Object missing required field `field`"; the API names the field."""
    text = str(error)
    if missing := re.match(r"Object missing required field `(\w+)`$", text):
        return InvalidRequest(f"{missing[1]} is required", param=missing[1])
    if not (at := re.search(r" - at `\$\.?(.*)`$", text)):
        return InvalidRequest(text)
    reason = text[: at.start()]
    return InvalidRequest(f"{at[1]}: {reason[0].lower()}{reason[1:]}", param=at[1].replace("[...]", ""))


def sampling_params(request: ChatRequest | CompletionRequest, defaults: dict[str, Any]) -> SamplingParams:
    """What the request says over the model's own ``defaults``; ``max_tokens`` stays None where neither says it."""
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

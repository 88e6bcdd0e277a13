"""SamplingParams: how the next token is chosen, with vLLM's names, defaults and ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from anaphora.errors import InvalidRequest

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024


def _number(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    """Raise InvalidRequest unless ``value`` is a finite number within ``[low, high]`` (or ``(low, high]``)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r:.80}", param=name)
    if value > high or value < low or (low_open and value == low):
        edge = f"above {low:g}" if low_open else f"at least {low:g}"
        top = "" if math.isinf(high) else f" and at most {high:g}"
        raise InvalidRequest(f"{name} must be {edge}{top}, got {value!r}", param=name)


def _flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r:.80}", param=name)


def _integer(name: str, value: int | None, low: int, high: float = math.inf, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r:.80}", param=name)
    _number(name, value, low, high)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Values out of range raise InvalidRequest, naming the field.

    ``max_tokens`` None allows as many as the context length leaves. ``top_k`` 0 or -1 considers all tokens.
    ``logprobs`` k reports the sampled token and the k most likely ones at each generated position, ``prompt_logprobs``
    the same for the prompt. The sampling noise depends only on (seed + choice, position), so a seeded request gives the
    same tokens in any batch.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1, low_open=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _integer("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            _flag(name, getattr(self, name))
        _integer("max_tokens", self.max_tokens, 0, optional=True)
        _integer("min_tokens", self.min_tokens, 0)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", param="min_tokens"
            )
        self._check_bias()
        self._check_stop()

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequest(
                f"logit_bias maps token ids to numbers, got {self.logit_bias!r:.80}", param="logit_bias"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}", param="logit_bias"
            )
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise InvalidRequest(f"logit_bias takes token ids as keys, got {token!r:.80}", param="logit_bias")
            _number("logit_bias", bias, -100, 100)
        if not isinstance(self.allowed_token_ids, (list, tuple, type(None))):
            raise InvalidRequest(
                f"allowed_token_ids must be a list, got {self.allowed_token_ids!r:.80}", param="allowed_token_ids"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")

    def _check_stop(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            given = getattr(self, name)
            if not isinstance(given, (list, tuple, type(None))):
                raise InvalidRequest(f"{name} must be a list, got {given!r:.80}", param=name)
            object.__setattr__(self, name, tuple(given or ()))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"stop strings must be text of 1 to {MAX_STOP_LENGTH} characters, got {text!r:.80}", param="stop"
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the field, if a token id is outside ``range(vocab_size)``."""
        named: tuple[tuple[str, Seq[int]], ...] = (
            ("logit_bias", tuple(self.logit_bias)),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        )
        for name, ids in named:
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"{name} holds token id {token!r}; this model's ids run from 0 to {vocab_size - 1}", param=name
                    )

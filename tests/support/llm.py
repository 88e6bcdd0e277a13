"""Sampling parameters for tests of LLM over the fake runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anaphora import LLM, SamplingParams

WINDOW = 200
"""Longest sequence of the fake runner, in tokens."""

Make = Callable[..., LLM]


def plain(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)

"""min_p, top_k and top_p: which tokens of a row of scores may be sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, inf

from anaphora.attention.transfer import to_device

_NUCLEUS_GUESSES = (64, 1024)
"""How many of the most likely tokens top_p looks at before it sorts the whole row."""


def column(like: Tensor, values: Sequence[float]) -> Tensor:
    """``values`` as float32 ``[R, 1]`` on the device of ``like``."""
    return to_device(np.array(values, np.float32), like.device)[:, None]


def limit(
    scores: Tensor, min_p: Sequence[float | None], top_k: Sequence[int | None], top_p: Sequence[float | None]
) -> None:
    """Set the scores ``[R, V]`` of excluded tokens to -inf, in place; a row's None leaves that filter out."""
    _exclude(scores, min_p, _below_min_p)
    _exclude(scores, top_k, _below_top_k)
    _exclude(scores, top_p, _below_top_p)


def _exclude(scores: Tensor, values: Sequence[Any], excluded: Callable[[Tensor, list[Any]], Tensor]) -> None:
    """Set scores marked by ``excluded(scores, values)`` to -inf, in rows whose value is not None."""
    index = [i for i, value in enumerate(values) if value is not None]
    if len(index) == len(values):
        scores.masked_fill_(excluded(scores, list(values)), -inf)
    elif index:
        rows = to_device(np.array(index), scores.device)
        part = scores[rows]
        scores[rows] = part.masked_fill_(excluded(part, [values[i] for i in index]), -inf)


def _below_min_p(scores: Tensor, values: list[float]) -> Tensor:
    """Tokens less than ``min_p`` times as likely as the most likely token."""
    return scores < scores.amax(-1, keepdim=True) + column(scores, values).log()


def _below_top_k(scores: Tensor, values: list[int]) -> Tensor:
    """All tokens except the ``top_k`` most likely ones and those that tie with the last of them."""
    best = scores.topk(max(values), dim=-1).values
    last = to_device(np.array(values), scores.device)[:, None] - 1
    return scores < best.gather(-1, last)


def _below_top_p(scores: Tensor, values: list[float]) -> Tensor:
    """All tokens outside the nucleus: the fewest most likely tokens whose mass is ``top_p``, and ties with the last."""
    probs = scores.softmax(-1)
    mass = column(scores, values)
    vocab_size = probs.shape[-1]
    least, enough = _nucleus_edge(probs, mass, min(_NUCLEUS_GUESSES[0], vocab_size))
    for candidates in (*_NUCLEUS_GUESSES[1:], vocab_size):
        short = (~enough[:, 0]).nonzero()[:, 0]
        if not len(short):
            break
        least[short], enough[short] = _nucleus_edge(probs[short], mass[short], min(candidates, vocab_size))
    return probs < least


def _nucleus_edge(probs: Tensor, wanted: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """``[R, 1]`` each: the smallest probability in the nucleus, and whether ``candidates`` tokens held it all."""
    best = probs.topk(candidates, dim=-1).values
    mass = best.cumsum(-1)
    inside = 1 + (mass[:, :-1] < wanted).sum(-1, keepdim=True)
    return best.gather(-1, inside - 1), mass[:, -1:] >= wanted

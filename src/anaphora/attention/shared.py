"""Attention over parts of the keys, and the merge of the parts.

What a query gets from a set of keys is an output (the mean of the values under softmax) and the log of the sum of the
exponentiated scores. Outputs of disjoint sets merge exactly with these logs alone, so rows that share a prefix attend
to it together, each to its own part apart, and the merge makes one softmax of it::

    row 0  ├──────── shared ────────┤├─ own 0 ─┤
    row 1  ├──────── shared ────────┤├── own 1 ───┤
    row 2  ├──────── shared ────────┤├ own 2 ┤
              one product for all rows    one a row
"""

from __future__ import annotations

import torch
from torch import Tensor

from anaphora.attention.base import LayerOptions

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    query: Tensor, key: Tensor, value: Tensor, options: LayerOptions, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of ``query`` ``[B, H, M, D]`` over ``key`` and ``value`` ``[B, H, N, D]``, and its log-sum-exp.

    ``causal`` (then M = N): row m sees keys 0 to m. ``mask`` is added to the scores, broadcast to ``[B, H, M, N]``; a
    row with no key at all gets any finite output. Window and sinks of ``options`` are the caller's business.
    Returns ``[B, H, M, Dv]`` in the dtype of ``query`` and ``[B, H, M]`` float32.
    """
    if not options.softcap and key.shape[-1] == value.shape[-1]:
        out, logs = _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=options.scale)
        return out, logs
    scores = (query @ key.transpose(-1, -2)).float() * options.scale
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores + mask
    logs = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - logs.nan_to_num(neginf=0.0)[..., None])
    return weights.to(value.dtype) @ value, logs


def merge(outs: Tensor, logs: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Merge ``outs`` ``[P, H, M, D]`` of P disjoint sets of keys by their ``logs`` ``[P, H, M]``.

    A set that a row does not have has -inf there and finite numbers in ``outs``. ``sinks`` ``[H]`` enter once, as a
    key without a value. Returns ``[H, M, D]`` float32.
    """
    if sinks is not None:
        logs = torch.cat((logs, sinks.float()[None, :, None].expand(1, -1, logs.shape[2])))
    weights = torch.softmax(logs, 0)[: len(outs)]
    return (outs.float() * weights[..., None]).sum(0)

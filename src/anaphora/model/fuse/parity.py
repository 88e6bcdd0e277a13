"""Whether a replaced part of a model does the same as the model's own code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def close(found: Tensor, expected: Tensor, beside: Tensor | None = None) -> bool:
    """Whether rows (the last dimension) are equal to rounding: in the mean, and each to three times as much.

    ``beside`` was added to both and taken away again, so that its rounding is in both. Rows are looked at one by one,
    since some tokens have hidden states a thousand times as large as others.
    """
    step = torch.finfo(expected.dtype).eps
    if found.shape != expected.shape:
        return False
    gap = (found.float() - expected.float()).norm(dim=-1)
    allowed = max(3 * step, 1e-5) * expected.float().norm(dim=-1)
    if beside is not None:
        allowed = allowed + 0.75 * step * beside.float().norm(dim=-1)
    ratio = gap / allowed.clamp(min=torch.finfo(torch.float32).tiny)
    return bool(ratio.mean() <= 1 and ratio.max() <= 3)


def positions(model: Any, rows: int) -> Tensor:
    """``[1, rows]`` from the first to the last of the window: some models turn or scale later ones otherwise."""
    window = int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or rows)
    return torch.linspace(0, window - 1, rows, dtype=torch.float64).long()[None]

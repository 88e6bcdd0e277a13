"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): reads a layer's latents and attends to them directly.

A layer caches one latent a token instead of keys and values by head. ``kv_b_proj`` expands it to both; instead, its
halves are multiplied into the query and the output (absorbed), which gives the same scores and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class LatentTap:
    """Takes the place of a model's KV cache and keeps each layer's latents before they are expanded."""

    def __init__(self) -> None:
        self._latents: dict[int, Tensor] = {}

    def update(self, latent: Tensor, rope: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keeps ``latent`` ``[1, 1, T, rank]`` and ``rope`` ``[1, 1, T, R]``, and returns both unchanged."""
        self._latents[layer_idx] = torch.cat((latent, rope), dim=-1)
        return latent, rope

    def take(self, layer_idx: int) -> Tensor:
        """Returns the layer's last latents, ``[1, 1, T, rank + R]``, and forgets them."""
        return self._latents.pop(layer_idx)


@dataclass(frozen=True, slots=True, eq=False)
class Absorbed:
    """The two halves of one layer's ``kv_b_proj``: ``keys`` ``[H, nope, rank]`` and ``values`` ``[H, rank, v]``.

    Queries times ``keys`` attend to latents directly; the result times ``values`` is the layer's attention output.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, module: nn.Module) -> Absorbed:
        """From a layer's attention module, which has ``kv_b_proj``, ``qk_nope_head_dim`` and ``kv_lora_rank``."""
        parts: Any = module
        nope, rank = parts.qk_nope_head_dim, parts.kv_lora_rank
        weight = parts.kv_b_proj.weight.detach().view(-1, nope + parts.v_head_dim, rank)
        return cls(weight[:, :nope].contiguous(), weight[:, nope:].transpose(1, 2).contiguous())

    def query(self, query: Tensor) -> Tensor:
        """``[H, T, nope + R]`` → ``[H, T, rank + R]``."""
        nope = self.keys.shape[1]
        return torch.cat((query[..., :nope] @ self.keys, query[..., nope:]), dim=-1)

    def output(self, attended: Tensor) -> Tensor:
        """``[T, H, rank]`` → ``[T, H, v]``."""
        return (attended.transpose(0, 1) @ self.values).transpose(0, 1)

"""Fuses decoder layers on a GPU into a third of the kernel launches, by the kernels of ``norm_rope_silu.py``.

Query, key and value projections become one GEMM, gate and up projections another; the operations between two GEMMs
become one kernel. Each part goes through the parity check, so a family whose code differs keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anaphora.attention.base import LayerOptions, attend
from anaphora.attention.gpu_tiles import next_power_of_2
from anaphora.kernels.triton import norm_rope_silu
from anaphora.kernels.triton.compile_watch import COMPILE_WATCH
from anaphora.model.fuse.parity import Call, EchoAttention, observable, observe, replace_forward

SAMPLE_ROWS = 8
"""Sample tokens of the parity check."""


@torch.no_grad()
@COMPILE_WATCH.expected()
def fuse(base: nn.Module, arguments: Mapping[str, Any], options: Mapping[int, LayerOptions]) -> int:
    """Replaces parts of the layers of ``base`` in place; returns how many were replaced.

    ``arguments`` are what a forward takes besides token ids and positions, ``options`` how each layer attends.
    """
    model: Any = base
    if not observable(base):
        return 0
    layers = list(model.layers)
    norms = [module for module in model.modules() if _is_rms_norm(module)]
    calls = observe(base, arguments, [*layers, *norms], EchoAttention(), SAMPLE_ROWS)
    count = sum(replace_forward(norm, FusedNorm.of(norm), calls[norm]) for norm in norms)
    if not all(isinstance(call.out, Tensor) for layer in layers for call in calls[layer]):
        return count
    for index, layer in enumerate(layers):
        count += _fuse_attention(layer, options[index], calls[layer])
        count += _fuse_mlp(layer, calls[layer])
        count += _fuse_add_norm(layer, layers[index + 1] if index + 1 < len(layers) else model, calls[layer])
    return count


class FusedNorm:
    """RMSNorm over the last dimension in one kernel, which can also add the residual first."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._block = next_power_of_2(len(weight))
        self._ready: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def eps_of(module: Any) -> float | None:
        """The epsilon of an RMSNorm module, under either of its names."""
        eps: float | None = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        return eps

    @classmethod
    def of(cls, module: Any) -> FusedNorm:
        """For an RMSNorm module of a model."""
        return cls(module.weight.detach(), cls.eps_of(module) or 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        if self._ready is not None and self._ready[0] is x:
            normed = self._ready[1]
            self._ready = None
            return normed
        return self._launch(x.contiguous(), None)

    def add(self, x: Tensor, residual: Tensor) -> None:
        """``x += residual``, in place; the norm of the sum is kept for the call that brings ``x``."""
        self._ready = (x, self._launch(x, residual))

    def _launch(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out = torch.empty_like(x)
        size = x.shape[-1]
        norm_rope_silu.rms_norm[(x.numel() // size,)](
            x, x if residual is None else residual, out, self.weight, self.eps, size, self._block, residual is not None,
            num_warps=min(16, max(1, self._block // 512)),
        )  # fmt: skip
        return out


def _is_rms_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and FusedNorm.eps_of(module) is not None
    return named and weight is not None and weight.dim() == 1


def _fuse_attention(layer: Any, options: LayerOptions, calls: Sequence[Call]) -> bool:
    """One GEMM for query, key and value; their norms and the rotary embedding in one kernel."""
    module = getattr(layer, "self_attn", None)
    parts: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    size = getattr(module, "head_dim", None)
    if module is None or size is None or not all(type(part) is nn.Linear for part in parts):
        return False
    query, key, value = (part.out_features // size for part in parts)
    norms: list[Any] = [getattr(getattr(module, name, None), "forward", None) for name in ("q_norm", "k_norm")]
    normed = all(isinstance(norm, FusedNorm) for norm in norms)
    if key != value or any(norms) != normed or (normed and any(len(norm.weight) != size for norm in norms)):
        return False
    merged = _merge(parts)
    if merged is None:
        return False
    weights = [norm.weight for norm in norms] if normed else [merged.weight, merged.weight]
    group = min(8, next_power_of_2(query + key))

    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> tuple[Tensor, None]:
        rows = merged(hidden_states)[0]
        cos, sin = position_embeddings
        norm_rope_silu.norm_rope[(len(rows), -(-(query + key) // group))](
            rows, cos, sin, *weights, norms[0].eps if normed else 0.0, rows.stride(0), *cos.stride()[-2:],
            query, query + key, size, next_power_of_2(size // 2), normed, group,
        )  # fmt: skip
        heads = rows.view(len(rows), query + 2 * key, size).transpose(0, 1)[None]
        parted = heads[:, :query], heads[:, query : query + key], heads[:, query + key :]
        out = attend(module, *parted, options)
        return module.o_proj(out.reshape(1, len(rows), -1)), None

    return replace_forward(module, forward, calls)


def _fuse_mlp(layer: Any, calls: Sequence[Call]) -> bool:
    """One GEMM for gate and up; SiLU and their product in one kernel."""
    module = getattr(layer, "mlp", None)
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if module is None or not all(type(part) is nn.Linear for part in parts):
        return False
    gate, up, down = parts
    merged = _merge([gate, up])
    if merged is None:
        return False
    size = gate.out_features
    block = min(1024, next_power_of_2(size))

    def forward(x: Tensor) -> Tensor:
        both = merged(x)
        active = both.new_empty(*both.shape[:-1], size)
        norm_rope_silu.silu_and_mul[(both.numel() // (2 * size), -(-size // block))](both, active, size, block)
        out: Tensor = down(active)
        return out

    return replace_forward(module, forward, calls)


def _fuse_add_norm(layer: Any, following: Any, calls: Sequence[Call]) -> bool:
    """Adds to the residual stream inside the kernel of the next norm, which may be in the ``following`` layer."""
    names = ("input_layernorm", "post_attention_layernorm")
    modules = [*(getattr(layer, name, None) for name in names), getattr(following, names[0], None)]
    modules[2] = modules[2] or getattr(following, "norm", None)
    norms = [norm for module in modules if isinstance(norm := getattr(module, "forward", None), FusedNorm)]
    if len(norms) < 3:
        return False
    first, second, third = norms
    if sum(type(child).__name__.endswith("RMSNorm") for child in layer.children()) != len(names):
        return False
    attention, mlp = layer.self_attn, layer.mlp

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attended: Tensor = attention(hidden_states=first(hidden_states), **kwargs)[0]
        second.add(attended, hidden_states)
        found = mlp(second(attended))
        out: Tensor = found[0] if isinstance(found, tuple) else found
        third.add(out, attended)
        return out

    return replace_forward(layer, forward, calls)


@dataclass(frozen=True, eq=False)
class _MergedLinear:
    """Several linear layers of the same input as one GEMM; their weights become views of its weight."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def _merge(layers: list[Any]) -> _MergedLinear | None:
    biases = [layer.bias for layer in layers]
    if len({layer.in_features for layer in layers}) > 1 or len({bias is None for bias in biases}) > 1:
        return None
    return _MergedLinear(
        _concatenated([layer.weight for layer in layers]), None if biases[0] is None else _concatenated(biases)
    )


def _concatenated(parameters: list[Any]) -> Tensor:
    """One tensor of all parameters along the first dimension; each becomes a view of its part."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole

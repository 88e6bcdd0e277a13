"""Fewer and faster operations inside transformers' own modules, with the same results to rounding.

Each only where it is known to hold or agrees on random numbers: linear weights are packed once into the layout in which
the CPU multiplies bfloat16, query, key and value projections share one product, the gate of an MLP gets its SiLU inside
the product, and RMS norms work in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_SIBLINGS = ("q_proj", "k_proj", "v_proj")
"""Projections that an attention applies to one and the same input."""


class PackedLinear(nn.Module):
    """A linear layer whose weight is in oneDNN's own layout (plain layouts are packed anew at each call).

    ``activation`` is oneDNN's name of a function that is applied to the result, such as ``swish``.
    """

    activation = "none"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", bias, persistent=False)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, self.activation, [], "")
        return out


class _Joint:
    """One product for several projections. The first of them that is called with an input computes all."""

    def __init__(self, product: nn.Module, sizes: list[int]) -> None:
        self._product = product
        self._sizes = sizes
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        if self._input is not x or self._parts[index] is None:
            self._input = x
            self._parts = list(self._product(x).split(self._sizes, dim=-1))
        part = self._parts[index]
        assert part is not None
        self._parts[index] = None
        if all(rest is None for rest in self._parts):
            self._input = None
        return part


class JointLinear(nn.Module):
    """One of several projections of the same input."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self._joint = joint
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        return self._joint.part(self._index, x)


def fuse(model: nn.Module) -> None:
    """Replace modules of ``model`` (on a CPU, without gradients) in place."""
    for module in list(model.modules()):
        _join_siblings(module)
        _simplify_norm(module)
        _simplify_mlp(module)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _packs(child.weight):
                setattr(parent, name, PackedLinear(child.weight.detach(), child.bias))


def _join_siblings(module: nn.Module) -> None:
    found = [getattr(module, name, None) for name in _SIBLINGS]
    layers = [x for x in found if type(x) is nn.Linear]
    if len(layers) != len(_SIBLINGS):
        return
    first = layers[0]
    if any(x.in_features != first.in_features or (x.bias is None) != (first.bias is None) for x in layers):
        return
    product = nn.Linear(first.in_features, 1, bias=first.bias is not None, device="meta")
    product.weight = nn.Parameter(torch.cat([x.weight.detach() for x in layers]), requires_grad=False)
    if first.bias is not None:
        product.bias = nn.Parameter(torch.cat([x.bias.detach() for x in layers]), requires_grad=False)
    ready = PackedLinear(product.weight, product.bias) if _packs(product.weight) else product
    joint = _Joint(ready, [x.out_features for x in layers])
    for index, name in enumerate(_SIBLINGS):
        setattr(module, name, JointLinear(joint, index))


def _packs(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _simplify_norm(module: Any) -> None:
    """RMS norm with one temporary instead of five."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None or weight is None or weight.dim() != 1:
        return
    wide, size = weight.detach().float(), weight.shape[0]

    def forward(x: Tensor) -> Tensor:
        wide_x = x.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(wide_x, dim=-1, keepdim=True)
        factor = norm.square_().mul_(1 / size).add_(eps).rsqrt_()
        return wide_x.mul_(factor).mul_(wide).to(x.dtype)

    if _agree(module, forward, torch.randn(4, size, generator=_generator()).to(weight.dtype)):
        module.forward = forward


def _simplify_mlp(module: Any) -> None:
    """A SiLU-gated MLP whose activation happens inside the gate's product."""
    layers: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(layer) is not nn.Linear or not _packs(layer.weight) for layer in layers):
        return
    gate, up, down = (PackedLinear(layer.weight.detach(), layer.bias) for layer in layers)
    gate.activation = "swish"

    def forward(x: Tensor) -> Tensor:
        out: Tensor = down(gate(x).mul_(up(x)))
        return out

    if _agree(module, forward, torch.randn(4, gate.in_features, generator=_generator()).to(layers[0].weight.dtype)):
        module.gate_proj, module.up_proj, module.down_proj = gate, up, down
        module.forward = forward


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _agree(module: nn.Module, forward: Callable[[Tensor], Tensor], sample: Tensor) -> bool:
    """Whether both give the same for ``sample``, to rounding in its dtype."""
    with torch.inference_mode():
        expected, found = module(sample), forward(sample)
    if expected.dtype != found.dtype:
        return False
    return bool((expected - found).abs().max() <= 4 * torch.finfo(sample.dtype).eps * expected.abs().max())

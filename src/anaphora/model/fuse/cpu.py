"""Fewer and faster operations inside transformers' own modules, with the same results to rounding.

Each only where it is known to hold or agrees on random numbers: linear weights are packed once into the layout in which
the CPU multiplies bfloat16, query, key and value projections share one product, the gate of an MLP gets its SiLU inside
the product, and RMS norms and rotary embeddings are one kernel each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from anaphora.kernels.cpu import launch, norm_rope
from anaphora.model.fuse.packed_linear import linear, packs

_SIBLINGS = ("q_proj", "k_proj", "v_proj")
"""Projections that an attention applies to one and the same input."""


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
        _simplify_rotation(module)
        _simplify_mlp(module)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and packs(child.weight):
                setattr(parent, name, linear(child.weight.detach(), child.bias))


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
    ready = linear(product.weight, product.bias) if packs(product.weight) else product
    joint = _Joint(ready, [x.out_features for x in layers])
    for index, name in enumerate(_SIBLINGS):
        setattr(module, name, JointLinear(joint, index))


class _Norm:
    """An RMS norm of rows by one compiled kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight.detach().float()
        self._size = weight.shape[0]
        given = {"size": self._size, "weight": self._weight.data_ptr(), "eps": eps}
        self._call = launch.Call(norm_rope.norm_rows, norm_rope.NORM, ("x", "rows", "kind", "out", "scratch"), given)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out, rows = torch.empty_like(x), x.numel() // self._size
        workers = launch.threads() if rows > norm_rope.ROWS else 1
        scratch = torch.empty(workers, self._size)
        self._call(workers, x.data_ptr(), rows, launch.DTYPES[x.dtype], out.data_ptr(), scratch.data_ptr())
        return out


def _simplify_norm(module: Any) -> None:
    """RMS norm as one kernel instead of seven operations; some families keep their weights less one."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None or weight is None or weight.dim() != 1:
        return
    sample = torch.randn(4, weight.shape[0], generator=_generator()).to(weight.dtype)
    for known in (weight, weight.float() + 1):
        forward = _Norm(known, eps)
        if _agree(module, forward, sample):
            module.forward = forward
            return


_ROTATE = "apply_rotary_pos_emb"
"""The function by which attention in transformers' code turns queries and keys."""


class _Rotation:
    """Rotary embedding by one compiled kernel."""

    def __init__(self) -> None:
        self._call = launch.Call(norm_rope.rotate_rows, norm_rope.ROTATE, norm_rope.ROTATE.names[3:], {})

    def __call__(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """Turn ``query`` and ``key`` ``[1, H, T, D]`` in place by ``cosines`` and ``sines`` ``[1, T, D]``."""
        cosines, sines = cosines.contiguous(), sines.contiguous()
        rows, size = cosines.shape[-2:]
        workers = launch.threads() if rows > norm_rope.ROWS else 1
        scratch = torch.empty(workers, 4 * size)
        angles = (cosines.data_ptr(), sines.data_ptr(), launch.DTYPES[sines.dtype], scratch.data_ptr())
        for x in (query, key):
            shape = (x.shape[1], x.stride(1), x.stride(2), rows, size)
            self._call(workers, x.data_ptr(), launch.DTYPES[x.dtype], *shape, *angles)
        return query, key


def _simplify_rotation(module: Any) -> None:
    """Let an attention that turns halves of heads do so in one kernel instead of fourteen operations."""
    plain: Any = inspect.unwrap(type(module).forward)
    known = getattr(plain, "__globals__", {}).get(_ROTATE)
    if known is None or _ROTATE not in plain.__code__.co_names or not _turns_halves(known):
        return
    names = plain.__globals__ | {_ROTATE: _Rotation()}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    module.forward = MethodType(forward, module)


@functools.cache
def _turns_halves(known: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Whether ``known`` does what ``_Rotation`` does."""
    query, key = (torch.randn(1, heads, 3, 8, generator=_generator()) for heads in (4, 2))
    angles = torch.randn(1, 3, 8, generator=_generator())
    try:
        expected = known(query, key, angles.cos(), angles.sin())
    except (TypeError, ValueError, RuntimeError):  # another signature, or other shapes
        return False
    found = _Rotation()(query.clone(), key.clone(), angles.cos(), angles.sin())
    return all(x.shape == y.shape and torch.allclose(x, y, atol=1e-6) for x, y in zip(expected, found, strict=True))


def _simplify_mlp(module: Any) -> None:
    """A SiLU-gated MLP whose activation happens inside the gate's product."""
    layers: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(layer) is not nn.Linear or not packs(layer.weight) for layer in layers):
        return
    gate, up, down = (linear(layer.weight.detach(), layer.bias, layer is layers[0]) for layer in layers)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = down(gate(x).mul_(up(x)))
        return out

    first = layers[0].weight
    if _agree(module, forward, torch.randn(4, first.shape[1], generator=_generator()).to(first.dtype)):
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

"""Speeds up transformers' own modules on a CPU: packed linear weights, and RMSNorm and rotary embedding in one kernel.

Norms and rotary embeddings are replaced where they pass the parity check.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from anaphora.kernels.cpu import launch, norm_rope
from anaphora.model.fuse.packed_linear import linear, packs
from anaphora.model.fuse.parity import EchoAttention, observable, observe, replace_forward

SAMPLE_ROWS = 8
"""Sample tokens of the parity check."""

_ROTATE = "apply_rotary_pos_emb"
"""The function by which transformers' attention modules rotate queries and keys."""


def pack_linear_layers(model: nn.Module, row_invariant: bool) -> None:
    """Packs the weights of all linear layers of ``model`` (on a CPU, without gradients), in place.

    ``row_invariant``: as in ``packed_linear.linear``. oneDNN is faster where that is not needed.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and packs(child.weight):
                setattr(parent, name, linear(child.weight.detach(), child.bias, row_invariant))


def fuse_norm_rope(base: nn.Module, arguments: Mapping[str, Any]) -> int:
    """Replaces RMSNorm and rotary embedding in a model without its head by kernels; returns how many were replaced.

    ``arguments`` are what a forward takes besides token ids and positions.
    """
    if not observable(base):
        return 0
    norms: list[Any] = [module for module in base.modules() if _is_rms_norm(module)]
    attentions = [module for module in base.modules() if _rotates(module)]
    calls = observe(base, arguments, [*norms, *attentions], EchoAttention(), SAMPLE_ROWS)
    count = 0
    for module in norms:
        # Some families (Gemma) store the weight minus one.
        count += any(
            replace_forward(module, RMSNorm(weight, _eps(module)), calls[module])
            for weight in (module.weight, module.weight.float() + 1)
        )
    for module in attentions:
        count += replace_forward(module, _with_kernel(module), calls[module])
    return count


def _eps(module: Any) -> float | None:
    eps: float | None = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps


def _is_rms_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and _eps(module) is not None
    return named and weight is not None and weight.dim() == 1 and weight.dtype in launch.DTYPES


class RMSNorm:
    """RMSNorm over the last dimension by one compiled kernel instead of seven torch operations."""

    def __init__(self, weight: Tensor, eps: float | None) -> None:
        self._weight = weight.detach().float()
        self._size = weight.shape[0]
        given = {"size": self._size, "weight": self._weight.data_ptr(), "eps": eps or 0.0}
        self._call = launch.Call(norm_rope.norm_rows, norm_rope.NORM, ("x", "rows", "kind", "out", "scratch"), given)

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., size]`` → the same shape and dtype."""
        x = x.contiguous()
        out, rows = torch.empty_like(x), x.numel() // self._size
        workers = launch.threads() if rows > norm_rope.ROWS else 1
        scratch = torch.empty(workers, self._size)
        self._call(workers, x.data_ptr(), rows, launch.DTYPES[x.dtype], out.data_ptr(), scratch.data_ptr())
        return out


class RotaryEmbedding:
    """Rotary embedding of both halves of each head by one compiled kernel instead of fourteen torch operations."""

    def __init__(self) -> None:
        self._call = launch.Call(norm_rope.rotate_rows, norm_rope.ROTATE, launch.fields_from(norm_rope.ROTATE, "x"), {})

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates ``query`` and ``key`` ``[1, H, T, D]`` in place by ``cos`` and ``sin`` ``[1, T, D]``.

        Raises ValueError for other shapes.
        """
        cos, sin = cos.contiguous(), sin.contiguous()
        rows, size = cos.shape[-2:]
        if any(x.shape[0] != 1 or x.shape[2:] != (rows, size) or x.stride(-1) != 1 for x in (query, key)):
            raise ValueError(f"cannot rotate {tuple(query.shape)} and {tuple(key.shape)} by {tuple(cos.shape)}")
        workers = launch.threads() if rows > norm_rope.ROWS else 1
        scratch = torch.empty(workers, 4 * size)
        angles = (cos.data_ptr(), sin.data_ptr(), launch.DTYPES[sin.dtype], scratch.data_ptr())
        for x in (query, key):
            shape = (x.shape[1], x.stride(1), x.stride(2), rows, size)
            self._call(workers, x.data_ptr(), launch.DTYPES[x.dtype], *shape, *angles)
        return query, key


def _rotates(module: Any) -> bool:
    """Whether the module's forward calls ``apply_rotary_pos_emb``."""
    plain: Any = inspect.unwrap(type(module).forward)
    return _ROTATE in getattr(plain, "__globals__", {}) and _ROTATE in plain.__code__.co_names


def _with_kernel(module: Any) -> MethodType:
    """The module's own forward with ``apply_rotary_pos_emb`` replaced by the kernel."""
    plain: Any = inspect.unwrap(type(module).forward)
    names = plain.__globals__ | {_ROTATE: RotaryEmbedding()}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(forward, module)

"""Linear layers in bfloat16 whose weights are packed once: by oneDNN, or for the AMX kernel of ``gemm_amx.py``."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor, nn

from anaphora.kernels.cpu import amx, gemm_amx, launch


def packs(weight: Tensor) -> bool:
    """Whether this CPU multiplies ``weight`` in a packed layout."""
    return weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(weight: Tensor, bias: Tensor | None, row_invariant: bool = False) -> nn.Module:
    """A linear layer with this ``weight`` ``[out, in]``, for which ``packs`` holds.

    With ``row_invariant``, on a processor with AMX, the result of a row does not depend on the other rows.
    """
    if row_invariant and amx.AMX and all(size % 32 == 0 for size in weight.shape):
        return AmxLinear(weight, bias)
    return OneDnnLinear(weight, bias)


class Memory:
    """Scratch memory, kept from step to step and enlarged when a step needs more."""

    def __init__(self) -> None:
        self._kept = launch.aligned_bytes(0)

    def addresses(self, *sizes: int) -> list[int]:
        """Returns the addresses of separate areas of ``sizes`` bytes."""
        offsets = np.cumsum([0, *(-(-size // 64) * 64 + 64 for size in sizes)])
        if len(self._kept) < offsets[-1]:
            self._kept = launch.aligned_bytes(int(offsets[-1]))
        return [self._kept.data_ptr() + int(offset) for offset in offsets[:-1]]


class OneDnnLinear(nn.Module):
    """A linear layer whose weight is in oneDNN's own layout (a plain layout is packed again at each call)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", bias, persistent=False)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class AmxLinear(nn.Module):
    """A linear layer by the kernel of ``gemm_amx.py``. In and out features are multiples of 32."""

    _own = threading.local()  # one scratch for all layers of a thread, which run one after the other

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kept = [pack(weight.detach())] + ([] if bias is None else [bias.detach().float().contiguous()])
        given = {
            "size": self.in_features,
            "outputs": self.out_features,
            "weight": self._kept[0].data_ptr(),
            "bias": 0 if bias is None else self._kept[1].data_ptr(),
            "tiles": amx.TILE_CONFIGS.ctypes.data,
        }
        brought = launch.fields_from(gemm_amx.LINEAR, "x")
        self._call = launch.Call(gemm_amx.linear, gemm_amx.LINEAR, brought, given)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` → ``[..., out]``, both bfloat16."""
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        workers, scratch = launch.threads(), gemm_amx.linear_scratch_bytes(self.in_features)
        memory: Memory = self._own.__dict__.setdefault("memory", Memory())
        (address,) = memory.addresses(workers * scratch)
        self._call(workers, x.data_ptr(), x.numel() // self.in_features, out.data_ptr(), address, scratch)
        return out


def pack(weight: Tensor) -> Tensor:
    """Packs ``[N, K]`` bfloat16 as B operands of the AMX GEMM: ``[N / 16, K / 32, 16, 16, 2]``.

    A tile holds 16 outputs (columns) and 32 elements of K, in pairs::

                       output 0     1       15
        K = 0, 1       ██ ██    ██ ██  …  ██ ██
        K = 2, 3       ██ ██    ██ ██  …  ██ ██      16 rows of 64 bytes
           ⋮
        K = 30, 31     ██ ██    ██ ██  …  ██ ██
    """
    outputs, size = weight.shape
    tiles = weight.view(outputs // 16, 16, size // 32, 16, 2).permute(0, 2, 3, 1, 4)
    packed = launch.aligned_bytes(tiles.numel() * 2).view(torch.bfloat16).view(tiles.shape)
    return packed.copy_(tiles.detach())

"""Linear layers in bfloat16 whose weights are packed once into the layout in which the CPU multiplies them."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor, nn

from anaphora.kernels.cpu import amx, gemm_amx, launch


def packs(weight: Tensor) -> bool:
    """Whether there is a layout for it."""
    return weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(weight: Tensor, bias: Tensor | None, activates: bool = False) -> nn.Module:
    """The layer with this weight, for which ``packs`` holds; with ``activates`` its result goes through SiLU."""
    if amx.AMX and all(size % 32 == 0 for size in weight.shape):
        return TiledLinear(weight, bias, activates)
    return OneDnnLinear(weight, bias, activates)


class Memory:
    """Areas for the steps, made once, and made larger when a step needs it."""

    def __init__(self) -> None:
        self._kept = launch.aligned_bytes(0)

    def addresses(self, *sizes: int) -> list[int]:
        """Where areas of so many bytes are."""
        offsets = np.cumsum([0, *(-(-size // 64) * 64 + 64 for size in sizes)])
        if len(self._kept) < offsets[-1]:
            self._kept = launch.aligned_bytes(int(offsets[-1]))
        return [self._kept.data_ptr() + int(offset) for offset in offsets[:-1]]


class OneDnnLinear(nn.Module):
    """A linear layer whose weight is in oneDNN's own layout (plain layouts are packed anew at each call)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activates: bool = False) -> None:
        super().__init__()
        self._activation = "swish" if activates else "none"
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", bias, persistent=False)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, self._activation, [], "")
        return out


class TiledLinear(nn.Module):
    """A linear layer by the kernel of ``products.py``. In and out features are multiples of 32."""

    _own = threading.local()  # the scratch of all that one thread uses, since they run one after the other

    def __init__(self, weight: Tensor, bias: Tensor | None, activates: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kept = [pack(weight.detach())] + ([] if bias is None else [bias.detach().float().contiguous()])
        given = {
            "size": self.in_features,
            "outputs": self.out_features,
            "weight": self._kept[0].data_ptr(),
            "bias": 0 if bias is None else self._kept[1].data_ptr(),
            "activates": int(activates),
            "tiles": amx.SHAPES.ctypes.data,
        }
        brought = gemm_amx.PROJECT.names[gemm_amx.PROJECT.names.index("x") :]
        self._call = launch.Call(gemm_amx.project, gemm_amx.PROJECT, brought, given)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` → ``[..., out]``, both bfloat16."""
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        workers, scratch = launch.threads(), gemm_amx.project_bytes(self.in_features)
        memory: Memory = self._own.__dict__.setdefault("memory", Memory())
        (address,) = memory.addresses(workers * scratch)
        self._call(workers, x.data_ptr(), x.numel() // self.in_features, out.data_ptr(), address, scratch)
        return out


def pack(weight: Tensor) -> Tensor:
    """``[N, K]`` bfloat16 as the tiles that the products of ``tiles.py`` take for B: ``[N / 16, K / 32, 16, 16, 2]``.

    A tile holds 16 pairs of K for 16 outputs.
    """
    outputs, size = weight.shape
    tiles = weight.view(outputs // 16, 16, size // 32, 16, 2).permute(0, 2, 3, 1, 4)
    packed = launch.aligned_bytes(tiles.numel() * 2).view(torch.bfloat16).view(tiles.shape)
    return packed.copy_(tiles.detach())

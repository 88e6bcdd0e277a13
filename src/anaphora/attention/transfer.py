"""From the host to a device and back without waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on ``device``. To a GPU it goes from pinned memory, which torch keeps until the copy is done."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def pack(arrays: list[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Flat views of one tensor, sent in one copy; each begins at a multiple of 16 bytes and may be a little longer."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    packed = np.zeros(sum(sizes), np.int32)
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        packed[at : at + array.size] = array.ravel()
        at += size
    return list(to_device(packed, device).split(sizes))

"""Copies between host and device that do not block the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to ``device``; to a GPU from pinned memory, which torch keeps until the copy is done."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def pack(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Send ``arrays`` in one copy; returns flat views, each aligned to 16 bytes and padded with zeros to as much."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    packed = np.zeros(sum(sizes), np.int32)
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        packed[start : start + array.size] = array.ravel()
        start += size
    return list(to_device(packed, device).split(sizes))


class HostCopy:
    """Tensors on their way to the host. ``read`` waits for them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[list[Any]]:
        """Wait, and return each tensor as a (nested) list."""
        if self._event is not None:
            self._event.synchronize()
        return [copy.tolist() for copy in self._copies]

"""Where the model runs, and how many KV blocks there is memory for."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from anaphora.attention.base import FLOAT8
from anaphora.config import CacheConfig
from anaphora.errors import ConfigError

DEFAULT_POOL_BYTES = 4 * 2**30
"""On a CPU, at most; a quarter of free memory if that is less."""

_KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": FLOAT8,
    "fp8_e4m3": FLOAT8,
}
_GPU_ONLY = ("float16", "fp8", "fp8_e4m3")
_FLOAT8_CAPABILITY = (8, 9)
"""The first NVIDIA generation whose processors convert float8 (Ada)."""


def choose_device(wanted: str) -> torch.device:
    """``auto``: a GPU if there is one. ConfigError where CUDA is asked for and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device on this machine; use --device cpu", param="device")
    return torch.device("cuda", torch.cuda.current_device())


def kv_cache_dtype(cache: CacheConfig, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the pool: fp8 is e4m3. ConfigError for one that the device does not have."""
    if cache.kv_cache_dtype == "auto":
        return model_dtype
    known = [name for name in _KV_DTYPES if name not in _GPU_ONLY or device.type == "cuda"]
    if cache.kv_cache_dtype not in known:
        raise ConfigError(
            f"--kv-cache-dtype {cache.kv_cache_dtype} is not there on a {'GPU' if device.type == 'cuda' else 'CPU'}; "
            f"use auto, {' or '.join(known)}",
            param="kv_cache_dtype",
        )
    dtype = _KV_DTYPES[cache.kv_cache_dtype]
    if dtype == FLOAT8 and (found := torch.cuda.get_device_capability(device)) < _FLOAT8_CAPABILITY:
        raise ConfigError(
            f"--kv-cache-dtype {cache.kv_cache_dtype} needs a GPU of compute capability 8.9 or later; this one "
            f"({torch.cuda.get_device_name(device)}) has {found[0]}.{found[1]}: use auto",
            param="kv_cache_dtype",
        )
    return dtype


def free_bytes(device: torch.device) -> int:
    """Free memory of the GPU, or of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def count_blocks(
    cache: CacheConfig, bytes_per_block: int, device: torch.device, largest_step: Callable[[], None], reserve: int
) -> int:
    """Blocks of the pool, the null block included.

    On a GPU ``largest_step`` runs the step that needs most memory, and ``reserve`` bytes are kept beside it.
    Raises ConfigError where not even one block has room.
    """
    size, flag = cache.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    if device.type == "cuda":
        peak = _peak(largest_step)
        if size is None:
            size, flag = _left(cache.gpu_memory_utilization, peak + reserve), "--gpu-memory-utilization"
    elif size is None:
        size = min(free_bytes(device) // 4, DEFAULT_POOL_BYTES)
    blocks = size // bytes_per_block
    if blocks < 2:
        raise ConfigError(
            f"a pool of {max(size, 0)} bytes holds no KV block: one is {bytes_per_block} bytes ({cache.block_size} "
            f"tokens), and one more is kept for padding; {flag} must leave at least {2 * bytes_per_block}",
            param=flag[2:].replace("-", "_"),
        )
    return blocks


def _peak(largest_step: Callable[[], None]) -> int:
    """Bytes that the step takes for a while, on top of what was there."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    largest_step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak


def _left(utilization: float, peak: int) -> int:
    """What ``utilization`` of the GPU's memory leaves beside what is in use now and ``peak``."""
    free, total = torch.cuda.mem_get_info()
    return int(total * utilization) - (total - free) - peak

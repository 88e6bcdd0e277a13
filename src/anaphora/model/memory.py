"""Chooses the device and the dtype of the KV pool, and computes how many KV blocks fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from anaphora.attention.base import FLOAT8
from anaphora.config import CacheConfig, EngineConfig
from anaphora.errors import ConfigError

DEFAULT_POOL_BYTES = 4 * 2**30
"""Pool size on a CPU; a quarter of free memory if that is less."""

_KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": FLOAT8,
    "fp8_e4m3": FLOAT8,
}
_GPU_ONLY = ("float16", "fp8", "fp8_e4m3")
_BFLOAT16_CAPABILITY = (8, 0)
_FLOAT8_CAPABILITY = (8, 9)
"""The first NVIDIA generation that converts float8 in hardware (Ada)."""


def choose_device(wanted: str) -> torch.device:
    """``auto`` is a GPU if there is one. Raises ConfigError if CUDA is asked for and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device on this machine; use --device cpu", param="device")
    return torch.device("cuda", torch.cuda.current_device())


def kv_cache_dtype(cache: CacheConfig, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV pool; fp8 is e4m3. Raises ConfigError for one that the device does not support."""
    if cache.kv_cache_dtype == "auto":
        return model_dtype
    known = [name for name in _KV_DTYPES if name not in _GPU_ONLY or device.type == "cuda"]
    if cache.kv_cache_dtype not in known:
        raise ConfigError(
            f"--kv-cache-dtype {cache.kv_cache_dtype} is not supported on a "
            f"{'GPU' if device.type == 'cuda' else 'CPU'}; "
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


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if the GPU does not compute in ``dtype``."""
    if dtype == torch.bfloat16 and (found := torch.cuda.get_device_capability(device)) < _BFLOAT16_CAPABILITY:
        raise ConfigError(
            f"bfloat16 needs a GPU of compute capability 8.0 or later; this one ({torch.cuda.get_device_name(device)}) "
            f"has {found[0]}.{found[1]}: use --dtype float16",
            param="dtype",
        )


def free_bytes(device: torch.device) -> int:
    """Free bytes of the GPU, or of the host for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """``blocks`` counts the null block too; ``activation_bytes`` is the temporary memory of the largest step."""

    blocks: int
    activation_bytes: int = 0


def limit_memory(cache: CacheConfig, device: torch.device) -> None:
    """Limit this process to ``--gpu-memory``: allocations beyond it fail, as on a GPU of that size.

    Raises ConfigError if other processes use all of it.
    """
    if device.type != "cuda":
        return
    if cache.gpu_memory is None:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)  # the driver and other processes
    left = _card_bytes(cache, total) - others
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory {cache.gpu_memory:g} leaves nothing: {_gib(others)} of the GPU's memory are in use already",
            param="gpu_memory",
        )
    torch.cuda.set_per_process_memory_fraction(min(left / total, 1.0), device)


def check_card(config: EngineConfig, weights_bytes: int, token_bytes: int, device: torch.device) -> None:
    """Raise ConfigError if the GPU is too small, before the weights are read.

    ``token_bytes`` are bytes of KV cache per token, or 0 if not known yet.
    """
    allowed, of = _allowed(config.cache, device)
    free, total = torch.cuda.mem_get_info(device)
    left = allowed - (total - free) + torch.cuda.memory_reserved(device)
    if weights_bytes >= left:
        raise ConfigError(
            f"the weights take {_gib(weights_bytes)} and only {_gib(max(left, 0))} of the GPU's memory can be used "
            f"({of}): use a larger GPU, a smaller model"
            + ("" if config.cache.gpu_memory is None else ", a larger --gpu-memory")
            + " or, if nothing else runs there, a higher --gpu-memory-utilization",
            param="gpu_memory_utilization",
        )
    wanted = config.model.max_model_len
    if wanted is not None and config.cache.kv_cache_memory_bytes is None:
        check_length(wanted, (left - weights_bytes) // max(token_bytes, 1), token_bytes)


def check_length(max_model_len: int, capacity: int, token_bytes: int) -> None:
    """Raise ConfigError if a request of ``max_model_len`` tokens exceeds a KV cache of ``capacity`` tokens."""
    if token_bytes and max_model_len > capacity:
        raise ConfigError(
            f"--max-model-len {max_model_len} needs {_gib(max_model_len * token_bytes)} of KV cache for one request, "
            f"and there is room for {max(capacity, 0)} tokens ({_gib(max(capacity, 0) * token_bytes)}): lower it, "
            "raise --gpu-memory-utilization, or use --kv-cache-dtype fp8",
            param="max_model_len",
        )


def size_pool(
    cache: CacheConfig, bytes_per_block: int, device: torch.device, largest_step: Callable[[], None], reserve: int
) -> PoolSize:
    """Compute the number of blocks of the KV pool.

    On a GPU ``largest_step`` runs the step that needs most memory, and ``reserve`` bytes are left for CUDA graphs.
    Raises ConfigError if not even one block fits.
    """
    size, peak, flag = cache.kv_cache_memory_bytes, 0, "--kv-cache-memory-bytes"
    account = ""
    if device.type == "cuda":
        peak = _peak(largest_step)
        free, total = torch.cuda.mem_get_info(device)
        if size is not None:
            _check_asked(size, _card_bytes(cache, total) - (total - free) - peak - reserve)
        else:
            flag = "--gpu-memory-utilization"
            allowed, of = _allowed(cache, device)
            size = allowed - (total - free) - peak - reserve
            account = (
                f" ({of}; {_gib(total - free)} are in use, {_gib(peak)} are for the largest step, {_gib(reserve)} for "
                "CUDA graphs; --max-num-batched-tokens and --max-num-seqs make these smaller)"
            )
    elif size is None:
        size = min(free_bytes(device) // 4, DEFAULT_POOL_BYTES)
    blocks = size // bytes_per_block
    if blocks < 2:
        raise ConfigError(
            f"a pool of {max(size, 0)} bytes holds no KV block: one is {bytes_per_block} bytes ({cache.block_size} "
            f"tokens), and one more is kept for padding; {flag} must leave at least {2 * bytes_per_block}{account}",
            param=flag[2:].replace("-", "_"),
        )
    return PoolSize(blocks, peak)


def _check_asked(size: int, room: int) -> None:
    if size > room:
        raise ConfigError(
            f"--kv-cache-memory-bytes asks for {_gib(size)}, and the GPU has room for {_gib(max(room, 0))} next to "
            "weights, activations and CUDA graphs",
            param="kv_cache_memory_bytes",
        )


def _peak(largest_step: Callable[[], None]) -> int:
    """Temporary bytes of the step: its peak on top of what was allocated before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        largest_step()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the largest step does not fit into the GPU's memory together with the weights: lower "
            f"--max-num-batched-tokens or --max-num-seqs ({str(error).partition('. ')[0]})",
            param="max_num_batched_tokens",
        ) from error
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak


def _allowed(cache: CacheConfig, device: torch.device) -> tuple[int, str]:
    """Bytes of the GPU that may be used, and the settings that determine them, as text."""
    total = torch.cuda.mem_get_info(device)[1]
    card = _card_bytes(cache, total)
    whose = "--gpu-memory" if cache.gpu_memory is not None else torch.cuda.get_device_name(device)
    share = cache.gpu_memory_utilization
    return int(card * share), f"{share:g} of {_gib(card)}: --gpu-memory-utilization of {whose}"


def _card_bytes(cache: CacheConfig, total: int) -> int:
    if cache.gpu_memory is None:
        return total
    if cache.gpu_memory * 2**30 > total:
        raise ConfigError(
            f"--gpu-memory {cache.gpu_memory:g} is more than the GPU has, which is {_gib(total)}", param="gpu_memory"
        )
    return int(cache.gpu_memory * 2**30)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"

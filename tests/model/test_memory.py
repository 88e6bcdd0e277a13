"""Where the model runs and how many blocks fit; what needs a GPU's memory is tested where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anaphora.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from anaphora.errors import ConfigError
from anaphora.model.memory import choose_device, count_blocks, kv_cache_dtype
from anaphora.model.runner import load
from tests.support.checkpoints import save

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def never() -> None:
    raise AssertionError("a CPU needs no rehearsal")


def test_cpu_is_taken_when_asked_for() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none_is_refused_by_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: .* no CUDA device .* --device cpu"):
        choose_device("cuda")


def test_the_pool_is_exactly_as_large_as_asked_for() -> None:
    assert count_blocks(CacheConfig(kv_cache_memory_bytes=1000), 99, CPU, never, reserve=10**9) == 10
    with pytest.raises(ConfigError, match=r"pool of 1000 bytes .* --kv-cache-memory-bytes must leave at least 1200"):
        count_blocks(CacheConfig(kv_cache_memory_bytes=1000), 600, CPU, never, reserve=0)


def test_a_gpu_also_has_a_pool_in_float16() -> None:
    cache = CacheConfig(kv_cache_dtype="float16")
    assert kv_cache_dtype(cache, torch.bfloat16, torch.device("cuda")) is torch.float16
    with pytest.raises(ConfigError, match="float16 is not there on a CPU"):
        kv_cache_dtype(cache, torch.bfloat16, CPU)


def test_float8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, gpu = CacheConfig(kv_cache_dtype="fp8"), torch.device("cuda")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 is not there on a CPU; use auto, bfloat16 or float32"):
        kv_cache_dtype(cache, torch.bfloat16, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A10")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"capability 8\.9 or later; this one \(A10\) has 8\.6"):
        kv_cache_dtype(cache, torch.bfloat16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kv_cache_dtype(cache, torch.bfloat16, gpu) is torch.float8_e4m3fn


@needs_gpu
def test_the_pool_takes_what_utilization_leaves(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3", head_dim=16)
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 2**32) / total
    config = EngineConfig(
        ModelConfig(model=str(folder)), CacheConfig(gpu_memory_utilization=share), SchedulerConfig(max_num_seqs=8)
    )
    runner = load(config)
    assert 2**31 < runner.info.num_blocks * runner.info.bytes_per_block < 2**32
    assert torch.cuda.mem_get_info()[0] >= total * (1 - share) - 2**28

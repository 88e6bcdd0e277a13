"""Where the model runs and how many blocks fit; what needs a GPU's memory is tested where there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anaphora.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from anaphora.errors import ConfigError
from anaphora.model import runner
from anaphora.model.loader import estimate
from anaphora.model.memory import (
    check_card,
    check_dtype,
    check_length,
    choose_device,
    kv_cache_dtype,
    limit_memory,
    size_pool,
)
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
    assert size_pool(CacheConfig(kv_cache_memory_bytes=1000), 99, CPU, never, reserve=10**9).blocks == 10
    with pytest.raises(ConfigError, match=r"pool of 1000 bytes .* --kv-cache-memory-bytes must leave at least 1200"):
        size_pool(CacheConfig(kv_cache_memory_bytes=1000), 600, CPU, never, reserve=0)


def test_a_gpu_also_has_a_pool_in_float16() -> None:
    cache = CacheConfig(kv_cache_dtype="float16")
    assert kv_cache_dtype(cache, torch.bfloat16, torch.device("cuda")) is torch.float16
    with pytest.raises(ConfigError, match="float16 is not supported on a CPU"):
        kv_cache_dtype(cache, torch.bfloat16, CPU)


def test_float8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, gpu = CacheConfig(kv_cache_dtype="fp8"), torch.device("cuda")
    with pytest.raises(
        ConfigError, match=r"--kv-cache-dtype fp8 is not supported on a CPU; use auto, bfloat16 or float32"
    ):
        kv_cache_dtype(cache, torch.bfloat16, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A10")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"capability 8\.9 or later; this one \(A10\) has 8\.6"):
        kv_cache_dtype(cache, torch.bfloat16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kv_cache_dtype(cache, torch.bfloat16, gpu) is torch.float8_e4m3fn


GPU = torch.device("cuda")
GIB = 2**30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU of 80 GiB with 1 GiB in use; records the memory limit that is set."""
    told: dict[str, Any] = {"free": 79 * GIB, "peak": 0}
    fakes: dict[str, Callable[..., Any]] = {
        "mem_get_info": lambda *_: (told["free"], 80 * GIB),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: told["peak"],
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
        "get_device_name": lambda *_: "H100",
        "get_device_capability": lambda *_: (9, 0),
        "set_per_process_memory_fraction": lambda share, device: told.update(share=share),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return told


def test_the_pool_takes_what_the_largest_step_leaves(card: dict[str, Any]) -> None:
    def step() -> None:
        card["peak"] = 3 * GIB

    found = size_pool(CacheConfig(gpu_memory_utilization=0.5), GIB, GPU, step, reserve=2 * GIB)
    assert (found.blocks, found.activation_bytes) == (40 - 1 - 3 - 2, 3 * GIB)
    found = size_pool(CacheConfig(gpu_memory_utilization=0.5, gpu_memory=24), GIB, GPU, step, reserve=2 * GIB)
    assert found.blocks == 12 - 1 - 3 - 2


def test_a_pool_larger_than_the_card_is_refused(card: dict[str, Any]) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=10 * GIB)
    assert size_pool(cache, GIB, GPU, lambda: None, reserve=GIB).blocks == 10
    with pytest.raises(ConfigError, match=r"asks for 10\.00 GiB, and the GPU has room for 9\.00 GiB"):
        size_pool(dataclasses.replace(cache, gpu_memory=11), GIB, GPU, lambda: None, reserve=GIB)


def test_a_pool_without_room_is_accounted_for(card: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"0\.9 of 4\.00 GiB: --gpu-memory-utilization of --gpu-memory; 1\.00 "):
        size_pool(CacheConfig(gpu_memory=4), GIB, GPU, lambda: None, reserve=2 * GIB)

    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has …")

    with pytest.raises(ConfigError, match=r"lower --max-num-batched-tokens or --max-num-seqs \(CUDA out of memory\)"):
        size_pool(CacheConfig(), GIB, GPU, too_large, reserve=0)


def test_gpu_memory_holds_the_process_to_a_smaller_card(card: dict[str, Any]) -> None:
    limit_memory(CacheConfig(gpu_memory=24), GPU)
    assert card["share"] == 23 / 80
    limit_memory(CacheConfig(), GPU)
    assert card["share"] == 1
    with pytest.raises(ConfigError, match=r"--gpu-memory 200 is more than the GPU has, which is 80\.00 GiB"):
        limit_memory(CacheConfig(gpu_memory=200), GPU)
    with pytest.raises(ConfigError, match=r"--gpu-memory 0\.5 leaves nothing: 1\.00 GiB"):
        limit_memory(CacheConfig(gpu_memory=0.5), GPU)
    limit_memory(CacheConfig(gpu_memory=24), CPU)


def test_a_card_too_small_is_told_before_the_weights_are_read(card: dict[str, Any]) -> None:
    config = EngineConfig(ModelConfig(), CacheConfig(gpu_memory=16))
    check_card(config, 13 * GIB, 2**17, GPU)
    with pytest.raises(ConfigError, match=r"weights take 15\.00 GiB and only 13\.40 GiB .* a larger --gpu-memory or"):
        check_card(config, 15 * GIB, 2**17, GPU)
    config = EngineConfig(ModelConfig(max_model_len=32768), CacheConfig(gpu_memory=16))
    with pytest.raises(ConfigError, match=r"--max-model-len 32768 needs 4\.00 GiB .* room for 3276 tokens .* lower it"):
        check_card(config, 13 * GIB, 2**17, GPU)
    check_card(config, 13 * GIB, 0, GPU)  # not known yet
    check_length(100, 100, 8)


def test_a_dtype_that_the_gpu_does_not_compute_in(card: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_dtype(torch.bfloat16, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    check_dtype(torch.float16, GPU)
    with pytest.raises(ConfigError, match=r"bfloat16 needs .* 8\.0 or later; this one \(H100\) has 7\.5: use --dtype"):
        check_dtype(torch.bfloat16, GPU)


def test_nothing_is_loaded_that_the_card_cannot_hold(
    tmp_path: Path, card: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    folder = save(tmp_path, "qwen3", head_dim=16, dtype=torch.bfloat16)
    monkeypatch.setattr(runner, "choose_device", lambda wanted: GPU)
    monkeypatch.setattr(runner, "load_model", lambda *_: pytest.fail("the weights were read"))
    card["free"] = 8 * GIB
    with pytest.raises(ConfigError, match=r"the weights take 0\.00 GiB and only 0\.00 GiB"):
        load(EngineConfig(ModelConfig(model=str(folder))))
    save(tmp_path, "llama", hidden_size=36, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"layer 0 has keys of 6 and values of 6 elements"):
        load(EngineConfig(ModelConfig(model=str(folder))))


def test_an_estimate_shows_what_the_weights_do(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3", head_dim=16)
    found, loaded = estimate(ModelConfig(model=str(folder)), CPU), load(EngineConfig(ModelConfig(model=str(folder))))
    assert found.weights_bytes == pytest.approx(loaded.info.weights_bytes, rel=1e-2)
    assert sum(layout.token_bytes(found.dtype) for layout in found.layouts) * 16 == loaded.info.bytes_per_block


@needs_gpu
def test_the_pool_takes_what_utilization_leaves(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3", head_dim=16)
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 2**32) / total
    config = EngineConfig(
        ModelConfig(model=str(folder)), CacheConfig(gpu_memory_utilization=share), SchedulerConfig(max_num_seqs=8)
    )
    info = load(config).info
    assert 2**31 < info.num_blocks * info.bytes_per_block < 2**32
    assert info.activation_bytes > 0
    assert info.graph_bytes > 0
    assert torch.cuda.mem_get_info()[0] >= total * (1 - share) - 2**28

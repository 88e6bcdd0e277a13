"""The script that measures a float8 cache rounds as the GPU's kernels do, and leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from anaphora import LLM
from anaphora.attention.base import FLOAT8, KVLayout
from anaphora.attention.cpu import CpuAttention
from tests.support.attention import read_row, token_row
from tests.support.checkpoints import save

pytestmark = pytest.mark.slow


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    monkeypatch.delitem(sys.modules, "float8_cache", raising=False)
    import float8_cache

    return float8_cache


def test_it_rounds_as_a_pool_in_float8_does(script: ModuleType) -> None:
    layout = KVLayout(3, 24, 16)
    keys, values = torch.randn(3, 24), 100 * torch.randn(3, 16)
    pool = torch.zeros(1, layout.token_bytes(FLOAT8), dtype=torch.uint8)
    kept = read_row(token_row([keys, values], pool), layout)
    for given, wanted in zip((keys, values), kept, strict=True):
        assert torch.allclose(script.float8(given).double(), wanted, rtol=1e-6, atol=0)


def test_rounding_moves_log_probabilities_and_is_undone(script: ModuleType, tmp_path: Path) -> None:
    run, ids = CpuAttention.run, [(7 * i + 3) % 300 for i in range(60)]
    with LLM(str(save(tmp_path)), device="cpu", kv_cache_memory_bytes="2M", max_model_len=128) as llm:
        seen = {name: script.logprobs(llm, ids, rounded) for name, rounded in script.CACHES.items()}
    assert CpuAttention.run is run
    errors = {name: script.compare(seen["float32"], each)["logprob_error_rms"] for name, each in seen.items()}
    assert errors["float32"] == 0 < errors["bfloat16"] < errors["fp8"]
    assert script.compare(seen["float32"], seen["float32"])["same_likeliest_token"] == 1

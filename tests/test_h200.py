"""The GPU benchmark runs through, with a tiny model, and its figures say what happened."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def h200(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("h200", repository / "benchmarks" / "h200.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_rows_of_a_tiny_model(h200: ModuleType, tmp_path: Path) -> None:
    bench = h200.Bench(h200.TINY, tmp_path)
    size = h200.TINY
    on, off = bench.shared(256), bench.shared(256, caching=False)
    assert (on["requests"], off["requests"]) == (4, 4)
    share = size.shared / (size.shared + size.own)
    assert share - 1e-3 < on["hit_rate"] < share + 0.02  # random tokens of two prompts may begin alike
    assert off["hit_rate"] == 0
    assert on["output_tokens_per_s"] == pytest.approx(on["requests_per_s"] * size.answer, rel=1e-2)
    assert bench.alone(hit=True)["hit_rate"] > bench.alone(hit=False)["hit_rate"] == 0
    assert {"on_512", "on_512_unshared", "off_256", "ttft_hit", "single_stream"} <= h200.rows(bench).keys()

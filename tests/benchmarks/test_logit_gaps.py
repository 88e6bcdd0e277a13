"""The gaps between ways to compute the same logits are measured between the right ones, with a tiny model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_gaps_of_a_tiny_model(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    gaps = importlib.import_module("logit_gaps")
    steps = gaps.Steps(gaps.Bench(gaps.TINY, tmp_path))
    found = gaps.measure(steps)
    assert all(gap["largest_gap"] < 1e-4 and gap["other_token"] == 0 for gap in found.values())
    plain = steps.decode(share=False, graphs=False)
    for pool in steps._runner._backend.pools:
        pool[steps._size : 2 * steps._size] += 10.0  # a block of the shared prefix
    assert gaps.compare(steps.decode(share=True, graphs=False), plain)["largest_gap"] > 1e-4

"""The public names: loaded on first use, and a plain word where the engine is not installed."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest

import anaphora
from anaphora.types import outputs, sampling


def test_public_names() -> None:
    assert anaphora.SamplingParams is sampling.SamplingParams
    assert anaphora.RequestOutput is outputs.RequestOutput
    assert anaphora.CompletionOutput is outputs.CompletionOutput
    assert anaphora.__version__ == importlib.metadata.version("anaphora")
    assert dir(anaphora) == sorted(anaphora.__all__)


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="module 'anaphora' has no attribute 'Llm'"):
        _ = anaphora.Llm


def test_without_the_engine_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(anaphora), "LLM", raising=False)

    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named 'torch' (for {name})", name="torch")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"LLM needs torch: run pip install '\.\[serve\]'"):
        _ = anaphora.LLM

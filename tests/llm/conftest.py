"""An LLM over the fake runner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anaphora import LLM
from anaphora import llm as llm_module
from anaphora.checkpoint.resolve import ModelSource
from tests.support.engine import VOCAB, FakeRunner
from tests.support.llm import WINDOW, Make
from tests.support.tokenizers import write_tokenizer


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(num_blocks=200, context_length=WINDOW)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, VOCAB)
    return tmp_path


@pytest.fixture
def make(runner: FakeRunner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes an LLM over the fake runner. At the end every one must have its blocks in order and nothing left to do."""
    made: list[LLM] = []
    monkeypatch.setattr(llm_module, "load", lambda config: runner)
    monkeypatch.setattr(llm_module, "resolve", lambda model, **options: ModelSource(folder, "fake", "fake-1"))

    def make(**settings: Any) -> LLM:
        made.append(LLM(str(folder), **({"block_size": runner.info.block_size} | settings)))
        return made[-1]

    yield make
    for llm in (llm for llm in made if not llm.closed):
        llm.check()
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.referenced_blocks) == (0, 0, 0)
    assert not runner.faults


@pytest.fixture
def llm(make: Make) -> LLM:
    return make()

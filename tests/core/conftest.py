from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def engine_surroundings(monkeypatch: pytest.MonkeyPatch, repository: Path) -> Iterator[None]:
    """The engine process can import ``tests``; temporary files go to an empty folder with a short name."""
    path = (str(repository), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield

"""What every test may count on: few threads, no hub, no time limits of hypothesis, the shared data where it exists."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before any test imports torch or the hub's client, which read these once. Subprocesses inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # the GPU's kernels run on the CPU

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _temporary_root(tmp_path_factory: pytest.TempPathFactory) -> None:
    # pytest chooses the root of all its temporary folders at first use. Tests that move tempfile's folder for
    # themselves must not be that first use, or the root would vanish with theirs.
    tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real traces and cases beside the source tree; skips the test where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared test data (../shared/data) is not on this machine")
    return folder


@pytest.fixture
def amx_used(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the test runs on AMX kernels; False switches them off. See ``tests/support/amx.py``."""
    from anaphora.kernels.cpu import amx

    used: bool = request.param
    monkeypatch.setattr(amx, "AMX", used)
    return used


@pytest.fixture
def engine_surroundings(monkeypatch: pytest.MonkeyPatch, repository: Path) -> Iterator[None]:
    """The engine process can import ``tests``; temporary files go to an empty folder with a short name."""
    path = (str(repository), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield

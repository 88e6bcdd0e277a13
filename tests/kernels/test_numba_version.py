"""Fails, and says what to check, when numba or llvmlite is not a version that the CPU kernels were tested with.

kernels/cpu emits LLVM code through numba.core, which numba does not document, and names cached kernels itself.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

from anaphora.kernels.cpu import norm_rope, simd

BOUNDS = {"numba": ">=0.68,<0.69", "llvmlite": ">=0.50,<0.51"}
"""tests/kernels passed with numba 0.68.0 and 0.68.1, and llvmlite 0.50.0."""

WHAT_TO_DO = (
    "kernels/cpu uses numba.core.cgutils, numba.extending.intrinsic and numba.cfunc's cache in ways that numba "
    "does not document: run tests/kernels with the new version, with an empty kernel cache and then a filled one, "
    "with AMX and with ANAPHORA_CPU_AMX=0; then widen the bounds here and in pyproject.toml"
)


@pytest.mark.parametrize("package", BOUNDS)
def test_the_installed_version_was_tested(package: str) -> None:
    assert version(package) in SpecifierSet(BOUNDS[package]), WHAT_TO_DO


@pytest.mark.parametrize("package", BOUNDS)
def test_the_bounds_are_what_was_tested(package: str, repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"{package}{BOUNDS[package]}" in project["optional-dependencies"]["serve"], WHAT_TO_DO


def test_what_is_used_of_a_compiled_kernel_is_there() -> None:
    """The address that threads call, and the name under which the kernel is cached."""
    kernel = norm_rope.norm_rows
    assert kernel.address > 0, WHAT_TO_DO
    assert kernel._pyfunc.__qualname__.startswith("norm_rows_"), WHAT_TO_DO
    assert kernel.cache_hits is not None, WHAT_TO_DO


def test_an_intrinsic_without_a_result_compiles() -> None:
    """``operation`` returns numba's dummy value from code that only stores."""
    memory = np.zeros(16, np.float32)
    compiled = simd.njit(lambda address: simd.put_float32(address, 2, 3.0))
    compiled(memory.ctypes.data)
    assert memory.tolist() == [0.0, 0.0, 3.0, *[0.0] * 13], WHAT_TO_DO

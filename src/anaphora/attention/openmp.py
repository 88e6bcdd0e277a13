"""Runs compiled kernels on the threads that torch has anyway.

A pool of threads beside torch's would fight with it over the same cores, so kernels go to the very OpenMP library that
torch is linked with. Where torch has none, the calling thread does all the work.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

try:
    _parallel: Any = ctypes.CDLL(torch._C.__file__).GOMP_parallel
except (AttributeError, OSError):
    _parallel = None
else:
    _parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    _parallel.restype = None


def threads() -> int:
    """How many threads ``run`` uses at most."""
    return 1 if _parallel is None else torch.get_num_threads()


def run(kernel: Any, record: int, workers: int) -> None:
    """Call ``kernel``, compiled by numba's cfunc, with the address ``record`` on ``workers`` threads; wait for all."""
    if workers == 1:
        kernel.ctypes(record)
    else:
        _parallel(kernel.address, record, workers, 0)

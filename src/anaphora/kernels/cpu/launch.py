"""Runs compiled kernels on torch's OpenMP threads, so that no second thread pool competes for the cores.

Where torch has no OpenMP, the calling thread does all the work.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anaphora.kernels.cpu.simd import BFLOAT16, FLOAT32

DTYPES = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
"""The kernels' codes of torch dtypes."""

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


class Call:
    """A kernel, compiled by numba's cfunc, and its argument: the address of a record of int64 and float64 fields.

    The record begins with ``counters``, the address of the two counters after it: items taken, threads started.
    ``given`` are the values of fields that never change; ``names`` are the fields set at each call, which are adjacent
    in the record and in its order.
    """

    def __init__(self, kernel: Any, record: np.dtype[Any], names: Sequence[str], given: Mapping[str, Any]) -> None:
        self._function, self._address = kernel.ctypes, kernel.address
        self.record = np.zeros((), record)
        fields: Any = self.record
        self._at = int(self.record.ctypes.data)
        fields["counters"] = self._at + record.fields["taken"][1]  # type: ignore[index]
        for name, value in given.items():
            fields[name] = value
        kinds = "".join("d" if record[name].kind == "f" else "q" for name in names)
        self._pack = struct.Struct(f"={kinds}").pack_into
        self._bytes = memoryview(self.record.reshape(1).view(np.uint8))
        self._first = record.fields[names[0]][1]  # type: ignore[index]
        self._counters = struct.Struct("=qq").pack_into

    def __call__(self, workers: int, *values: float) -> None:
        """Run with ``values`` in the fields ``names``, on ``workers`` threads; wait for all."""
        self._pack(self._bytes, self._first, *values)
        self._counters(self._bytes, 8, 0, 0)
        if workers == 1:
            self._function(self._at)
        else:
            _parallel(self._address, self._at, workers, 0)


def fields(*names: str, real: Sequence[str] = ()) -> np.dtype[Any]:
    """The dtype of a record: the counters, then int64 fields, then those in ``real``, float64."""
    integers = [(name, np.int64) for name in ("counters", "taken", "come", *names)]
    return np.dtype(integers + [(name, np.float64) for name in real], align=True)


def fields_from(record: np.dtype[Any], first: str) -> tuple[str, ...]:
    """Returns the names of the record's fields from ``first`` on."""
    names = record.names or ()
    return names[names.index(first) :]


def aligned_bytes(size: int) -> Tensor:
    """Returns ``size`` bytes of uninitialized memory, uint8, that begin at a cache line.

    It is allocated by numpy, which asks for huge pages where the system has them; torch does not.
    """
    memory = torch.from_numpy(np.empty(size + 64, np.uint8))
    start = -memory.data_ptr() % 64
    return memory[start : start + size]

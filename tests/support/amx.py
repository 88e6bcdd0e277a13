"""Runs a test on the CPU's AMX kernels and, with AMX switched off, on the generic ones."""

from __future__ import annotations

import pytest

from anaphora.kernels.cpu import amx

NEEDS_AMX = pytest.mark.skipif(
    not amx.AMX, reason=f"no AMX, or {amx.SWITCH}=0: the results of the AMX kernels are unproved here"
)

on_and_off = pytest.mark.parametrize(
    "amx_used", [pytest.param(True, id="amx", marks=NEEDS_AMX), pytest.param(False, id="generic")], indirect=True
)
"""Parametrizes a test (or a module) by the fixture ``amx_used``; only its AMX half skips on a machine without AMX."""

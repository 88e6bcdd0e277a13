"""Every Triton kernel compiles for Hopper (sm_90). No GPU is needed: the compiler is part of triton's package.

The interpreter that runs the kernels on a CPU does not check types, so a kernel can pass there and not compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

ATTENTION: dict[str, Any] = {
    "HEADS": 8,
    "G": 4,
    "KEY": 128,
    "KEY_A": 128,
    "KEY_B": 0,
    "VALUE": 128,
    "VALUE_A": 128,
    "VALUE_B": 0,
    "LATENT": False,
    "ROW": 2048,
    "FLOAT8": False,
    "BLOCK_SIZE": 16,
    "BLOCK_M": 16,
    "BLOCK_N": 64,
    "SOFTCAP": False,
    "WINDOW": False,
    "SINKS": False,
    "PRECISION": "tf32",
}
LATENTS = {
    "HEADS": 1,
    "G": 20,
    "KEY": 576,
    "KEY_A": 512,
    "KEY_B": 64,
    "VALUE": 512,
    "VALUE_A": 512,
    "LATENT": True,
    "ROW": 576,
    "BLOCK_M": 32,
    "BLOCK_N": 32,
}
UNEVEN = {"KEY": 80, "KEY_A": 64, "KEY_B": 16, "VALUE": 80, "VALUE_A": 64, "VALUE_B": 16, "ROW": 1280}
MERGE = {"H": 32, "HEADS": 4, "VALUE": 128, "BLOCK": 128}
WRITE = {"HEADS": 8, "KEY": 128, "VALUE": 128, "LATENT": False, "ROW": 2048}
NORM_ROPE = {"QUERY_HEADS": 32, "HEADS": 40, "SIZE": 128, "HALF": 64, "HEADS_PER_PROGRAM": 4}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "attention": ("attention", "paged_attention", ATTENTION),
    "attention over latents": ("attention", "paged_attention", ATTENTION | LATENTS),
    "attention over two parts of a head": ("attention", "paged_attention", ATTENTION | UNEVEN),
    "attention over float8": ("attention", "paged_attention", ATTENTION | {"FLOAT8": True, "ROW": 2112}),
    "attention with softcap, window and sinks": (
        *("attention", "paged_attention"),
        ATTENTION | {"SOFTCAP": True, "WINDOW": True, "SINKS": True},
    ),
    "merge": ("attention", "merge_partials", MERGE | {"SINKS": False}),
    "merge with sinks": ("attention", "merge_partials", MERGE | {"SINKS": True}),
    "write": ("attention", "write_kv", WRITE | {"BLOCK": 1024}),
    "write float8": ("attention", "write_kv_float8", WRITE | {"H": 8, "KEY_N": 128, "VALUE_N": 128}),
    "RMS norm": ("norm_rope_silu", "rms_norm", {"SIZE": 4096, "BLOCK": 4096, "ADD": True}),
    "norm and RoPE": ("norm_rope_silu", "norm_rope", NORM_ROPE | {"NORM": True}),
    "RoPE": ("norm_rope_silu", "norm_rope", NORM_ROPE | {"NORM": False}),
    "SiLU": ("norm_rope_silu", "silu_and_mul", {"SIZE": 12288, "BLOCK": 1024}),
}

# Arguments that are not bfloat16 pointers.
TYPES = dict.fromkeys(("scales", "partial_out", "partial_lse"), "*fp32")
TYPES |= dict.fromkeys(("items", "item_rows", "num_items", "tables", "merges", "num_merges"), "*i32")
TYPES |= dict.fromkeys(("positions", "slot_mapping"), "*i64") | dict.fromkeys(("scale", "softcap", "eps"), "fp32")
TYPES |= dict.fromkeys(("window",), "i32")

COMPILE = """
import importlib, json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
module, name, constants, types = json.loads(sys.stdin.read())
kernel = getattr(importlib.import_module(f"anaphora.kernels.triton.{module}"), name)
def type_of(argument):
    if argument in constants:
        return "constexpr"
    return types.get(argument, "i32" if argument.endswith("_stride") else "*bf16")
signature = {argument: type_of(argument) for argument in kernel.arg_names}
if name == "write_kv_float8":
    signature["pool"] = "*fp8e4nv"
if constants.get("FLOAT8"):
    signature["pool"] = "*fp8e4nv"
made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
print(len(made.asm["cubin"]))
"""


def compile_kernel(module: str, name: str, constants: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    given = json.dumps([module, name, constants, TYPES])
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", COMPILE], input=given, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_compiles(case: str) -> None:
    made = compile_kernel(*CASES[case])
    assert made.returncode == 0, made.stderr[-2000:]
    assert int(made.stdout) > 0


@pytest.mark.slow
def test_a_wrong_type_would_be_noticed() -> None:
    made = compile_kernel("attention", "merge_partials", MERGE | {"SINKS": False, "VALUE": "no number"})
    assert made.returncode != 0

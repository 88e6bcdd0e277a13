"""The compiled kernels against float64, at the borders of key blocks and tasks, on one thread and on several."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from anaphora.attention.base import KVLayout, LayerOptions, QueryRange, StepLayout
from anaphora.attention.cpu import CpuAttention
from anaphora.attention.cpu_plan import SEGMENT_TOKENS
from anaphora.kernels.cpu import amx
from anaphora.kernels.cpu.attention_generic import KEY_BLOCK
from anaphora.kernels.cpu.simd import LANES
from anaphora.kernels.cpu.write_kv import WRITE_ROWS
from tests.support.amx import on_and_off

NEEDS_BF16 = pytest.mark.skipif(
    not amx.PROCESSOR_HAS_AVX512_BF16, reason="no AVX-512 BF16: attention by its vectors is unproved here"
)
BLOCK = 4
HEADS = 6


def poisoned(layout: KVLayout, blocks: int, dtype: torch.dtype) -> CpuAttention:
    backend = CpuAttention([layout], blocks, BLOCK, dtype, torch.device("cpu"))
    backend.pools[0].fill_(torch.nan)
    return backend


def decode(layout: KVLayout, tokens: list[Tensor], query: Tensor, options: LayerOptions) -> Tensor:
    """Each of ``tokens`` ``[N, W]`` is a row over every second block of a poisoned pool; ``[rows, H, Dv]``."""
    backend = poisoned(layout, 2 + 2 * sum(len(x) // BLOCK + 1 for x in tokens), query.dtype)
    queries, slots, first = [], [], 1
    for row, known in enumerate(tokens):
        table = [first + 2 * i for i in range(len(known) // BLOCK + 1)]
        first = table[-1] + 2
        places = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(len(known))]
        backend.pools[0][places[:-1]] = known[:-1]
        queries.append(QueryRange(row, row, 1, len(known) - 1, table))
        slots.append(places[-1])
    backend.plan(StepLayout(torch.tensor(slots), tuple(queries)))
    new = torch.stack([known[-1] for known in tokens])
    keys, values = split(layout, new)
    return backend.run(0, query, keys, None if layout.latent else values, options)


def split(layout: KVLayout, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[Hkv, N, D]`` of ``tokens`` ``[N, W]``."""
    if layout.latent:
        return tokens[None], tokens[None, :, : layout.value_size]
    cut = layout.heads * layout.key_size
    parts = (tokens[:, :cut], layout.key_size), (tokens[:, cut:], layout.value_size)
    keys, values = (x.view(len(tokens), layout.heads, size).transpose(0, 1) for x, size in parts)
    return keys, values


def exact(layout: KVLayout, tokens: Tensor, query: Tensor, options: LayerOptions) -> Tensor:
    """``query`` ``[H, D]`` in float64; ``[H, Dv]``."""
    keys, values = (x.double().repeat_interleave(HEADS // layout.heads, 0) for x in split(layout, tokens))
    scores = (keys @ query.double()[:, :, None])[..., 0] * options.scale
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.window:
        scores[:, : -options.window] = -torch.inf
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks.double()[:, None]), 1)
    weights = scores.softmax(-1)[:, : len(tokens)]
    return (weights[:, None] @ values)[:, 0]


SHAPES = {
    "a vector": KVLayout(2, LANES, LANES),
    "four vectors": KVLayout(3, 64, 64),
    "no whole vector": KVLayout(2, 20, 12),
    "one head for all": KVLayout(1, 8, 8),
    "latents": KVLayout(1, 36, 20, latent=True),
}
OPTIONS = {
    "plain": LayerOptions(scale=0.3),
    "all": LayerOptions(scale=0.3, window=KEY_BLOCK + 3, softcap=3.0, sinks=torch.linspace(-1, 2, HEADS)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", SHAPES.values(), ids=SHAPES)
def test_every_shape_and_length(layout: KVLayout, options: LayerOptions, threads: int) -> None:
    torch.manual_seed(0)
    lengths = [1, 2, BLOCK, BLOCK + 1, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, SEGMENT_TOKENS, SEGMENT_TOKENS + 1, 601]
    tokens = [torch.randn(length, layout.width) for length in lengths]
    query = torch.randn(HEADS, len(lengths), layout.key_size)
    found = decode(layout, tokens, query, options)
    for row, known in enumerate(tokens):
        gap = (found[row] - exact(layout, known, query[:, row], options)).abs().max()
        assert float(gap) < 1e-5, lengths[row]


@pytest.mark.parametrize("bf16_vectors", [pytest.param(True, id="bf16-vectors", marks=NEEDS_BF16), False])
@on_and_off
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", SHAPES.values(), ids=SHAPES)
def test_bfloat16(
    layout: KVLayout,
    options: LayerOptions,
    threads: int,
    amx_used: bool,
    bf16_vectors: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(amx, "BF16_VECTORS", bf16_vectors)
    torch.manual_seed(3)
    lengths = [1, BLOCK + 1, 63, 64, 65, KEY_BLOCK, KEY_BLOCK + 1, SEGMENT_TOKENS + 1]
    tokens = [torch.randn(length, layout.width).bfloat16() for length in lengths]
    query = torch.randn(HEADS, len(lengths), layout.key_size).bfloat16()
    found = decode(layout, tokens, query, options)
    for row, known in enumerate(tokens):
        gap = (found[row] - exact(layout, known, query[:, row], options)).abs().max()
        # Weights and output are rounded to 8 bits.
        assert float(gap) < 2**-7 * float(known.abs().max()), lengths[row]


@pytest.mark.parametrize(
    "needle", [0, 3, 4, KEY_BLOCK - 1, KEY_BLOCK, SEGMENT_TOKENS - 1, SEGMENT_TOKENS, 598, 599, 600]
)
def test_a_needle_is_found_wherever_it_is(needle: int) -> None:
    layout = SHAPES["four vectors"]
    torch.manual_seed(needle)
    tokens = torch.randn(601, layout.width)
    tokens[needle, : layout.heads * layout.key_size] = 4.0
    out = decode(layout, [tokens], torch.ones(HEADS, 1, layout.key_size), OPTIONS["plain"])[0]
    expected = split(layout, tokens)[1][:, needle].repeat_interleave(HEADS // layout.heads, 0)
    assert float((out - expected).abs().max()) < 1e-3


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    layout = SHAPES["a vector"]
    torch.manual_seed(2)
    tokens = torch.randn(300, layout.width) * 200
    query = torch.randn(HEADS, 1, layout.key_size)
    out = decode(layout, [tokens], query, OPTIONS["plain"])[0]
    expected = exact(layout, tokens, query[:, 0], OPTIONS["plain"])
    assert float((out - expected).abs().max()) < 1e-3 * float(expected.abs().max())


@pytest.mark.parametrize("pool", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", [torch.bfloat16, torch.float32])
def test_new_tokens_are_rounded_as_torch_rounds(model: torch.dtype, pool: torch.dtype, threads: int) -> None:
    layout = KVLayout(2, 10, 6)
    backend = poisoned(layout, 50, pool)
    count = 2 * WRITE_ROWS + 5
    torch.manual_seed(1)
    # As a model gives them: heads side by side in a token, seen as [heads, tokens, size]; one of each kind of number.
    key, value = ((torch.randn(count, 2, size) * 1e3).to(model).transpose(0, 1) for size in (10, 6))
    key[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    slots = torch.randperm(199)[:count] + 1
    backend.plan(StepLayout(slots, (QueryRange(0, 0, count, 0, list(range(50))),)))
    backend.run(0, torch.zeros(HEADS, count, 10, dtype=model), key, value, OPTIONS["all"])
    expected = torch.cat([x.transpose(0, 1).flatten(1) for x in (key, value)], 1).to(pool)
    assert torch.equal(backend.pools[0][slots].nan_to_num(7.0), expected.nan_to_num(7.0))
    others = torch.ones(200, dtype=torch.bool)
    others[slots] = False
    assert backend.pools[0][others].isnan().all()


@pytest.mark.parametrize(("switch", "used"), [("0", False), ("1", amx.AMX), (None, amx.AMX)])
def test_the_environment_variable_switches_amx_off(switch: str | None, used: bool) -> None:
    code = "from anaphora.kernels.cpu import amx; print(amx.AMX, amx.PROCESSOR_HAS_AMX)"
    environment = {name: value for name, value in os.environ.items() if name != amx.SWITCH}
    environment |= {amx.SWITCH: switch} if switch else {}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    # What is compiled stays the same: kernels are kept on disk and found by runs with either setting.
    assert ran.stdout.split() == [str(used), str(amx.PROCESSOR_HAS_AMX)]


@pytest.mark.slow
def test_without_numba_it_is_said_what_to_install() -> None:
    code = "import sys; sys.modules['numba'] = None; import anaphora.attention.cpu"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "ModelError: attention on a CPU needs numba" in ran.stderr
    assert "pip install '.[serve]'" in ran.stderr

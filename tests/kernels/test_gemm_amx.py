"""Linear layers with packed weights against float64, for every number of rows."""

from __future__ import annotations

import hashlib
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from anaphora.kernels.cpu import attention_generic, decoder_amx, gemm_amx, write_kv
from anaphora.model.fuse.packed_linear import AmxLinear, OneDnnLinear, linear, packs
from tests.support.amx import NEEDS_AMX, on_and_off

SIZES = {"usual": (96, 64), "one pair of tiles": (32, 32), "many outputs": (64, 480), "an odd pair": (160, 96)}


def random(size: int, outputs: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(size + outputs)
    return torch.randn(outputs, size).bfloat16() / size**0.5, torch.randn(outputs).bfloat16()


@pytest.mark.parametrize("kind", [pytest.param(AmxLinear, marks=NEEDS_AMX), OneDnnLinear])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("size", "outputs"), SIZES.values(), ids=SIZES)
def test_every_number_of_rows(size: int, outputs: int, biased: bool, kind: type) -> None:
    weight, bias = random(size, outputs)
    if not packs(weight):
        pytest.skip("this processor multiplies no bfloat16")
    layer = kind(weight, bias if biased else None)
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 300):
        x = torch.randn(1, rows, size).bfloat16()
        expected = functional.linear(x.double(), weight.double(), bias.double() if biased else None)
        found = layer(x)
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) < 2**-7 * float(expected.abs().max()), rows


@NEEDS_AMX
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    layer = linear(*random(96, 64), row_invariant=True)
    x = torch.randn(200, 96).bfloat16()
    together = layer(x)
    for row in (0, 15, 16, 131, 199):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


@on_and_off
def test_nothing_behind_the_last_row_is_read(amx_used: bool) -> None:
    """The rows end where their memory does: what reads on ends the process."""
    weight, bias = random(64, 480)
    if not packs(weight):
        pytest.skip("this processor multiplies no bfloat16")
    layer, rows, size = linear(weight, bias, row_invariant=True), 5, 64
    assert isinstance(layer, AmxLinear if amx_used else OneDnnLinear)
    whole = mmap.mmap(-1, mmap.PAGESIZE)
    x = torch.frombuffer(whole, dtype=torch.bfloat16)[-rows * size :].view(rows, size)
    x.copy_(torch.randn(rows, size))
    assert torch.equal(layer(x), layer(x.clone()))


@on_and_off
def test_two_threads_do_not_share_their_scratch(amx_used: bool) -> None:
    """Each of two models may have a thread of its own."""
    if not packs(random(96, 480)[0]):
        pytest.skip("this processor multiplies no bfloat16")
    layers = [linear(*random(size, outputs), row_invariant=True) for size, outputs in ((96, 480), (160, 96))]
    inputs = [torch.randn(33, size).bfloat16() for size in (96, 160)]
    expected = [layer(x) for layer, x in zip(layers, inputs, strict=True)]

    def same(which: int) -> bool:
        return all(torch.equal(layers[which](inputs[which]), expected[which]) for _ in range(300))

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(same, (0, 1)))


@on_and_off
def test_layers_outside_the_fused_decoder_go_to_onednn(amx_used: bool) -> None:
    weight, bias = random(96, 64)
    if packs(weight):
        assert isinstance(linear(weight, bias), OneDnnLinear)
        assert isinstance(linear(weight, bias, row_invariant=True), AmxLinear if amx_used else OneDnnLinear)


def test_sizes_that_fill_no_tile_go_to_onednn() -> None:
    weight, bias = random(40, 64)
    if packs(weight):
        assert isinstance(linear(weight, bias, row_invariant=True), OneDnnLinear)


def test_a_kernel_is_kept_under_the_hash_of_all_its_sources() -> None:
    """numba looks at the file of the function alone: after a change of another it would run what it compiled before."""
    found = hashlib.sha256()
    for path in sorted(Path(gemm_amx.__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    for kernel in (attention_generic.attend, write_kv.write_rows, decoder_amx.decode, gemm_amx.linear):
        assert kernel._pyfunc.__qualname__.endswith(found.hexdigest()[:12])

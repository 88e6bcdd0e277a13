"""Whole models through the GPU's kernels (interpreted where there is no GPU) give the logits of the CPU's attention."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from anaphora.attention import base, gpu_plan
from anaphora.model import memory
from anaphora.types.batch import BlockCopy, PrefixGroup
from tests.support.attention import poisoned, round_to_float8
from tests.support.checkpoints import save
from tests.support.steps import Recorder

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from anaphora.attention import gpu as backend_module

pytestmark = pytest.mark.slow

BLOCK = 16
PROMPT = [(7 * i + 3) % 300 for i in range(43)]
FOLLOWER = [*PROMPT[:37], *((11 * i + 5) % 300 for i in range(9))]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gpt_oss": {"head_dim": 16},
    "glm4_moe_lite": {},
}
TOLERANCE = 2e-3
FLOAT8_GAP = 1.0


def triton_recorder(folder: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str = "auto") -> Recorder:
    monkeypatch.setattr(gpu_plan, "MIN_SHARED_KEYS", 1)
    monkeypatch.setattr(gpu_plan, "MIN_SAVED_BYTES", 1)
    round_to_float8(monkeypatch)
    if torch.cuda.is_available():
        return Recorder(folder, block_size=BLOCK, blocks=20, kv_dtype=kv_dtype, device="cuda")
    with monkeypatch.context() as patch:
        patch.setitem(base._BACKENDS, "cpu", base._BACKENDS["cuda"])
        patch.setattr(memory, "_GPU_ONLY", ())
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        return Recorder(folder, block_size=BLOCK, blocks=20, kv_dtype=kv_dtype)


def logits(recorder: Recorder, corrupt: bool = False) -> list[torch.Tensor]:
    """A prompt in two chunks, then one that reuses it to the middle of a block, then decode steps of both.

    On a GPU the last of them are CUDA graphs: nothing else goes on with tokens that were sampled.
    """
    r, found = recorder, []
    join = r.join(0, PROMPT, [1, 2, 3])
    r.step(r.chunk(0, 0, 25), joins=[join])
    if corrupt:
        for pool in r.pools:
            pool[BLOCK + 3] += 1.0
    r.step(r.chunk(0, 25, 43))
    found.append(r.logits[0])
    join = r.join(1, FOLLOWER, [1, 2, 4])
    r.step(r.chunk(1, 37, 46), r.token(0, 43, 17), joins=[join], copies=[BlockCopy(3, 4, 5)])
    found += [r.logits[0], r.logits[1]]
    for at in range(2):
        r.step(r.token(0, 44 + at), r.token(1, 46 + at), groups=[PrefixGroup(0, 2, (0, 1))])
        found += [r.logits[0], r.logits[1]]
    return [row.float().cpu() for row in found]


def gap(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference of two logits, as a share of the spread of their row; NaN counts as infinite."""
    worst = max(((a - b).abs().max() / b.std()).item() for a, b in zip(found, expected, strict=True))
    return worst if worst == worst else float("inf")


@pytest.mark.parametrize("family", SHAPES)
def test_logits_of_a_shared_prefix(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, family, **SHAPES[family])
    expected = logits(Recorder(folder, block_size=BLOCK, blocks=20))
    assert gap(logits(triton_recorder(folder, monkeypatch)), expected) < TOLERANCE
    assert gap(logits(triton_recorder(folder, monkeypatch), corrupt=True), expected) > TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe_lite"])
def test_a_cache_in_float8_moves_the_logits_a_little(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, family, **SHAPES[family])
    expected = logits(Recorder(folder, block_size=BLOCK, blocks=20))
    monkeypatch.setattr(backend_module, "check_float8", lambda layout, options: None)
    recorder = triton_recorder(folder, monkeypatch, "fp8")
    given = slice(3)  # what follows depends on the tokens that were sampled
    # Padding rows are uninitialised memory, which on the CPU is made not-a-number here.
    with nullcontext() if torch.cuda.is_available() else poisoned():
        found = logits(recorder)
    assert TOLERANCE < gap(found[given], expected[given]) < FLOAT8_GAP
    info = recorder.runner.info
    assert info.kv_dtype == "float8_e4m3fn"
    assert info.bytes_per_block == sum(pool.shape[1] for pool in recorder.pools) * BLOCK


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "glm4_moe_lite"])
def test_graphs_give_the_logits_of_eager_steps(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family, dtype=torch.bfloat16, **SHAPES.get(family, {}))
    eager = Recorder(folder, block_size=BLOCK, blocks=20, device="cuda", eager=True)
    graphs = Recorder(folder, block_size=BLOCK, blocks=20, device="cuda")
    assert eager.runner._graphs is None
    assert (graphs.runner.warnings, graphs.runner._graphs is None) == ((), False)
    ran = []
    run = graphs.runner._graphs.run
    graphs.runner._graphs.run = lambda inputs: ran.append(inputs) or run(inputs)
    assert gap(logits(graphs), logits(eager)) < 0.1
    assert len(ran) == 5  # chunks, chunks together with decode rows, decode rows in a group


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are compiled for a GPU")
@pytest.mark.parametrize("eager", [False, True])
def test_no_kernel_is_compiled_after_the_start(eager: bool, tmp_path: Path) -> None:
    from anaphora.kernels.triton.compile_watch import COMPILE_WATCH

    folder = save(tmp_path, "qwen3", dtype=torch.bfloat16, head_dim=64)
    recorder = Recorder(folder, block_size=BLOCK, blocks=80, device="cuda", eager=eager)
    before = COMPILE_WATCH.unexpected
    logits(recorder)
    for length in (1, 2, 15, 16, 17, 300, 700):
        prompt = [(5 * i + length) % 300 for i in range(length)]
        join = recorder.join(2, prompt, range(5, 5 + length // BLOCK + 1))
        recorder.step(recorder.chunk(2, 0, length), recorder.token(0, 46), joins=[join])
        recorder.step(recorder.token(2, length))
    assert COMPILE_WATCH.unexpected == before

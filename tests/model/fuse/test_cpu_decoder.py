"""All layers as one module: the same as transformers' own code, in whatever batch; other models keep their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from anaphora.attention.base import IMPLEMENTATION, KVLayout, LayerOptions
from anaphora.model.fuse.cpu_decoder import FusedDecoder, fuse
from anaphora.model.fuse.packed_linear import pack
from anaphora.types.batch import BlockCopy, PrefixGroup
from tests.support.amx import NEEDS_AMX, on_and_off
from tests.support.checkpoints import FAMILIES, VOCAB, make_config, make_model, save
from tests.support.steps import Recorder, eager_logits

FITTING: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "initializer_range": 0.2}
FUSED = ("llama", "smollm2", "mistral", "qwen2", "qwen3")
PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(45)]


def is_fused(run: Recorder) -> bool:
    return isinstance(run.runner._base.layers[0], FusedDecoder)


class Pair:
    """The same bfloat16 checkpoint served by us, and by transformers in float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.eager = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    def gap(self, run: Recorder, slot: int, tokens: list[int]) -> float:
        """The logits' distance after ``tokens``, as a part of their spread."""
        expected = eager_logits(self.eager, tokens)
        return float((run.logits[slot].float() - expected).norm() / (expected - expected.mean()).norm())


@pytest.fixture(scope="module", params=FUSED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    return Pair(save(folder, request.param, dtype=torch.bfloat16, **FITTING))


@on_and_off
@pytest.mark.parametrize("block_size", [16, 4])
def test_prompts_and_rows_of_every_kind(pair: Pair, block_size: int, amx_used: bool) -> None:
    """A whole prompt, chunks of it, a copied tail, rows in groups beside a chunk; in panels and in plain rows."""
    run = Recorder(pair.folder, block_size=block_size)
    assert is_fused(run) is amx_used
    per = 32 // block_size
    count = -(-60 // block_size)

    def table(first: int, shared: int = 0) -> list[int]:
        return [*range(1, 1 + shared), *range(first, first + count - shared)]

    run.step(chunk(run, 0, PROMPT, 0, 45), joins=[run.join(0, PROMPT, table(1))])
    gaps = [pair.gap(run, 0, PROMPT)]
    second = [*PROMPT[:32], 5, 6, 7]
    third = [*PROMPT[:37], 9, 8]
    copies = [BlockCopy(source=1 + per + (5 // block_size), target=60 + (5 // block_size), filled=5 % block_size)]
    for start, end in ((32, 33), (33, 35)):
        joins = [run.join(1, second, table(30, per))] if start == 32 else []
        run.step(chunk(run, 1, second, start, end), joins=joins)
    gaps.append(pair.gap(run, 1, second))
    shared = per + 5 // block_size
    run.step(
        chunk(run, 2, third, 37, 39), joins=[run.join(2, third, table(60 + 5 // block_size, shared))], copies=copies
    )
    gaps.append(pair.gap(run, 2, third))
    texts = {0: [*PROMPT], 1: second, 2: third}
    fresh = [(11 * i) % VOCAB for i in range(40)]
    groups = [PrefixGroup(0, per, (0, 1, 2))]
    for index in range(3):
        for slot in texts:
            texts[slot] = [*texts[slot], 100 + slot + index]
        rows = [run.token(slot, len(text) - 1, text[-1]) for slot, text in texts.items()]
        joins = [run.join(3, fresh, table(90))] if index == 1 else []
        more = [chunk(run, 3, fresh, 0, 40)] if index == 1 else []
        run.step(*rows[:1], *more, *rows[1:], joins=joins, groups=groups)
        gaps += [pair.gap(run, slot, text) for slot, text in texts.items()]
        if more:
            gaps.append(pair.gap(run, 3, fresh))
    # Transformers' code rounds to bfloat16 after each operation, the fused decoder less often.
    assert max(gaps) < (0.05 if amx_used else 0.07), gaps


def chunk(run: Recorder, slot: int, prompt: list[int], start: int, end: int) -> Any:
    run.prompts[slot] = tuple(prompt)
    return run.chunk(slot, start, end)


@NEEDS_AMX
def test_a_row_does_not_depend_on_the_rows_beside_it(pair: Pair) -> None:
    run = Recorder(pair.folder, block_size=16)
    for slot in range(9):
        run.step(chunk(run, slot, PROMPT, 0, 45), joins=[run.join(slot, PROMPT, range(1 + 4 * slot, 5 + 4 * slot))])
    run.step(run.token(0, 45, 7))
    alone = run.logits[0]
    run.step(*(run.token(slot, 45, 7 + slot) for slot in reversed(range(9))))
    assert torch.equal(run.logits[0], alone)
    assert not torch.equal(run.logits[1], alone)


@NEEDS_AMX
@pytest.mark.parametrize("block_size", [16, 48])
def test_a_cached_prefix_changes_no_bit(pair: Pair, block_size: int) -> None:
    """Wherever the cached part ends, and where all of the prompt but its last token is cached."""
    run = Recorder(pair.folder, block_size=block_size)
    prompt = [(5 * i * i + i) % VOCAB for i in range(300)]
    count = -(-300 // block_size)
    run.step(chunk(run, 0, prompt, 0, 300), joins=[run.join(0, prompt, range(1, 1 + count))])
    cold = run.logits[0]
    for cut in (1, 16, 127, 128, 143, 283, 284, 298, 299):
        run.step(chunk(run, 1, prompt, 0, cut), joins=[run.join(1, prompt, range(80, 80 + count))])
        run.step(chunk(run, 1, prompt, cut, 300))
        assert torch.equal(run.logits[1], cold), cut


@on_and_off
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in FUSED])
def test_other_families_keep_their_layers(family: str, tmp_path: Path, amx_used: bool) -> None:
    changes = {"hidden_size": 96, "intermediate_size": 160}
    run = Recorder(save(tmp_path, family, dtype=torch.bfloat16, **changes), block_size=16)
    assert not is_fused(run)
    assert len(run.runner._base.layers) == 3
    run.step(chunk(run, 0, PROMPT, 0, 45), joins=[run.join(0, PROMPT, range(1, 5))])
    assert torch.isfinite(run.logits[0]).all()


@on_and_off
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"intermediate_size": 168},
        {"head_dim": 16},
    ],
    ids=["another activation", "no whole tile", "a small head"],
)
def test_what_the_kernel_does_not_do_is_left_to_the_model(
    changes: dict[str, Any], tmp_path: Path, amx_used: bool
) -> None:
    folder = save(tmp_path, "llama", dtype=torch.bfloat16, **(FITTING | changes))
    pair, run = Pair(folder), Recorder(folder, block_size=16)
    run.step(chunk(run, 0, PROMPT, 0, 45), joins=[run.join(0, PROMPT, range(1, 5))])
    assert not is_fused(run)
    assert pair.gap(run, 0, PROMPT) < 0.05


@on_and_off
def test_a_pool_in_float32_is_read_as_such(tmp_path: Path, amx_used: bool) -> None:
    pair = Pair(save(tmp_path, "llama", dtype=torch.bfloat16, **FITTING))
    run = Recorder(pair.folder, block_size=16, kv_dtype="float32")
    assert is_fused(run) is amx_used
    run.step(chunk(run, 0, PROMPT, 0, 45), joins=[run.join(0, PROMPT, range(1, 5))])
    run.step(run.token(0, 45, 7))
    assert pair.gap(run, 0, [*PROMPT, 7]) < 0.05


@on_and_off
def test_what_depends_on_the_position_is_seen_in_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amx_used: bool
) -> None:
    """Ministral 3 scales its queries, from a position on that a prompt of the trial's length does not reach."""
    monkeypatch.setitem(FAMILIES, "ministral3", ("Ministral3Config", {}))
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 64}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    changes = {**FITTING, "rope_parameters": rope, "sliding_window": None}
    pair = Pair(save(tmp_path, "ministral3", dtype=torch.bfloat16, **changes))
    run = Recorder(pair.folder, block_size=16)
    prompt = [(7 * i * i + 3 * i) % VOCAB for i in range(400)]
    run.step(chunk(run, 0, prompt, 0, 400), joins=[run.join(0, prompt, range(1, 26))])
    assert pair.gap(run, 0, prompt) < 0.1


def test_weights_are_packed_as_the_registers_read_them() -> None:
    weight = torch.arange(32 * 64).view(32, 64).bfloat16()
    tile = pack(weight)[1, 1]
    assert tile.shape == (16, 16, 2)
    for pair in (0, 3, 15):
        for output in (0, 9):
            assert tile[pair, output].tolist() == weight[16 + output, 32 + 2 * pair : 34 + 2 * pair].tolist()


@pytest.mark.parametrize(("factor", "replaced"), [(1.0, True), (1.2, False)])
def test_a_layer_with_one_wrong_row_is_not_replaced(
    factor: float, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's own code in place of the kernel passes the parity check; with a fault in one row it does not."""
    model = make_model(make_config("llama", **FITTING)).to(torch.bfloat16).requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    base, layers = model.model, list(model.model.layers)
    layouts = [KVLayout(2, 32, 32) for _ in layers]
    options = dict.fromkeys(range(len(layers)), LayerOptions(scale=32**-0.5))

    def run(self: FusedDecoder, hidden: Tensor, angles: tuple[Tensor, Tensor], chosen: range) -> Tensor:
        out: Tensor = layers[chosen.start](hidden, position_embeddings=angles, attention_mask=None).clone()
        out[0, 7] += (factor - 1) * (out[0, 7] - hidden[0, 7])
        return out

    monkeypatch.setattr(FusedDecoder, "run", run)
    assert fuse(base, options, layouts) is replaced
    assert isinstance(base.layers[0], FusedDecoder) is replaced

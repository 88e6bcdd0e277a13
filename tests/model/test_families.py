"""Every family through the paged runner against transformers' own eager forward, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from anaphora.types.batch import BlockCopy, PrefixGroup
from tests.support.checkpoints import FAMILIES, SLIDING, VOCAB, save
from tests.support.steps import Recorder, eager_logits

TOLERANCE = 1e-4
PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(45)]
assert len(PROMPT) > 2 * SLIDING


class Pair:
    """The same checkpoint served by us and by transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.eager = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    def recorder(self, **options: Any) -> Recorder:
        return Recorder(self.folder, **options)

    def gap(self, recorder: Recorder, slot: int, tokens: list[int]) -> float:
        """Largest difference of the logits after ``tokens``."""
        found = recorder.logits[slot]
        assert torch.isfinite(found).all()
        return float((found - eager_logits(self.eager, tokens)).abs().max())


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(save(tmp_path_factory.mktemp(request.param), request.param))


def blocks(count: int, first: int = 1, step: int = 1) -> list[int]:
    return [first + step * i for i in range(count)]


def test_fresh_prompt(pair: Pair) -> None:
    run = pair.recorder()
    out = run.step(run_chunk(run, 0, PROMPT), joins=[run.join(0, PROMPT, blocks(12))])
    assert pair.gap(run, 0, PROMPT) < TOLERANCE
    assert out.tokens == {0: int(run.logits[0].argmax())}
    assert out.prompt_tokens_computed == len(PROMPT)


def run_chunk(run: Recorder, slot: int, prompt: list[int]) -> Any:
    run.prompts[slot] = tuple(prompt)
    return run.chunk(slot, 0, len(prompt))


@pytest.mark.parametrize("cuts", [(1,), (17, 18), (4, 8, 31), (44,)])
def test_chunks_at_odd_places_over_scattered_blocks(pair: Pair, cuts: tuple[int, ...]) -> None:
    run = pair.recorder()
    joins = [run.join(0, PROMPT, blocks(12, first=150, step=-3))]
    computed = 0
    for start, end in zip((0, *cuts), (*cuts, len(PROMPT)), strict=True):
        computed += run.step(run.chunk(0, start, end), joins=joins).prompt_tokens_computed
        joins = []
    assert pair.gap(run, 0, PROMPT) < TOLERANCE
    assert computed == len(PROMPT)


def test_prefix_reused_copied_and_hit_in_full(pair: Pair) -> None:
    run = pair.recorder()
    run.step(run_chunk(run, 0, PROMPT), joins=[run.join(0, PROMPT, blocks(12))])
    cold = run.logits[0]
    shared = [*PROMPT[:24], 5, 6, 7, 8, 9]
    join = run.join(1, shared, [*blocks(6), 30, 31])
    run.step(run.chunk(1, 24, 29), joins=[join])
    assert pair.gap(run, 1, shared) < TOLERANCE
    # 26 tokens in common: the seventh block is copied as far as it is the same.
    partly = [*PROMPT[:26], 5, 6, 7]
    join = run.join(2, partly, [*blocks(6), 40, 41])
    run.step(run.chunk(2, 26, 29), joins=[join], copies=[BlockCopy(source=7, target=40, filled=2)])
    assert pair.gap(run, 2, partly) < TOLERANCE
    # A full hit computes the last token for its logits alone and writes nothing.
    before = [pool.clone() for pool in run.pools]
    join = run.join(3, PROMPT, blocks(12))
    run.step(run.chunk(3, 44, 45, write_from=45), joins=[join])
    assert torch.allclose(run.logits[3], cold, atol=TOLERANCE)
    null = slice(run.block_size, None)
    assert all(torch.equal(a[null].nan_to_num(), b[null].nan_to_num()) for a, b in zip(before, run.pools, strict=True))


def test_decode_in_nested_groups_beside_a_prompt(pair: Pair) -> None:
    run = pair.recorder()
    prompts = {
        0: [*PROMPT[:32], 1, 2],
        1: [*PROMPT[:32], 3],
        2: [*PROMPT[:16], 4, 5, 6, 7, 8, 9, 10],
        3: [11, 12, 13, 14, 15],
    }
    tables = {
        0: [*blocks(8), 40, 41, 42],
        1: [*blocks(8), 50, 51, 52],
        2: [*blocks(4), 60, 61, 62, 63],
        3: [70, 71, 72, 73],
    }
    joins = [run.join(slot, prompt, tables[slot]) for slot, prompt in prompts.items()]
    run.step(run.chunk(0, 0, 34), joins=joins)
    run.step(run.chunk(1, 32, 33), run.chunk(2, 16, 23), run.chunk(3, 0, 5))
    texts = {slot: [*prompt, 100 + slot] for slot, prompt in prompts.items()}
    groups = [PrefixGroup(4, 8, (0, 1)), PrefixGroup(0, 4, (0, 1, 2))]
    fresh = [*PROMPT[:9], 77, 78]
    decode = [run.token(slot, len(prompts[slot]), 100 + slot) for slot in (2, 0, 3, 1)]
    run.step(
        decode[0],
        run_chunk(run, 4, fresh),
        *decode[1:],
        joins=[run.join(4, fresh, blocks(3, 80))],
        groups=groups,
    )
    for slot, text in {**texts, 4: fresh}.items():
        assert pair.gap(run, slot, text) < TOLERANCE, slot
    for _ in range(3):
        for slot in texts:
            texts[slot].append(int(run.logits[slot].argmax()))
        run.step(*(run.token(slot, len(text) - 1) for slot, text in texts.items()), groups=groups)
        for slot, text in texts.items():
            assert pair.gap(run, slot, text) < TOLERANCE, slot


@pytest.mark.parametrize("fault", ["key dropped", "position off by one", "cached block corrupted"])
def test_planted_faults_are_seen(pair: Pair, fault: str) -> None:
    run = pair.recorder()
    text = [*PROMPT, 9]
    joins = [run.join(0, PROMPT, blocks(12))]
    run.step(run.chunk(0, 0, len(PROMPT)), joins=joins)
    position = len(PROMPT)
    if fault == "key dropped":  # the newest of the prompt, which every window holds
        for pool in run.pools:
            pool[_slot(run, position - 1)] = 0.0
    elif fault == "position off by one":
        position -= 1
    else:
        for pool in run.pools:
            pool[_slot(run, 40) : _slot(run, 43)] *= -1
    run.step(run.token(0, position, 9))
    found = run.logits[0].nan_to_num(1e3)
    assert float((found - eager_logits(pair.eager, text)).abs().max()) > 10 * TOLERANCE


def _slot(run: Recorder, position: int) -> int:
    return run.block_size + position

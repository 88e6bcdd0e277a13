"""The runner's own duties: the pool, failures, log-probabilities, bfloat16 and the identity of what it caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anaphora.config import CacheConfig, EngineConfig, ModelConfig
from anaphora.errors import ConfigError, StepFailed
from anaphora.model import runner
from anaphora.model.runner import LOGIT_ROWS
from anaphora.types.batch import BlockCopy, Chunk
from anaphora.types.sampling import SamplingParams
from tests.support.checkpoints import VOCAB, save
from tests.support.steps import Recorder

PROMPT = [(5 * i * i + 2) % VOCAB for i in range(LOGIT_ROWS + 30)]
TABLE = list(range(1, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"))


def config(folder: Path, **cache: object) -> EngineConfig:
    return EngineConfig(ModelConfig(model=str(folder), device="cpu"), CacheConfig(**cache))


def test_the_pool_is_as_large_as_asked(folder: Path) -> None:
    info = runner.load(config(folder, kv_cache_memory_bytes=10**6, block_size=8)).info
    assert info.bytes_per_block == 3 * 2 * (8 + 8) * 4 * 8
    assert info.num_blocks == 10**6 // info.bytes_per_block
    assert (info.dtype, info.kv_dtype, info.device, info.vocab_size) == ("float32", "float32", "cpu", VOCAB)


def test_a_pool_without_room_for_a_block_is_refused_with_numbers(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"6144 bytes.*at least 12288"):
        runner.load(config(folder, kv_cache_memory_bytes=8000))


@pytest.mark.parametrize("name", ["fp8", "int8", "float16", "nvfp4"])
def test_a_kv_dtype_that_a_cpu_has_not_is_named(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*auto, bfloat16 or float32"):
        runner.load(config(folder, kv_cache_dtype=name))


def test_identity_tells_weights_and_kv_dtype_apart(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path, seed=1)
    identities = {
        runner.load(config(place, kv_cache_dtype=dtype, kv_cache_memory_bytes=10**6)).info.identity
        for place in (folder, other)
        for dtype in ("auto", "bfloat16")
    }
    assert len(identities) == 4
    again = runner.load(config(folder, kv_cache_dtype="float32", kv_cache_memory_bytes=10**6)).info.identity
    assert again in identities


def test_bfloat16_keys_and_values_round_little(folder: Path) -> None:
    exact, rounded = Recorder(folder), Recorder(folder, kv_dtype="bfloat16")
    for run in (exact, rounded):
        run.step(*prefill(run))
    gap = float((exact.logits[0] - rounded.logits[0]).abs().max())
    assert 0 < gap < 0.05 * float(exact.logits[0].abs().max())


def prefill(run: Recorder) -> list[Chunk]:
    joins = [run.join(0, PROMPT, TABLE)]
    run.step(run.chunk(0, 0, 50), joins=joins)
    return [run.chunk(0, 50, len(PROMPT))]


def test_in_bfloat16_a_cut_changes_no_more_than_rounding(tmp_path: Path) -> None:
    save(tmp_path, dtype=torch.bfloat16)
    logits = []
    for cuts in ([], [50], [1, 17, 64, 90]):
        run = Recorder(tmp_path)
        joins = [run.join(0, PROMPT, TABLE)]
        for start, end in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True):
            run.step(run.chunk(0, start, end), joins=joins)
            joins = []
        logits.append(run.logits[0])
    for other in logits[1:]:
        assert float((other - logits[0]).abs().max()) < 0.05 * float(logits[0].abs().max())


def test_a_failed_step_is_raised_by_result_and_the_next_one_works(folder: Path) -> None:
    run = Recorder(folder)
    run.step(*prefill(run))
    expected = run.logits[0]
    with pytest.raises(StepFailed, match="slot 0"):
        run.step(Chunk(0, 500, 1, (1,), 500, (), True))
    with pytest.raises(StepFailed, match="slot 0: block table entry 99"):
        run.step(Chunk(0, 3, 1, (1,), 3, ((99, 1),), True))
    run.step(*prefill(run))
    assert torch.equal(run.logits[0], expected)


def test_table_changes_and_copies_come_before_the_forward_pass(folder: Path) -> None:
    run = Recorder(folder)
    run.step(*prefill(run))
    cold = run.logits[0]
    # Slot 1 has the same prompt up to position 89, the last block as a copy that it writes to.
    joins = [run.join(1, PROMPT, TABLE[:22])]
    chunk = Chunk(1, 90, 4, tuple(PROMPT[90:]), 90, ((22, 60), (23, 61)), True)
    run.step(chunk, joins=joins, copies=[BlockCopy(source=23, target=60, filled=2)])
    assert torch.allclose(run.logits[1], cold, atol=1e-4)


def test_prompt_logprobs_are_the_same_across_chunks(folder: Path) -> None:
    asking = SamplingParams(temperature=0.0, max_tokens=None, prompt_logprobs=3)
    whole = Recorder(folder)
    out = whole.step(Chunk(0, 0, len(PROMPT), tuple(PROMPT), 0, (), True), joins=[whole.join(0, PROMPT, TABLE, asking)])
    entries = out.prompt_logprobs[0]
    assert [entry.token_id for entry in entries] == PROMPT[1:]
    cut = Recorder(folder)
    joins, found = [cut.join(0, PROMPT, TABLE, asking)], []
    for start, end in ((0, 31), (31, 32), (32, len(PROMPT))):
        found += cut.step(cut.chunk(0, start, end), joins=joins).prompt_logprobs[0]
        joins = []
    assert [(e.token_id, e.rank) for e in found] == [(e.token_id, e.rank) for e in entries]
    assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in zip(found, entries, strict=True))
    assert all(len(entry.top) == 3 for entry in found)


def test_free_memory_is_a_number_of_bytes(folder: Path) -> None:
    assert runner.load(config(folder, kv_cache_memory_bytes=10**6)).free_memory() > 2**20

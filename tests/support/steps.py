"""Builds batches for a ModelRunner by hand: which slot computes which positions over which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from anaphora.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from anaphora.model import runner
from anaphora.types.batch import Batch, BlockCopy, Chunk, Join, PrefixGroup, StepOutput
from anaphora.types.sampling import SamplingParams
from tests.support.attention import poison

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


class Recorder:
    """A ModelRunner over a pool filled with NaN that keeps the logits of each step, by slot."""

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int = 4,
        blocks: int = 200,
        kv_dtype: str = "auto",
        device: str = "cpu",
        eager: bool = False,
    ) -> None:
        cache = CacheConfig(block_size=block_size, kv_cache_dtype=kv_dtype, kv_cache_memory_bytes=64 * 2**20)
        config = EngineConfig(
            ModelConfig(model=str(folder), device=device, enforce_eager=eager), cache, SchedulerConfig(max_num_seqs=16)
        )
        self.runner = runner.load(config)
        self.block_size = block_size
        for pool in self.pools:
            poison(pool[: blocks * block_size])
        self.logits: dict[int, Tensor] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        sample = self.runner._sampler.sample

        def keep(logits: Tensor, slots: list[int]) -> object:
            self.logits = dict(zip(slots, logits.clone(), strict=True))
            return sample(logits, slots)

        self.runner._sampler.sample = keep

    @property
    def pools(self) -> list[Tensor]:
        return self.runner._backend.pools

    def join(self, slot: int, prompt: Sequence[int], table: Sequence[int], sampling: SamplingParams = GREEDY) -> Join:
        self.prompts[slot] = tuple(prompt)
        return Join(slot, sampling, 0, tuple(prompt), len(prompt), (), tuple(table))

    def chunk(self, slot: int, start: int, end: int, write_from: int | None = None) -> Chunk:
        """Return a chunk of prompt positions. It samples if it reaches the end of the prompt."""
        prompt = self.prompts[slot]
        first = start if write_from is None else write_from
        return Chunk(slot, start, end - start, prompt[start:end], first, (), end == len(prompt))

    def token(self, slot: int, position: int, token: int | None = None) -> Chunk:
        """Return a decode chunk. ``token`` None stands for the token that was sampled last."""
        return Chunk(slot, position, 1, None if token is None else (token,), position, (), True)

    def step(
        self,
        *chunks: Chunk,
        joins: Sequence[Join] = (),
        copies: Sequence[BlockCopy] = (),
        groups: Sequence[PrefixGroup] = (),
    ) -> StepOutput:
        batch = Batch(0, tuple(joins), tuple(copies), chunks, tuple(groups))
        return self.runner.submit(batch).result()


def eager_logits(model: object, tokens: Sequence[int]) -> Tensor:
    """Return the logits ``[V]`` of transformers' own eager forward pass at the last position."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]

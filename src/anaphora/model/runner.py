"""The model as the engine sees it: a batch goes in, tokens come out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from anaphora.attention.base import PagedLayers, backend_class, route
from anaphora.config import CacheConfig, EngineConfig
from anaphora.errors import ConfigError, StepFailed
from anaphora.model.inputs import StepInputs, flatten
from anaphora.model.loader import LoadedModel, base_of, load_model
from anaphora.model.sampling import Sampler
from anaphora.model.source import resolve
from anaphora.types import Batch, Chunk, Join, ModelInfo, StepOutput, TokenLogprobs

LOGIT_ROWS = 64
"""Rows of prompt log-probabilities that are projected to the vocabulary at once."""

DEFAULT_POOL_BYTES = 4 * 2**30
_KV_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Finished:
    """A step that has been computed already, or has failed."""

    def __init__(self, output: StepOutput | None, error: Exception | None = None) -> None:
        self._output = output
        self._error = error

    def result(self) -> StepOutput:
        """The output, or what made the step fail is raised."""
        if self._output is None:
            assert self._error is not None
            raise self._error
        return self._output


def load(config: EngineConfig) -> ModelRunner:
    """Load ``config.model.model``, a local folder, and make the block pool. Raises ModelError and ConfigError."""
    return ModelRunner(config, load_model(config.model))


class ModelRunner:
    """Runner on the CPU. ``submit`` computes the step before it returns; a slot's state lives from Join to Join."""

    lookahead = 0

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self.warnings = loaded.warnings
        self._model = loaded.model
        self._base = base_of(loaded.model)
        self._arguments = loaded.arguments()
        device = torch.device("cpu")
        self.info = _describe(config, loaded, device)
        kv_dtype = _kv_dtype(config.cache, loaded.dtype)
        self._backend = backend_class(device.type)(
            loaded.layouts, self.info.num_blocks, self.info.block_size, kv_dtype, device
        )
        self._layers = PagedLayers(self._backend, loaded.absorbed, loaded.tap)
        self._sampler = Sampler(loaded.vocab_size, config.scheduler.max_num_seqs, device, config.model.seed)
        self._joins: dict[int, Join] = {}
        self._tables: dict[int, list[int]] = {}
        self._last: dict[int, int] = {}

    def submit(self, batch: Batch) -> Finished:
        """Run the step. Whatever goes wrong in it is raised by ``result``."""
        try:
            with torch.inference_mode():
                return Finished(self._step(batch))
        except Exception as error:  # the engine fails this step and goes on
            return Finished(None, error)

    def free_memory(self) -> int:
        """Free bytes of the host's memory."""
        return int(psutil.virtual_memory().available)

    def _step(self, batch: Batch) -> StepOutput:
        for join in batch.joins:
            self._join(join)
        self._backend.copy_blocks(batch.copies)
        for chunk in batch.chunks:
            self._change_table(chunk)
        if not batch.chunks:
            return StepOutput(batch.step, {})
        inputs = flatten(batch, self._tables, self._last, self.info.block_size)
        self._backend.plan(inputs.layout)
        with route(self._layers):
            outputs = self._base(inputs.token_ids, position_ids=inputs.positions, **self._arguments)
        return self._output(batch, inputs, outputs)

    def _join(self, join: Join) -> None:
        self._joins[join.slot] = join
        self._tables[join.slot] = list(join.block_table)
        self._last.pop(join.slot, None)
        self._sampler.join(join)

    def _change_table(self, chunk: Chunk) -> None:
        table = self._tables[chunk.slot]
        for index, block in chunk.table_changes:
            if index < len(table):
                table[index] = block
            elif index == len(table):
                table.append(block)
            else:
                raise StepFailed(
                    f"slot {chunk.slot}: block table entry {index} is to be set, but there are {len(table)} entries"
                )

    def _output(self, batch: Batch, inputs: StepInputs, outputs: Any) -> StepOutput:
        hidden = outputs.last_hidden_state
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        with self._given(outputs):
            prompt_logprobs = self._prompt_logprobs(batch, inputs, outputs, hidden)
            if inputs.sample_rows:
                logits = self._logits(outputs, hidden[:, list(inputs.sample_rows)])
                slots = list(inputs.sample_slots)
                chosen, logprobs = self._sampler.sample(logits, slots)
                tokens = dict(zip(slots, chosen, strict=True))
                self._last |= tokens
        return StepOutput(batch.step, tokens, logprobs, prompt_logprobs, inputs.given)

    def _prompt_logprobs(
        self, batch: Batch, inputs: StepInputs, outputs: Any, hidden: Tensor
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Of the known prompt tokens after each position of the chunks that ask for them, in slices of rows."""
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for chunk, query in zip(batch.chunks, inputs.layout.queries, strict=True):
            join = self._joins[chunk.slot]
            top = join.sampling.prompt_logprobs
            nexts = join.token_ids[chunk.start + 1 : min(chunk.start + chunk.length + 1, join.num_prompt)]
            if top is None or not nexts:
                continue
            entries: list[TokenLogprobs] = []
            for begin in range(0, len(nexts), LOGIT_ROWS):
                some = list(nexts[begin : begin + LOGIT_ROWS])
                first = query.row + begin
                logits = self._logits(outputs, hidden[:, first : first + len(some)])
                entries += self._sampler.prompt_logprobs(logits, some, top)
            found[chunk.slot] = tuple(entries)
        return found

    @contextmanager
    def _given(self, outputs: Any) -> Iterator[None]:
        """Let the model's own forward take ``outputs`` for those of its base, so that it only applies its head.

        The head is more than a matrix in some families (a softcap, a factor), and only the model's code knows.
        """
        self._base.forward = lambda *args, **kwargs: outputs
        try:
            yield
        finally:
            del self._base.forward

    def _logits(self, outputs: Any, hidden: Tensor) -> Tensor:
        """``hidden`` ``[1, R, hidden]`` → ``[R, V]`` float32."""
        outputs.last_hidden_state = hidden
        logits: Tensor = self._model(input_ids=None, use_cache=False).logits
        return logits[0].float()


def _describe(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> ModelInfo:
    folder = Path(str(config.model.model))
    kv_dtype = _kv_dtype(config.cache, loaded.dtype)
    kv_name = str(kv_dtype).removeprefix("torch.")
    block_size = config.cache.block_size
    bytes_per_block = sum(layout.width for layout in loaded.layouts) * kv_dtype.itemsize * block_size
    return ModelInfo(
        name=next(iter(config.model.served_model_name), folder.name),
        identity=f"{resolve(str(folder)).identity}:{str(loaded.dtype).removeprefix('torch.')}:kv-{kv_name}",
        vocab_size=loaded.vocab_size,
        window=loaded.window,
        num_blocks=_count_blocks(config.cache, bytes_per_block),
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_dtype=kv_name,
        device=str(device),
        weights_bytes=loaded.weights_bytes,
    )


def _kv_dtype(cache: CacheConfig, model_dtype: torch.dtype) -> torch.dtype:
    if cache.kv_cache_dtype == "auto":
        return model_dtype
    if cache.kv_cache_dtype not in _KV_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {cache.kv_cache_dtype} is not there on a CPU; use auto, {' or '.join(_KV_DTYPES)}",
            param="kv_cache_dtype",
        )
    return _KV_DTYPES[cache.kv_cache_dtype]


def _count_blocks(cache: CacheConfig, bytes_per_block: int) -> int:
    """Blocks of the pool, the null block included."""
    size = cache.kv_cache_memory_bytes
    if size is None:
        size = min(int(psutil.virtual_memory().available) // 4, DEFAULT_POOL_BYTES)
    blocks = size // bytes_per_block
    if blocks < 2:
        raise ConfigError(
            f"a pool of {size} bytes holds no KV block: one is {bytes_per_block} bytes ({cache.block_size} tokens), "
            f"and one more is kept for padding; --kv-cache-memory-bytes must be at least {2 * bytes_per_block}",
            param="kv_cache_memory_bytes",
        )
    return blocks

"""The Runner of a real model: takes a Batch, runs the forward pass, samples, returns a StepOutput."""

from __future__ import annotations

import math
import time
from array import array
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anaphora.attention.base import PagedLayers, backend_class, route
from anaphora.checkpoint.resolve import resolve
from anaphora.config import EngineConfig, SchedulerConfig
from anaphora.errors import StepFailed
from anaphora.model.graphs import StepGraphs, bytes_needed
from anaphora.model.head import LanguageModelHead
from anaphora.model.inputs import StepInputs, make_inputs
from anaphora.model.loader import LoadedModel, estimate, load_model
from anaphora.model.memory import (
    check_card,
    check_dtype,
    check_length,
    choose_device,
    free_bytes,
    kv_cache_dtype,
    limit_memory,
    size_pool,
)
from anaphora.model.probe import base_of
from anaphora.model.sampler import SampledTokens, Sampler
from anaphora.types.batch import Batch, Chunk, Join, ModelInfo, StepOutput, TokenLogprobs
from anaphora.types.sampling import SamplingParams

LONG_CHUNK = 512
"""Tokens in a chunk that is long enough for attention to split and merge its keys; a warm-up step has one."""

LOGIT_ROWS = 64
"""Rows projected to the vocabulary at once for prompt log-probabilities."""


class PendingStep:
    """A submitted step, or one that failed while it was submitted. ``sampled`` holds the tokens it chooses."""

    def __init__(
        self, output: StepOutput | None, sampled: SampledTokens | None = None, error: Exception | None = None
    ) -> None:
        self._output = output
        self._sampled = sampled
        self._error = error

    def result(self) -> StepOutput:
        """Wait for the tokens. Raises what made the step fail."""
        if self._output is None:
            assert self._error is not None
            raise self._error
        if self._sampled is None:
            return self._output
        tokens, logprobs = self._sampled.read()
        by_slot = dict(zip(self._sampled.slots, tokens, strict=True))
        return replace(self._output, tokens=by_slot, logprobs=logprobs)


def load(config: EngineConfig) -> ModelRunner:
    """Load ``config.model.model``, a local folder, and allocate the KV pool. Raises ModelError and ConfigError."""
    device = choose_device(config.model.device)
    if device.type == "cuda":
        _check_before_loading(config, device)
    limit_memory(config.cache, device)
    return ModelRunner(config, load_model(config.model, device), device)


def _check_before_loading(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for what can be known before the weights are read: unsupported kernels, too small a GPU."""
    from anaphora.attention.gpu import TritonAttention

    TritonAttention.check_block_size(config.cache.block_size)
    found = estimate(config.model, device)
    check_dtype(found.dtype, device)
    TritonAttention.check_layouts(found.layouts)
    kv_dtype = kv_cache_dtype(config.cache, found.dtype, device)
    token_bytes = sum(layout.token_bytes(kv_dtype) for layout in found.layouts)
    check_card(config, found.weights_bytes, token_bytes, device)


class ModelRunner:
    """Runner on a CPU or a GPU. The state of a slot lasts from one Join to the next.

    On a CPU ``submit`` computes the step before it returns. On a GPU it only launches the work, and the next step may
    be submitted before the host knows this step's tokens: they stay on the device, by slot.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, device: torch.device) -> None:
        self.warnings = loaded.warnings
        self.lookahead = 1 if device.type == "cuda" else 0
        self._model = loaded.model
        self._base = base_of(loaded.model)
        self._head = LanguageModelHead(loaded.model, self._base)
        self._arguments = loaded.arguments
        self._device = device
        self._block_size = config.cache.block_size
        self._sampler = Sampler(loaded.vocab_size, config.scheduler.max_num_seqs, device, config.model.seed)
        self._joins: dict[int, Join] = {}
        self._tables: dict[int, array[int]] = {}
        self._last_tokens = torch.zeros(config.scheduler.max_num_seqs, dtype=torch.int64, device=device)
        self._sampled: set[int] = set()
        self._graphs: StepGraphs | None = None
        self._free_memory = (-math.inf, 0)
        with _compiling(device):
            self._make_pool(config, loaded)

    def _make_pool(self, config: EngineConfig, loaded: LoadedModel) -> None:
        """Allocate the KV pool. On a GPU first with one block, to measure the largest step; then with all that fit."""
        kv_dtype = kv_cache_dtype(config.cache, loaded.dtype, self._device)
        bytes_per_block = sum(layout.token_bytes(kv_dtype) for layout in loaded.layouts) * self._block_size
        seqs, budget = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens

        def make(blocks: int) -> None:
            backend = backend_class(self._device.type)
            self._backend = backend(loaded.layouts, blocks, self._block_size, kv_dtype, self._device)
            self._layers = PagedLayers(self._backend, loaded.absorbed, loaded.tap)

        def largest_step() -> None:
            make(1)
            self._dry_run([min(-(-budget // seqs), loaded.context_length)] * min(seqs, budget))
            del self._backend, self._layers

        reserve = 0 if config.model.enforce_eager else bytes_needed(seqs, loaded.vocab_size, loaded.dtype)
        pool = size_pool(config.cache, bytes_per_block, self._device, largest_step, reserve)
        make(pool.blocks)
        graph_bytes = 0
        if self._device.type == "cuda":
            if config.model.max_model_len is not None:
                token_bytes = bytes_per_block // self._block_size
                check_length(config.model.max_model_len, (pool.blocks - 1) * self._block_size, token_bytes)
            self._warm_up(min(seqs, budget), min(budget, loaded.context_length))
            if not config.model.enforce_eager:
                torch.cuda.empty_cache()  # memory cached by the warm-up must not count as the graphs'
                graph_bytes = free_bytes(self._device)
                self._capture(config.scheduler, loaded)
                graph_bytes -= free_bytes(self._device)
        info = _describe(config, loaded, (kv_dtype, pool.blocks, bytes_per_block), self._device)
        self.info = replace(info, activation_bytes=pool.activation_bytes, graph_bytes=max(graph_bytes, 0))

    def _warm_up(self, rows: int, tokens: int) -> None:
        """Run steps of every kind, so that every kernel is compiled: decode rows, a long chunk, both in one batch."""
        for lengths in ([1] * rows, [min(tokens, LONG_CHUNK)], [*[1] * (rows - 1), max(tokens - rows, 1)]):
            self._dry_run(lengths)

    def _capture(self, limits: SchedulerConfig, loaded: LoadedModel) -> None:
        """Capture CUDA graphs; a warning says why if the model does not allow it."""
        from anaphora.attention.gpu import TritonAttention

        assert isinstance(self._backend, TritonAttention)
        slower = "steps run without CUDA graphs, and slower"
        if loaded.dtype != torch.bfloat16 and any(name.endswith("experts") for name, _ in self._base.named_modules()):
            self.warnings += (f"{slower}: experts in {str(loaded.dtype).removeprefix('torch.')} cannot be captured",)
            return
        try:
            with torch.inference_mode():
                self._graphs = StepGraphs(
                    self._sampled_logits, self._backend, limits.max_num_seqs, limits.max_num_batched_tokens
                )
        except Exception as error:  # the model's code may raise anything when it is captured
            torch.cuda.synchronize()
            reason = str(error).partition("\n")[0]
            self.warnings += (f"{slower}: {reason}",)

    def _dry_run(self, lengths: list[int]) -> None:
        """Run a step of sequences of these lengths that reads and writes the null block only; it leaves no state."""
        sampling = SamplingParams(temperature=1.0)
        joins, chunks = [], []
        for slot, length in enumerate(lengths):
            tokens = (0,) * length
            table = (0,) * -(-length // self._block_size)
            joins.append(Join(slot, sampling, 0, tokens, length, (), table))
            chunks.append(Chunk(slot, 0, length, tokens, length, (), True))
        with torch.inference_mode():
            self._step(Batch(0, tuple(joins), (), tuple(chunks)))
        self._sampled.clear()

    def submit(self, batch: Batch) -> PendingStep:
        """Run the step, or launch it. Errors are raised by ``result``."""
        try:
            with torch.inference_mode():
                return self._step(batch)
        except Exception as error:  # the engine fails this step and goes on
            return PendingStep(None, error=error)

    def free_memory(self) -> int:
        """Free bytes of the device's memory, queried at most once a second."""
        queried, free = self._free_memory
        now = time.monotonic()
        if now - queried > 1:
            free = free_bytes(self._device)
            self._free_memory = (now, free)
        return free

    def _step(self, batch: Batch) -> PendingStep:
        for join in batch.joins:
            self._join(join)
        self._backend.copy_blocks(batch.copies)
        for chunk in batch.chunks:
            if chunk.table_changes:
                self._change_table(chunk)
        if not batch.chunks:
            return PendingStep(StepOutput(batch.step, {}))
        if (submitted := self._graph_step(batch)) is not None:
            return submitted
        inputs = make_inputs(batch, self._tables, self._sampled, self._block_size, self._device)
        self._backend.plan(inputs.layout)
        outputs = self._forward(inputs.token_ids, inputs.positions)
        hidden = outputs.last_hidden_state
        with self._head.over(outputs):
            prompt_logprobs = self._prompt_logprobs(batch, inputs, outputs)
            logits = None
            if inputs.sample_slots:
                logits = self._head.logits(outputs, hidden.index_select(1, inputs.sample_rows))
        return self._sample(batch, inputs, logits, prompt_logprobs)

    def _graph_step(self, batch: Batch) -> PendingStep | None:
        """Run the step as a CUDA graph; None if it fits none."""
        if self._graphs is None:
            return None
        total = sum(chunk.length for chunk in batch.chunks)
        rows = self._graphs.rows(total, total > len(batch.chunks))
        if rows is None or any(map(self._wants_prompt_logprobs, batch.chunks)):
            return None
        inputs = make_inputs(batch, self._tables, self._sampled, self._block_size, self._device, rows)
        logits = self._graphs.run(inputs)
        if logits is None:
            return None
        return self._sample(batch, inputs, logits if inputs.sample_slots else None, {})

    def _wants_prompt_logprobs(self, chunk: Chunk) -> bool:
        return chunk.token_ids is not None and self._joins[chunk.slot].sampling.prompt_logprobs is not None

    def _forward(self, token_ids: Tensor, positions: Tensor) -> Any:
        """Run the base model. A negative token id -1 - s stands for the token sampled last in slot s."""
        last = self._last_tokens[(-1 - token_ids).clamp_(min=0)]
        with route(self._layers):
            return self._base(torch.where(token_ids < 0, last, token_ids), position_ids=positions, **self._arguments)

    def _sampled_logits(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Logits ``[R, V]`` of ``rows`` ``[R]``: what a CUDA graph captures."""
        outputs = self._forward(token_ids, positions)
        hidden = outputs.last_hidden_state
        with self._head.over(outputs):
            return self._head.logits(outputs, hidden.index_select(1, rows))

    def _join(self, join: Join) -> None:
        self._joins[join.slot] = join
        self._tables[join.slot] = array("i", join.block_table)
        self._sampled.discard(join.slot)
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

    def _sample(
        self,
        batch: Batch,
        inputs: StepInputs,
        logits: Tensor | None,
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]],
    ) -> PendingStep:
        sampled = None
        if logits is not None:
            sampled = self._sampler.sample(logits, inputs.sample_slots)
            self._last_tokens.index_copy_(0, inputs.sample_slots_device, sampled.tokens)
            self._sampled.update(inputs.sample_slots)
        output = StepOutput(batch.step, {}, prompt_logprobs=prompt_logprobs, prompt_tokens_computed=inputs.known_tokens)
        return PendingStep(output, sampled)

    def _prompt_logprobs(self, batch: Batch, inputs: StepInputs, outputs: Any) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log-probabilities of the next prompt token at each position of the chunks that ask for them, by slot.

        In slices of ``LOGIT_ROWS`` rows, since logits of a whole prompt would take gigabytes.
        """
        hidden = outputs.last_hidden_state
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
                logits = self._head.logits(outputs, hidden[:, first : first + len(some)]).float()
                entries += self._sampler.prompt_logprobs(logits, some, top)
            found[chunk.slot] = tuple(entries)
        return found


def _compiling(device: torch.device) -> AbstractContextManager[None]:
    """Inside, Triton kernels may be compiled; later compilations are logged as warnings."""
    if device.type == "cpu":
        return nullcontext()
    from anaphora.kernels.triton.compile_watch import COMPILE_WATCH

    return COMPILE_WATCH.expected()


def _describe(
    config: EngineConfig, loaded: LoadedModel, pool: tuple[torch.dtype, int, int], device: torch.device
) -> ModelInfo:
    """``pool`` is the dtype of the KV pool, its number of blocks and the bytes of a block."""
    folder = Path(str(config.model.model))
    kv_dtype, num_blocks, bytes_per_block = pool
    kv_name, dtype = (str(x).removeprefix("torch.") for x in (kv_dtype, loaded.dtype))
    weights = resolve(str(folder), weights=config.model.load_format != "dummy").identity
    return ModelInfo(
        name=next(iter(config.model.served_model_name), folder.name),
        identity=f"{weights}:{dtype}:kv-{kv_name}",
        vocab_size=loaded.vocab_size,
        context_length=loaded.context_length,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        bytes_per_block=bytes_per_block,
        dtype=dtype,
        kv_dtype=kv_name,
        device=str(device),
        weights_bytes=loaded.weights_bytes,
    )

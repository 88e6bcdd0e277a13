"""The engine: takes requests, runs one step at a time, returns tokens. Synchronous; drives a Runner, without torch."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from anaphora.cache.manager import CacheManager
from anaphora.config import EngineConfig
from anaphora.core.prefill_cost import PrefillCost
from anaphora.core.prefixes import Prefixes
from anaphora.core.scheduler import Scheduler
from anaphora.errors import InvalidRequest
from anaphora.types.batch import Batch, ModelInfo, Pending, Runner, StepOutput
from anaphora.types.outputs import EngineInfo, EngineStats, SequenceUpdate, StepResult
from anaphora.types.reports import CacheReport, PinReport, Prefix
from anaphora.types.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SubmittedStep:
    """A step in flight; ``submitted`` is in clock seconds."""

    batch: Batch
    pending: Pending
    submitted: float


@dataclass(frozen=True, slots=True)
class _SubmitFailed:
    """A step whose ``submit`` has already raised: a Pending that raises the same error."""

    error: Exception

    def result(self) -> StepOutput:
        raise self.error


class Engine:
    """One model with its cache and scheduler. Not thread-safe. ``info`` says what was loaded, with which limits."""

    def __init__(self, config: EngineConfig, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        model = runner.info
        self.runner = runner
        self.cache = CacheManager(
            model.num_blocks, model.block_size, enabled=config.cache.enable_prefix_caching, clock=clock
        )
        max_model_len, warnings = _fit_model_len(config.model.max_model_len, model, self.cache.pool.total)
        self.info = EngineInfo(model, max_model_len, (*runner.warnings, *warnings))
        self.scheduler = Scheduler(config.scheduler, self.cache, model.identity, max_model_len, clock)
        self.prefixes = Prefixes(self.cache, model.identity, max_model_len, clock)
        self.cost = PrefillCost()
        self._clock = clock
        self._in_flight: deque[_SubmittedStep] = deque()
        self._last_result = 0.0

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, naming the field, if it can never be served."""
        request.sampling.check_vocabulary(self.info.model.vocab_size)
        self._check_tokens(request.prompt_token_ids)
        self.scheduler.add(request)

    def explain(self, request: Request) -> CacheReport:
        """Return what the request's prompt would find in the cache now, and why the match ends there. Changes nothing.

        Raises InvalidRequest if a token id is out of range.
        """
        self._check_tokens(request.prompt_token_ids)
        return self.scheduler.explain(request)

    def pin(self, prefixes: Sequence[Prefix]) -> tuple[PinReport, ...]:
        """Pin prefixes in the cache. Raises InvalidRequest, and pins none, if one of them cannot be pinned."""
        for prefix in prefixes:
            self._check_tokens(prefix.token_ids)
        return self.prefixes.pin(prefixes)

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        last = self.info.model.vocab_size - 1
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token <= last:
                raise InvalidRequest(
                    f"prompt holds token id {token}; this model's ids run from 0 to {last}", param="prompt"
                )

    def abort(self, request_id: str) -> bool:
        """End a request without an answer. Returns False if there is no request with this id."""
        return self.scheduler.abort(request_id)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one of a request's choices; the others continue."""
        self.scheduler.finish_choice(request_id, choice)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self.scheduler.has_work

    def step(self) -> StepResult:
        """Submit as many steps as the runner takes ahead, wait for the oldest one and return its tokens."""
        while len(self._in_flight) <= self.runner.lookahead:
            batch = self.scheduler.schedule()
            if batch is None:
                break
            submitted = self._clock()
            self._in_flight.append(_SubmittedStep(batch, self._submit(batch), submitted))
        updates = self._take_result() if self._in_flight else self.scheduler.fail_first_waiting()
        return StepResult(tuple(updates), self.stats())

    def _submit(self, batch: Batch) -> Pending:
        try:
            return self.runner.submit(batch)
        except Exception as error:
            return _SubmitFailed(error)

    def _take_result(self) -> list[SequenceUpdate]:
        step = self._in_flight.popleft()
        try:
            output = step.pending.result()
        except Exception as error:
            logger.exception("step %d failed", step.batch.step)
            self._drain()
            return self.scheduler.fail(f"the step that computed this request failed: {error}")
        now = self._clock()
        self._record_timing(step, now)
        self.scheduler.stats.computed_prompt_tokens += output.prompt_tokens_computed
        updates = self.scheduler.commit(output)
        for update in updates:
            if update.prompt is not None:
                saved = self.cost.price(0, update.prompt.cache.cached_tokens)
                self.scheduler.stats.prefill_seconds_saved += saved
        return updates

    def _drain(self) -> None:
        """Wait for the steps submitted after a failed one. Their results are discarded."""
        while self._in_flight:
            try:
                self._in_flight.popleft().pending.result()
            except Exception as error:
                logger.debug("a step submitted after a failed one failed too: %s", error)

    def _record_timing(self, step: _SubmittedStep, now: float) -> None:
        """Count the time and size of a finished step. It began when it was submitted or when the one before ended."""
        seconds = now - max(step.submitted, self._last_result)
        self._last_result = now
        chunks = step.batch.chunks
        prefills = [(c.start, c.length) for c in chunks if c.token_ids is not None]
        stats = self.scheduler.stats
        stats.steps += 1
        stats.last_step_tokens = sum(c.length for c in chunks)
        stats.prefill_seconds += self.cost.observe(seconds, prefills, len(chunks) - len(prefills))

    def stats(self) -> EngineStats:
        """Return a copy of the counters, with the current gauges."""
        scheduler, pool = self.scheduler, self.cache.pool
        return replace(
            scheduler.stats,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_for_prefix=sum(s.pending_block is not None for s in scheduler.waiting),
            total_blocks=pool.total,
            free_blocks=len(pool.free),
            idle_cached_blocks=len(pool.policy),
            referenced_blocks=self.cache.referenced_blocks,
            pinned_blocks=self.cache.pinned_blocks,
            free_memory_bytes=self.runner.free_memory(),
            evicted_blocks=self.cache.evicted_blocks,
            reasons=dict(scheduler.stats.reasons),
        )

    def reset_prefix_cache(self) -> bool:
        """Empty the cache. Pins stay, and fill again. Returns False, and does nothing, while requests use blocks."""
        return self.cache.reset()

    def check(self) -> None:
        """Raise CacheInvariantError unless every block is accounted for."""
        self.cache.check(self.scheduler.tables())


def _fit_model_len(wanted: int | None, model: ModelInfo, blocks: int) -> tuple[int, tuple[str, ...]]:
    """Return the longest sequence that fits model and pool, and a warning if that is less than ``wanted``."""
    holds = blocks * model.block_size
    limit = min(model.context_length, holds)
    if wanted is not None and wanted <= limit:
        return wanted, ()
    cap = (
        f"the model's context length of {model.context_length} tokens"
        if model.context_length <= holds
        else f"the {holds} tokens that the KV cache holds ({blocks} blocks of {model.block_size}); "
        "raise --kv-cache-memory-bytes or --gpu-memory-utilization for more"
    )
    if wanted is not None:
        return limit, (f"--max-model-len {wanted} is capped at {limit}: {cap}",)
    return limit, () if limit == model.context_length else (f"max model length is {limit}: {cap}",)

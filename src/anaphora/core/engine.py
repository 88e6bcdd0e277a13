"""The engine: requests in, one step at a time, tokens out. Synchronous; it drives a Runner and knows no torch."""

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
class _InFlight:
    batch: Batch
    pending: Pending
    submitted: float


@dataclass(frozen=True, slots=True)
class _Refused:
    """A step that the runner did not even take."""

    error: Exception

    def result(self) -> StepOutput:
        raise self.error


class Engine:
    """One model with its cache. Not thread-safe: one caller adds, steps and takes."""

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
        self._in_flight: deque[_InFlight] = deque()
        self._last_result = 0.0

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequest, naming the field, if it can never be served."""
        request.sampling.check_vocabulary(self.info.model.vocab_size)
        self._check_tokens(request.prompt_token_ids)
        self.scheduler.add(request)

    def explain(self, request: Request) -> CacheReport:
        """What the request's prompt would find in the cache now, and why not more. Changes nothing.

        InvalidRequest for token ids that the model does not have.
        """
        self._check_tokens(request.prompt_token_ids)
        return self.scheduler.explain(request)

    def pin(self, prefixes: Sequence[Prefix]) -> tuple[PinReport, ...]:
        """Keep beginnings of prompts in the cache. InvalidRequest, and nothing done, where one cannot be kept."""
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
        """End a request without an answer; False if none of this id is there."""
        return self.scheduler.abort(request_id)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one of a request's choices without an answer; the others go on."""
        self.scheduler.finish_choice(request_id, choice)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> StepResult:
        """Send the next steps on their way, wait for the oldest, hand out its tokens."""
        while len(self._in_flight) <= self.runner.lookahead:
            batch = self.scheduler.schedule()
            if batch is None:
                break
            submitted = self._clock()
            self._in_flight.append(_InFlight(batch, self._submit(batch), submitted))
        updates = self._take() if self._in_flight else self.scheduler.give_up()
        return StepResult(tuple(updates), self.stats())

    def _submit(self, batch: Batch) -> Pending:
        try:
            return self.runner.submit(batch)
        except Exception as error:
            return _Refused(error)

    def _take(self) -> list[SequenceUpdate]:
        flight = self._in_flight.popleft()
        try:
            output = flight.pending.result()
        except Exception as error:
            logger.exception("step %d failed", flight.batch.step)
            self._drain()
            return self.scheduler.fail(f"the step that computed this request failed: {error}")
        now = self._clock()
        self._account(flight, now)
        self.scheduler.stats.computed_prompt_tokens += output.prompt_tokens_computed
        updates = self.scheduler.commit(output)
        for update in updates:
            if update.prompt is not None:
                saved = self.cost.price(0, update.prompt.cache.cached_tokens)
                self.scheduler.stats.prefill_seconds_saved += saved
        return updates

    def _drain(self) -> None:
        """Wait for the steps behind a failed one; what they computed is lost with it."""
        while self._in_flight:
            try:
                self._in_flight.popleft().pending.result()
            except Exception as error:
                logger.debug("a step behind a failed one failed too: %s", error)

    def _account(self, flight: _InFlight, now: float) -> None:
        """Time and size of a finished step. Behind another step it began when that one ended."""
        seconds = now - max(flight.submitted, self._last_result)
        self._last_result = now
        chunks = flight.batch.chunks
        prefills = [(c.start, c.length) for c in chunks if c.token_ids is not None]
        stats = self.scheduler.stats
        stats.steps += 1
        stats.last_step_tokens = sum(c.length for c in chunks)
        stats.prefill_seconds += self.cost.observe(seconds, prefills, len(chunks) - len(prefills))

    def stats(self) -> EngineStats:
        """A copy of the counters, with the gauges of this moment."""
        scheduler, pool = self.scheduler, self.cache.pool
        return replace(
            scheduler.stats,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_for_prefix=sum(s.wait is not None for s in scheduler.waiting),
            total_blocks=pool.total,
            free_blocks=len(pool.free),
            idle_cached_blocks=len(pool.policy),
            referenced_blocks=self.cache.referenced_blocks,
            pinned_blocks=self.cache.pinned_blocks,
            free_memory_bytes=self.runner.free_memory(),
            evicted_blocks=self.cache.evicted_blocks,
            misses=dict(scheduler.stats.misses),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; pins stay, to fill anew. False, and nothing done, while requests use blocks."""
        return self.cache.reset()

    def check(self) -> None:
        """Raise CacheInvariantError unless every block is accounted for."""
        self.cache.check(self.scheduler.tables())


def _fit_model_len(wanted: int | None, model: ModelInfo, blocks: int) -> tuple[int, tuple[str, ...]]:
    """The longest sequence that window and pool can hold, and a warning where that is less than wanted."""
    holds = blocks * model.block_size
    limit = min(model.window, holds)
    if wanted is not None and wanted <= limit:
        return wanted, ()
    cap = (
        f"the model's window of {model.window} tokens"
        if model.window <= holds
        else f"the {holds} tokens that the KV cache holds ({blocks} blocks of {model.block_size}); "
        "raise --kv-cache-memory-bytes or --gpu-memory-utilization for more"
    )
    if wanted is not None:
        return limit, (f"--max-model-len {wanted} is capped at {limit}: {cap}",)
    return limit, () if limit == model.window else (f"max model length is {limit}: {cap}",)

"""Continuous batching: which tokens of which sequences are computed next, within a budget of tokens and blocks.

There are no prefill and decode phases: each step lets computed tokens catch up with known ones. ``schedule`` makes the
next step, ``commit`` takes the results of the oldest one on its way; at most one other may lie between the two.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from anaphora.cache.hashing import root_hash
from anaphora.cache.index import Match
from anaphora.cache.manager import CacheManager
from anaphora.cache.table import BlockTable
from anaphora.config import SchedulerConfig
from anaphora.core.groups import PrefixGroups
from anaphora.core.lookups import Lookups
from anaphora.core.sequence import Sequence, State
from anaphora.errors import InvalidRequest
from anaphora.types.batch import Batch, BlockCopy, Chunk, Join, StepOutput, TokenLogprobs
from anaphora.types.outputs import EngineStats, FinishReason, PromptDone, SequenceUpdate
from anaphora.types.reports import CacheReport
from anaphora.types.request import Request


class _Work(NamedTuple):
    """A chunk on its way: whose it is, in which of its admissions, and how far it computes."""

    sequence: Sequence
    epoch: int
    slot: int
    start: int
    end: int
    sample: bool


class _Step:
    """A batch in the making."""

    def __init__(self, number: int, budget: int) -> None:
        self.number = number
        self.budget = budget
        self.joins: list[Join] = []
        self.copies: list[BlockCopy] = []
        self.chunks: list[Chunk] = []
        self.work: list[_Work] = []


class Scheduler:
    """First come, first served. When blocks run out, the sequence that came last is preempted and computed again.

    A sequence whose next block a running one is about to compute waits for it, holding nothing, and others overtake
    it. After a failed step its sequences run alone, one at a time, so that one that cannot be computed falls alone.
    """

    MAX_FAILURES = 3

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        identity: str,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.cache = cache
        self.identity = identity
        self.max_model_len = max_model_len
        self.stats = EngineStats()
        self.lookups = Lookups(cache, self.stats)
        self.groups = PrefixGroups()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._live: dict[str, list[Sequence]] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._on_the_way: dict[int, list[_Work]] = {}
        self._arrived: list[Sequence] = []
        self._steps = 0
        self._arrivals = 0
        self._clock = clock

    # --- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequest if it can never be served."""
        prompt = len(request.prompt_token_ids)
        if request.id in self._live:
            raise InvalidRequest(f"a request with id {request.id!r} is running; ids must differ", param="request_id")
        if not prompt:
            raise InvalidRequest("the prompt is empty; it must hold at least one token", param="prompt")
        if prompt >= self.max_model_len and not (prompt == self.max_model_len and request.sampling.max_tokens == 0):
            raise InvalidRequest(
                f"the prompt has {prompt} tokens; prompt and answer together can have at most {self.max_model_len}",
                param="prompt",
            )
        room = self.max_model_len - prompt
        wanted = request.sampling.max_tokens
        max_tokens = room if wanted is None else min(wanted, room)
        live = self._live[request.id] = []
        for choice in range(request.sampling.n):
            sequence = Sequence(request, choice, self._arrivals, max_tokens, self._table(request, choice))
            self._arrivals += 1
            live.append(sequence)
            self.waiting.append(sequence)
            self._arrived.append(sequence)

    def _table(self, request: Request, choice: int) -> BlockTable:
        root = root_hash(self.identity, request.cache_salt)
        bypass = "prompt_logprobs" if request.sampling.prompt_logprobs is not None and not choice else ""
        return self.cache.table(request.id, request.prompt_token_ids, root, bypass=bypass)

    def explain(self, request: Request) -> CacheReport:
        """What the request's prompt would find now, and why not more. Changes nothing."""
        table = self._table(request, 0)
        return self.cache.explain(table, self.cache.match(table), len(request.prompt_token_ids))

    def abort(self, request_id: str) -> bool:
        """End all choices of a request without a word. False if there is none."""
        live = self._live.get(request_id, [])
        for sequence in list(live):
            self._finish(sequence)
        return bool(live)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice (its text met a stop string)."""
        for sequence in list(self._live.get(request_id, [])):
            if sequence.choice == choice:
                self._finish(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._live) or bool(self._on_the_way)

    def tables(self) -> Iterable[BlockTable]:
        """Block tables of all live sequences."""
        return (sequence.table for live in self._live.values() for sequence in live)

    # --- making a step ---------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next step; None if nothing can be computed before a result comes in."""
        step = _Step(self._steps, self.config.max_num_batched_tokens)
        if not self._schedule_alone(step):
            preemptions = self.stats.preemptions
            self._schedule_running(step)
            if self.stats.preemptions == preemptions:
                self._admit_waiting(step)
        self._note_waits()
        if not step.chunks:
            return None
        self._steps += 1
        self._on_the_way[step.number] = step.work
        decoding = {chunk.slot for chunk in step.chunks if chunk.token_ids is None}
        groups = self.groups.groups(decoding) if self.config.shared_prefix_attention else ()
        return Batch(step.number, tuple(step.joins), tuple(step.copies), tuple(step.chunks), groups)

    def _schedule_alone(self, step: _Step) -> bool:
        """A sequence of a failed step gets a step to itself, so that its failure is known to be its own."""
        for sequence in self.running:
            if sequence.alone:
                self._schedule_one(sequence, step)
                return bool(step.chunks)
        return any(sequence.alone and self._admit(sequence, step) for sequence in self.waiting)

    def _schedule_running(self, step: _Step) -> None:
        at = 0
        while at < len(self.running) and step.budget > 0:
            sequence = self.running[at]
            while not self._schedule_one(sequence, step):
                victim = self.running[-1]
                self._preempt(victim)
                self.stats.preemptions += 1
                if victim is sequence:
                    return
            at += 1

    def _schedule_one(self, sequence: Sequence, step: _Step) -> bool:
        """Add the sequence's next chunk, if it has one. False if blocks are lacking."""
        start, total, slot = sequence.scheduled, sequence.total, sequence.slot
        if start >= total or not sequence.wants_more or step.budget <= 0:
            return True
        end, tokens = start + 1, None
        if sequence.prefilling:
            end = start + min(sequence.given - start, step.budget)
            tokens = tuple(sequence.token_ids[start:end])
        write_from = max(start, sequence.matched)
        reservation = self.cache.reserve(sequence.table, write_from, end, step.number)
        if reservation is None:
            return False
        sample = end == total
        step.copies += reservation.copies
        step.chunks.append(
            Chunk(slot, start, end - start, tokens, write_from, tuple(reservation.table_changes), sample)
        )
        step.work.append(_Work(sequence, sequence.epoch, slot, start, end, sample))
        step.budget -= end - start
        sequence.scheduled = end
        sequence.in_flight += sample
        return True

    def _admit_waiting(self, step: _Step) -> None:
        """Let waiting sequences in, in their order; those that wait for another's prefix are overtaken."""
        headroom = -1
        for sequence in list(self.waiting):
            if step.budget <= 0 or not self._free_slots:
                return
            if sequence.in_flight or sequence.alone or (sequence.wait and self.cache.is_pending(sequence.wait)):
                continue
            if headroom < 0:
                headroom = sum(map(self._promised, self.running)) + (
                    self.cache.pool.total // 100 if self.running else 0
                )
            if self._admit(sequence, step, headroom):
                headroom += self._promised(sequence)
            elif sequence.wait is None:
                return

    def _promised(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs to finish its prompt."""
        if not sequence.prefilling:
            return 0
        return max(self.cache.blocks_for(sequence.given + 1) - len(sequence.table.blocks), 0)

    def _admit(self, sequence: Sequence, step: _Step, headroom: int = 0) -> bool:
        """Give the sequence a slot and its first chunk. False if it must wait: for blocks, or for ``sequence.wait``."""
        if not self._free_slots or sequence.in_flight:
            return False
        match = self._look_up(sequence)
        if match.pending is not None:
            return False
        now = self._clock()
        if sequence.wait is not None:
            sequence.waited_s += now - sequence.wait_since
            sequence.wait = None
        known = len(sequence.token_ids)
        counts = self.lookups.counts(sequence)
        sizes = self.lookups.at_sizes(sequence, match) if counts else None
        taken = self.cache.admit(sequence.table, match, min(known + 1, self.max_model_len), headroom)
        if taken is None:
            return False
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        sequence.admitted(self._free_slots.pop(), taken.tokens)
        if counts:
            self.lookups.admitted(sequence, match, taken, sizes, now)
        sampling = sequence.request.sampling
        if sequence.choice or sequence.prompt_done:
            sampling = replace(sampling, prompt_logprobs=None)
        step.joins.append(
            Join(
                sequence.slot,
                sampling,
                sequence.choice,
                tuple(sequence.token_ids),
                sequence.num_prompt,
                sequence.request.eos_token_ids,
                tuple(block.id for block in sequence.table.blocks),
            )
        )
        self._schedule_one(sequence, step)
        return True

    def _look_up(self, sequence: Sequence) -> Match:
        """What the cache has for the sequence; notes it if what it lacks next is about to be computed by another."""
        match = self.cache.match(sequence.table)
        if match.pending is not None:
            if sequence.wait is None:
                sequence.wait_since = self._clock()
            sequence.wait = match.pending
        return match

    def _note_waits(self) -> None:
        """Those that came since the last step, and found no budget, may yet be waiting for what is being computed."""
        for sequence in self._arrived:
            if sequence.state is State.WAITING and sequence.wait is None and not sequence.epoch:
                self._look_up(sequence)
        self._arrived.clear()

    # --- taking results --------------------------------------------------------------------------------------------

    def commit(self, output: StepOutput) -> list[SequenceUpdate]:
        """Take the results of the oldest step on its way. Tokens of sequences that have ended are dropped."""
        work = self._on_the_way.pop(output.step)
        self.cache.finish_step(output.step)
        now = self._clock()
        updates = []
        for item in work:
            sequence = item.sequence
            if sequence.state is State.FINISHED:
                continue
            if item.epoch == sequence.epoch and sequence.state is State.RUNNING:
                self._computed(item, output)
            if item.sample:
                sequence.in_flight -= 1
                token = output.tokens[item.slot]
                updates.append(self._sampled(sequence, token, output.logprobs.get(item.slot), now))
        return updates

    def _computed(self, item: _Work, output: StepOutput) -> None:
        """The chunk's keys and values are there: let others find them."""
        sequence = item.sequence
        sequence.computed = item.end
        sequence.alone = False
        ends_prompt = item.start < sequence.num_prompt == item.end
        self.cache.commit(sequence.table, item.end, tail=ends_prompt)
        if not sequence.prompt_done:
            sequence.prompt_logprobs += output.prompt_logprobs.get(item.slot, ())
        if item.start < sequence.given <= item.end:
            full = sequence.table.blocks[: sequence.given // self.cache.block_size]
            self.groups.join(item.slot, [block.id for block in full])

    def _sampled(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> SequenceUpdate:
        prompt = None if sequence.prompt_done or sequence.choice else self._prompt_done(sequence, now)
        sequence.prompt_done = True
        reason, stop_reason = FinishReason.LENGTH, None
        tokens: tuple[int, ...] = ()
        if sequence.max_tokens:
            tokens = (token,)
            sequence.token_ids.append(token)
            sequence.table.append(tokens, self.cache.block_size)
            self.stats.generation_tokens += 1
            sampling = sequence.request.sampling
            if token in sampling.stop_token_ids:
                reason, stop_reason = FinishReason.STOP, token
            elif token in sequence.request.eos_token_ids and not sampling.ignore_eos:
                reason = FinishReason.STOP
        ends = reason is FinishReason.STOP or sequence.generated >= sequence.max_tokens
        if ends:
            self._finish(sequence)
        return SequenceUpdate(
            sequence.request.id,
            sequence.choice,
            tokens,
            now,
            logprobs=(logprobs,) if logprobs and tokens else None,
            prompt=prompt,
            finish_reason=reason if ends else None,
            stop_reason=stop_reason,
        )

    def _prompt_done(self, sequence: Sequence, now: float) -> PromptDone:
        report, scheduled = sequence.report, sequence.first_scheduled
        assert report is not None
        assert scheduled is not None
        arrival = sequence.request.arrival
        wanted = sequence.request.sampling.prompt_logprobs is not None
        logprobs = (None, *sequence.prompt_logprobs) if wanted else None
        return PromptDone(report, max(scheduled - arrival, 0.0), sequence.waited_s, now - scheduled, logprobs)

    def fail(self, error: str) -> list[SequenceUpdate]:
        """All steps on their way are lost, the oldest by a fault of its own: queue its sequences again or end them.

        A sequence that was alone in it, or that has now failed ``MAX_FAILURES`` times, ends with the error.
        """
        self.stats.failed_steps += 1
        guilty = next(iter(self._on_the_way.values()))
        lost = {id(item.sequence): item for work in self._on_the_way.values() for item in work}
        for number in self._on_the_way:
            self.cache.fail_step(number)
        self._on_the_way.clear()
        for item in lost.values():
            sequence = item.sequence
            sequence.in_flight = 0
            if sequence.state is State.RUNNING:
                self._preempt(sequence)
        updates = []
        for sequence in (item.sequence for item in guilty):
            if sequence.state is State.FINISHED:
                continue
            sequence.failures += 1
            sequence.alone = True
            if len(guilty) == 1 or sequence.failures >= self.MAX_FAILURES:
                updates.append(self._give_up(sequence, error))
                self.cache.invalidate(sequence.table)
        return updates

    def give_up(self) -> list[SequenceUpdate]:
        """Nothing is on its way and nothing can be scheduled: end the first that waits, so that the others come on."""
        if not self.waiting:
            return []
        sequence = self.waiting[0]
        need, room = self.cache.blocks_for(len(sequence.token_ids) + 1), self.cache.pool.available
        error = f"the request needs {need} KV blocks and there are {room}, though nothing else runs"
        return [self._give_up(sequence, error)]

    def _give_up(self, sequence: Sequence, error: str) -> SequenceUpdate:
        self._finish(sequence)
        return SequenceUpdate(
            sequence.request.id, sequence.choice, (), self._clock(), finish_reason=FinishReason.ERROR, error=error
        )

    # --- leaving ---------------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """Take its blocks and its slot; it will be computed again, as far as its blocks have gone by then."""
        self.running.remove(sequence)
        self._vacate(sequence)
        sequence.state = State.WAITING
        sequence.computed = sequence.scheduled = 0
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        live = self._live[sequence.request.id]
        live.remove(sequence)
        if not live:
            del self._live[sequence.request.id]

    def _vacate(self, sequence: Sequence) -> None:
        self.groups.leave(sequence.slot)
        self.cache.release(sequence.table, sequence.computed)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

"""Continuous batching: which tokens of which sequences are computed next, within a budget of tokens and blocks.

There are no prefill and decode phases: each step lets computed tokens catch up with known ones. ``schedule`` makes the
next step, ``commit`` takes the results of the oldest step in flight; at most two steps are in flight.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable

from anaphora.cache.hashing import root_hash
from anaphora.cache.index import Match
from anaphora.cache.manager import CacheManager
from anaphora.cache.table import BlockTable
from anaphora.config import SchedulerConfig
from anaphora.core.batch_builder import BatchBuilder, ScheduledChunk
from anaphora.core.groups import PrefixGroups
from anaphora.core.lookup_stats import LookupStats
from anaphora.core.sequence import Sequence, State
from anaphora.core.sequence_updates import append_sampled, error_update
from anaphora.errors import InvalidRequest
from anaphora.types.batch import Batch, StepOutput
from anaphora.types.outputs import EngineStats, SequenceUpdate
from anaphora.types.reports import CacheReport
from anaphora.types.request import Request


class Scheduler:
    """First come, first served. When blocks run out, the sequence that came last is preempted and recomputed later.

    A sequence whose next block a running sequence is about to compute waits for it without holding blocks, and others
    overtake it. After a failed step each of its sequences gets a step of its own, so that only the one that cannot be
    computed ends with an error.
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
        self.lookup_stats = LookupStats(cache, self.stats)
        self.groups = PrefixGroups()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._live: dict[str, list[Sequence]] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: dict[int, list[ScheduledChunk]] = {}
        self._arrived: list[Sequence] = []
        self._steps = 0
        self._arrivals = 0
        self._clock = clock

    # --- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, naming the field, if it can never be served."""
        max_tokens = self._max_tokens(request)
        live = self._live[request.id] = []
        for choice in range(request.sampling.n):
            sequence = Sequence(request, choice, self._arrivals, max_tokens, self._table(request, choice))
            self._arrivals += 1
            live.append(sequence)
            self.waiting.append(sequence)
            self._arrived.append(sequence)

    def _max_tokens(self, request: Request) -> int:
        """Return how many tokens a choice may generate."""
        prompt, wanted = len(request.prompt_token_ids), request.sampling.max_tokens
        if request.id in self._live:
            raise InvalidRequest(f"a request with id {request.id!r} is running; ids must differ", param="request_id")
        if not prompt:
            raise InvalidRequest("the prompt is empty; it must hold at least one token", param="prompt")
        if prompt >= self.max_model_len and not (prompt == self.max_model_len and wanted == 0):
            raise InvalidRequest(
                f"the prompt has {prompt} tokens; prompt and answer together can have at most {self.max_model_len}",
                param="prompt",
            )
        room = self.max_model_len - prompt
        return room if wanted is None else min(wanted, room)

    def _table(self, request: Request, choice: int) -> BlockTable:
        root = root_hash(self.identity, request.cache_salt)
        bypass = "prompt_logprobs" if request.sampling.prompt_logprobs is not None and not choice else ""
        return self.cache.table(request.id, request.prompt_token_ids, root, bypass=bypass)

    def explain(self, request: Request) -> CacheReport:
        """Return what the request's prompt would find in the cache now, and why the match ends there."""
        table = self._table(request, 0)
        return self.cache.explain(table, self.cache.match(table), len(request.prompt_token_ids))

    def abort(self, request_id: str) -> bool:
        """End all choices of a request without an update. Returns False if there is no such request."""
        live = self._live.get(request_id, [])
        for sequence in list(live):
            self._finish(sequence)
        return bool(live)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice without an update (its text contains a stop string)."""
        for sequence in list(self._live.get(request_id, [])):
            if sequence.choice == choice:
                self._finish(sequence)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step is in flight."""
        return bool(self._live) or bool(self._in_flight)

    def tables(self) -> Iterable[BlockTable]:
        """Return the block tables of all live sequences."""
        return (sequence.table for live in self._live.values() for sequence in live)

    # --- making a step ---------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Return the next step, or None if nothing can be computed before a result is taken."""
        builder = BatchBuilder(self._steps, self.config.max_num_batched_tokens)
        if not self._schedule_alone(builder):
            preemptions = self.stats.preemptions
            self._schedule_running(builder)
            if self.stats.preemptions == preemptions:
                self._admit_waiting(builder)
        self._note_waits()
        if not builder.scheduled:
            return None
        self._steps += 1
        self._in_flight[builder.step] = builder.scheduled
        groups = self.groups.groups(builder.decoding()) if self.config.shared_prefix_attention else ()
        return builder.build(groups)

    def _schedule_alone(self, builder: BatchBuilder) -> bool:
        """Give a sequence of a failed step a step of its own, which shows whether the failure is its fault."""
        for sequence in self.running:
            if sequence.run_alone:
                self._schedule_one(sequence, builder)
                return bool(builder.scheduled)
        return any(sequence.run_alone and self._admit(sequence, builder) for sequence in self.waiting)

    def _schedule_running(self, builder: BatchBuilder) -> None:
        at = 0
        while at < len(self.running) and builder.budget > 0:
            sequence = self.running[at]
            while not self._schedule_one(sequence, builder):
                victim = self.running[-1]
                self._preempt(victim)
                self.stats.preemptions += 1
                if victim is sequence:
                    return
            at += 1

    def _schedule_one(self, sequence: Sequence, builder: BatchBuilder) -> bool:
        """Add the sequence's next chunk, if it has one. Returns False if there are not enough blocks."""
        start = sequence.num_scheduled
        if start >= sequence.num_tokens or not sequence.wants_more or builder.budget <= 0:
            return True
        end = builder.next_end(sequence)
        write_from = max(start, sequence.num_cached)
        reservation = self.cache.reserve(sequence.table, write_from, end, builder.step)
        if reservation is None:
            return False
        builder.add(sequence, end, write_from, reservation)
        return True

    # --- admission -------------------------------------------------------------------------------------------------

    def _admit_waiting(self, builder: BatchBuilder) -> None:
        """Admit waiting sequences in order; those that wait for another's prefix are overtaken."""
        headroom = -1
        for sequence in list(self.waiting):
            if builder.budget <= 0 or not self._free_slots:
                return
            if sequence.num_in_flight or sequence.run_alone or self._waits_for_block(sequence):
                continue
            if headroom < 0:
                spare = self.cache.pool.total // 100 if self.running else 0
                headroom = sum(map(self._missing_blocks, self.running)) + spare
            if self._admit(sequence, builder, headroom):
                headroom += self._missing_blocks(sequence)
            elif sequence.pending_block is None:
                return

    def _waits_for_block(self, sequence: Sequence) -> bool:
        return sequence.pending_block is not None and self.cache.is_pending(sequence.pending_block)

    def _missing_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks a running sequence still needs to finish its prompt."""
        if not sequence.prefilling:
            return 0
        return max(self.cache.blocks_for(sequence.num_admitted + 1) - len(sequence.table.blocks), 0)

    def _admit(self, sequence: Sequence, builder: BatchBuilder, headroom: int = 0) -> bool:
        """Give the sequence a slot and its first chunk, if ``headroom`` blocks stay available for others.

        Returns False if it must wait: for a slot or blocks, or for ``sequence.pending_block``.
        """
        if not self._free_slots or sequence.num_in_flight:
            return False
        match = self._look_up(sequence)
        if match.pending is not None:
            return False
        now = self._clock()
        if sequence.pending_block is not None:
            sequence.waited_s += now - sequence.wait_since
            sequence.pending_block = None
        first = self.lookup_stats.is_first_admission(sequence)
        sizes = self.lookup_stats.at_sizes(sequence, match) if first else None
        num_tokens = min(len(sequence.token_ids) + 1, self.max_model_len)
        taken = self.cache.admit(sequence.table, match, num_tokens, headroom)
        if taken is None:
            return False
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.arrival_order)
        sequence.admit(self._free_slots.pop(), taken.tokens)
        if first:
            self.lookup_stats.admitted(sequence, match, taken, sizes, now)
        builder.join(sequence)
        self._schedule_one(sequence, builder)
        return True

    def _look_up(self, sequence: Sequence) -> Match:
        """Return the sequence's match. If another sequence is about to compute its next block, start the wait."""
        match = self.cache.match(sequence.table)
        if match.pending is not None:
            if sequence.pending_block is None:
                sequence.wait_since = self._clock()
            sequence.pending_block = match.pending
        return match

    def _note_waits(self) -> None:
        """Look up the sequences that came since the last step and were not reached, so that their waits are counted."""
        for sequence in self._arrived:
            if sequence.state is State.WAITING and sequence.pending_block is None and not sequence.admission_count:
                self._look_up(sequence)
        self._arrived.clear()

    # --- taking results --------------------------------------------------------------------------------------------

    def commit(self, output: StepOutput) -> list[SequenceUpdate]:
        """Take the results of the oldest step in flight. Tokens of sequences that have ended are dropped."""
        chunks = self._in_flight.pop(output.step)
        self.cache.finish_step(output.step)
        now = self._clock()
        updates = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state is State.FINISHED:
                continue
            if chunk.admission_count == sequence.admission_count and sequence.state is State.RUNNING:
                self._computed(chunk, output)
            if chunk.sample:
                sequence.num_in_flight -= 1
                token, logprobs = output.tokens[chunk.slot], output.logprobs.get(chunk.slot)
                update = append_sampled(sequence, token, logprobs, now, self.cache.block_size)
                self.stats.generation_tokens += len(update.token_ids)
                if update.finish_reason is not None:
                    self._finish(sequence)
                updates.append(update)
        return updates

    def _computed(self, chunk: ScheduledChunk, output: StepOutput) -> None:
        """Record that the chunk's keys and values are computed, so that other sequences can reuse them."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        sequence.run_alone = False
        ends_prompt = chunk.start < sequence.num_prompt == chunk.end
        self.cache.commit(sequence.table, chunk.end, tail=ends_prompt)
        if not sequence.prompt_done:
            sequence.prompt_logprobs += output.prompt_logprobs.get(chunk.slot, ())
        if chunk.start < sequence.num_admitted <= chunk.end:
            full = sequence.table.blocks[: sequence.num_admitted // self.cache.block_size]
            self.groups.join(chunk.slot, [block.id for block in full])

    def fail(self, error: str) -> list[SequenceUpdate]:
        """Handle the failure of the oldest step in flight; later ones are lost with it. Requeues their sequences.

        A sequence that was alone in the failed step, or that has failed ``MAX_FAILURES`` times, ends with ``error``.
        """
        self.stats.failed_steps += 1
        failed = next(iter(self._in_flight.values()))
        lost = {id(chunk.sequence): chunk.sequence for chunks in self._in_flight.values() for chunk in chunks}
        for number in self._in_flight:
            self.cache.fail_step(number)
        self._in_flight.clear()
        for sequence in lost.values():
            sequence.num_in_flight = 0
            if sequence.state is State.RUNNING:
                self._preempt(sequence)
        updates = []
        for sequence in (chunk.sequence for chunk in failed):
            if sequence.state is State.FINISHED:
                continue
            sequence.failures += 1
            sequence.run_alone = True
            if len(failed) == 1 or sequence.failures >= self.MAX_FAILURES:
                updates.append(self._fail_sequence(sequence, error))
                self.cache.invalidate(sequence.table)
        return updates

    def fail_first_waiting(self) -> list[SequenceUpdate]:
        """End the first waiting sequence: with nothing in flight and nothing to schedule, it would wait forever."""
        if not self.waiting:
            return []
        sequence = self.waiting[0]
        need, room = self.cache.blocks_for(len(sequence.token_ids) + 1), self.cache.pool.available
        error = f"the request needs {need} KV blocks and only {room} are available, though no other request is running"
        return [self._fail_sequence(sequence, error)]

    def _fail_sequence(self, sequence: Sequence, error: str) -> SequenceUpdate:
        self._finish(sequence)
        return error_update(sequence, error, self._clock())

    # --- leaving ---------------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """Free its slot and blocks and let it wait again; only blocks evicted meanwhile are recomputed."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.state = State.WAITING
        sequence.num_computed = sequence.num_scheduled = 0
        bisect.insort(self.waiting, sequence, key=lambda s: s.arrival_order)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        live = self._live[sequence.request.id]
        live.remove(sequence)
        if not live:
            del self._live[sequence.request.id]

    def _free(self, sequence: Sequence) -> None:
        self.groups.leave(sequence.slot)
        self.cache.release(sequence.table, sequence.num_computed)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

"""FakeRunner: a runner without a model that simulates the KV pool and checks every read of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b

from anaphora.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from anaphora.core.engine import Engine
from anaphora.types.batch import Batch, Join, ModelInfo, StepOutput, TokenLogprobs
from anaphora.types.outputs import SequenceUpdate
from anaphora.types.request import Request
from anaphora.types.sampling import SamplingParams

VOCAB = 1000
BYTES_PER_TOKEN = 16


def chain(tokens: Iterable[int]) -> Iterator[bytes]:
    """Yield for each position a value that depends on its token and all before it, as keys and values do."""
    state = b""
    for token in tokens:
        state = blake2b(state + token.to_bytes(4, "little"), digest_size=8).digest()
        yield state


def next_token(tokens: list[int], seed: int = 0) -> int:
    """Return the token that the fake model generates after these tokens."""
    *_, last = chain(tokens)
    return int.from_bytes(blake2b(last + seed.to_bytes(4, "little"), digest_size=4).digest(), "little") % VOCAB


def expected(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    """Return the first ``count`` tokens that the fake model generates after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, choice))
    return tokens[len(prompt) :]


class _Done:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class _Failed:
    """A failed step. Steps submitted before its result is taken fail too."""

    def __init__(self, runner: FakeRunner, message: str) -> None:
        self._runner = runner
        self._message = message
        runner.failed_in_flight += 1

    def result(self) -> StepOutput:
        self._runner.failed_in_flight -= 1
        raise RuntimeError(self._message)


class FakeRunner:
    """Executes batches on a simulated pool. Reads of a slot with a wrong value are noted in ``faults``.

    A step whose number is in ``failing``, or that computes a token in ``poison``, fails and empties the slots that it
    was to write. ``computed`` counts the given tokens that were computed; ``widest`` is the most rows of a step.
    """

    warnings: tuple[str, ...] = ()

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, *, lookahead: int = 0, context_length: int = 4096
    ) -> None:
        self.info = ModelInfo(
            name="fake",
            identity="fake-1",
            vocab_size=VOCAB,
            context_length=context_length,
            num_blocks=num_blocks,
            block_size=block_size,
            bytes_per_block=block_size * BYTES_PER_TOKEN,
            dtype="none",
            kv_dtype="none",
            device="cpu",
        )
        self.lookahead = lookahead
        self.failing: set[int] = set()
        self.poison: set[int] = set()
        self.faults: list[str] = []
        self.failed_in_flight = 0
        self.computed = 0
        self.widest = 0
        self.batches: list[Batch] = []
        self._slots: list[bytes | None] = [None] * (num_blocks * block_size)
        self._joined: dict[int, Join] = {}
        self._tokens: dict[int, list[int]] = {}
        self._tables: dict[int, list[int]] = {}

    def free_memory(self) -> int:
        return 0

    def submit(self, batch: Batch) -> _Done | _Failed:
        self.batches.append(batch)
        size = self.info.block_size
        for join in batch.joins:
            self._joined[join.slot] = join
            self._tokens[join.slot] = list(join.token_ids)
            self._tables[join.slot] = list(join.block_table)
        for copy in batch.copies:
            held = self._slots[copy.source * size : copy.source * size + copy.filled]
            self._slots[copy.target * size : (copy.target + 1) * size] = held + [None] * (size - copy.filled)
        broken = batch.step in self.failing or self.failed_in_flight > 0
        for chunk in batch.chunks:
            table = self._tables[chunk.slot]
            for at, block in chunk.table_changes:
                if at == len(table):
                    table.append(block)
                else:
                    table[at] = block
            tokens = self._tokens[chunk.slot]
            end = chunk.start + chunk.length
            if chunk.token_ids is not None and tuple(tokens[chunk.start : end]) != chunk.token_ids:
                self.faults.append(f"step {batch.step}: slot {chunk.slot} is given tokens that are not its own")
            broken = broken or bool(self.poison & set(tokens[chunk.start : end]))
            values = list(chain(tokens[:end]))
            for position in range(max(chunk.start, chunk.write_from), end):
                self._slots[table[position // size] * size + position % size] = None if broken else values[position]
        if broken:
            return _Failed(self, f"step {batch.step} was made to fail")
        return _Done(self._attend(batch))

    def _attend(self, batch: Batch) -> StepOutput:
        size = self.info.block_size
        tokens: dict[int, int] = {}
        prompt_logprobs = {}
        given = 0
        for chunk in batch.chunks:
            own, table, join = self._tokens[chunk.slot], self._tables[chunk.slot], self._joined[chunk.slot]
            end = chunk.start + chunk.length
            for position, value in enumerate(chain(own[:end])):
                if self._slots[table[position // size] * size + position % size] != value:
                    self.faults.append(f"step {batch.step}: slot {chunk.slot} reads a wrong value at {position}")
                    return StepOutput(batch.step, {c.slot: 0 for c in batch.chunks if c.sample})
            if chunk.token_ids is not None:
                given += chunk.length
            if join.sampling.prompt_logprobs is not None:
                follow = own[chunk.start + 1 : min(end + 1, join.num_prompt)]
                prompt_logprobs[chunk.slot] = tuple(TokenLogprobs(token, -1.0, 1) for token in follow)
            if chunk.sample:
                tokens[chunk.slot] = next_token(own[:end], join.choice)
        for slot, token in tokens.items():
            self._tokens[slot].append(token)
        self._check_groups(batch)
        self.computed += given
        self.widest = max(self.widest, sum(c.length for c in batch.chunks))
        return StepOutput(batch.step, tokens, {}, prompt_logprobs, given)

    def _check_groups(self, batch: Batch) -> None:
        reach: dict[int, int] = {}
        for group in sorted(batch.groups, key=lambda g: g.first):
            shared = {tuple(self._tables[slot][group.first : group.last]) for slot in group.slots}
            if len(shared) != 1 or len(group.slots) < 2:
                self.faults.append(f"step {batch.step}: {group} does not share its blocks")
            for slot in group.slots:
                if reach.get(slot, 0) != group.first:
                    self.faults.append(f"step {batch.step}: {group} leaves a gap in slot {slot}")
                reach[slot] = group.last


def load_fake(config: EngineConfig) -> FakeRunner:
    """Make a FakeRunner in the engine process (``tests.support.engine:load_fake``)."""
    size = config.cache.block_size
    memory = config.cache.kv_cache_memory_bytes or 2**16
    return FakeRunner(memory // (size * BYTES_PER_TOKEN), size)


def make_engine(runner: FakeRunner, **settings: object) -> Engine:
    """Return an engine over a FakeRunner. ``settings`` are fields of SchedulerConfig, CacheConfig or ModelConfig."""
    config = EngineConfig(
        cache=CacheConfig(block_size=runner.info.block_size),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
    )
    for name, value in settings.items():
        for part in ("model", "cache", "scheduler"):
            if hasattr(getattr(config, part), name):
                config = replace(config, **{part: replace(getattr(config, part), **{name: value})})
    assert isinstance(config.model, ModelConfig)
    return Engine(config, runner)


def make_request(id: str, prompt: Iterable[int], max_tokens: int = 4, **fields: object) -> Request:
    """Return a request. ``fields`` are ``cache_salt`` and ``eos_token_ids``, or fields of its SamplingParams."""
    own = {name: fields.pop(name) for name in ("cache_salt", "eos_token_ids") if name in fields}
    sampling = SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    return Request(id, tuple(prompt), sampling, arrival=0.0, **own)  # type: ignore[arg-type]


Updates = dict[tuple[str, int], list[SequenceUpdate]]


def advance(engine: Engine, updates: Updates) -> None:
    """Run one step; add its updates to ``updates`` by request id and choice."""
    for update in engine.step().updates:
        updates.setdefault((update.request_id, update.choice), []).append(update)


def run(engine: Engine, updates: Updates | None = None, limit: int = 10_000) -> Updates:
    """Run steps until there is no more work. Then assert the invariants and that no read was wrong."""
    updates = {} if updates is None else updates
    for _ in range(limit):
        if not engine.has_work:
            break
        advance(engine, updates)
    assert not engine.has_work, "the engine does not finish"
    engine.check()
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    assert not runner.faults, runner.faults[:3]
    return updates


def answer(updates: list[SequenceUpdate]) -> list[int]:
    """Return the tokens of one choice's updates."""
    return [token for update in updates for token in update.token_ids]

"""Engines over one loaded model, and what requests see of them."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from anaphora.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from anaphora.core.engine import Engine
from anaphora.model.loader import LoadedModel, load_model
from anaphora.model.memory import choose_device, limit_memory
from anaphora.model.runner import ModelRunner
from anaphora.types.batch import ModelInfo
from anaphora.types.outputs import SequenceUpdate
from anaphora.types.request import Request
from anaphora.types.sampling import SamplingParams
from card.meter import Metered, idle_share, ms, parts
from card.sizes import Size

WHOLE, CARD24, CARD24_085, FLOAT8 = "h200", "24g", "24g at 0.85", "fp8"
"""Kinds of runners: the whole card, capped at 24 GiB (0.9 and 0.85 of it), the whole with its cache in float8."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request to be: its prompt, the length of its answer, and the turns that follow in its conversation."""

    prompt: tuple[int, ...]
    answer: int
    turns: int = 0


@dataclass
class Seen:
    """What was seen of requests, from ``begin`` on. Times in seconds."""

    begin: float
    end: float = 0.0
    arrived: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    finished: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0
    preemptions: int = 0
    metered: Metered | None = None

    def note(self, update: SequenceUpdate, now: float) -> None:
        if update.error:
            raise RuntimeError(update.error)
        name = update.request_id
        self.first.setdefault(name, now)
        self.last[name] = now
        self.tokens[name] = self.tokens.get(name, 0) + len(update.token_ids)
        self.finished += update.finish_reason is not None
        if update.prompt is not None:
            self.cached += update.prompt.cache.cached_tokens
            self.prompt += update.prompt.cache.prompt_tokens
            self.prefill.append(update.prompt.prefill_s)

    def figures(self) -> dict[str, Any]:
        """Steps are those with nearly the most sequences: without the beginning and the end of a burst."""
        seconds = self.end - self.begin
        gaps = [(self.last[n] - self.first[n]) / (count - 1) for n, count in self.tokens.items() if count > 1]
        waits = [first - self.arrived[n] for n, first in self.first.items() if self.arrived[n] >= self.begin]
        most = max(rows for _, rows in self.steps)
        chosen = [i for i, (_, rows) in enumerate(self.steps) if rows >= 0.9 * most]
        found = {
            "requests": self.finished,
            "seconds": round(seconds, 4),
            "requests_per_s": round(self.finished / seconds, 3),
            "output_tokens_per_s": round(sum(self.tokens.values()) / seconds, 1),
            "step_ms": ms([self.steps[i][0] for i in chosen]),
            "ttft_ms": ms(waits),
            "itl_ms": ms(gaps),
            "prefill_ms": ms(self.prefill),
            "hit_rate": round(self.cached / self.prompt, 4) if self.prompt else None,
            "preemptions": self.preemptions,
        }
        if self.metered is not None and len(self.metered.steps) >= len(self.steps):
            steps = self.metered.steps[: len(self.steps)]
            found |= {"step_parts": parts([steps[i] for i in chosen], [self.steps[i][0] for i in chosen])}
            if steps[0].begin is not None:
                found |= {"gpu_idle_share": idle_share([steps[i] for i in _longest_run(chosen)])}
        return found


def _longest_run(numbers: Sequence[int]) -> list[int]:
    """The longest part of ascending ``numbers`` without a gap."""
    best: list[int] = []
    run: list[int] = []
    for number in numbers:
        run = [*run, number] if run and number == run[-1] + 1 else [number]
        best = max(best, run, key=len)
    return best


class Bench:
    """One loaded model; the runner over it is rebuilt when a row needs another kind."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        self.folder = folder
        config = transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"], **size.shape)
        config.save_pretrained(folder)
        self.device = choose_device("auto")
        self.kind = ""
        self.load_seconds = 0.0
        self._loaded: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._config = EngineConfig()
        self.random = random.Random(0)
        self._requests = 0

    def settings(self, kind: str) -> EngineConfig:
        size, gpu = self.size, self.device.type == "cuda"
        small = kind in (CARD24, CARD24_085)
        cache = CacheConfig(
            gpu_memory=24 if small and gpu else None,
            gpu_memory_utilization=0.85 if kind == CARD24_085 else 0.9,
            kv_cache_memory_bytes=size.pools[small],
            kv_cache_dtype="fp8" if kind == FLOAT8 and gpu else "auto",
        )
        seqs, budget = (256, size.small_budget) if small else (1024, size.budget)
        model = ModelConfig(model=str(self.folder), load_format="dummy")
        return EngineConfig(model, cache, SchedulerConfig(max_num_seqs=size.count(seqs), max_num_batched_tokens=budget))

    @property
    def made(self) -> ModelInfo | None:
        """What is loaded now; its kind is ``kind``, what it took to make ``load_seconds``."""
        return None if self._runner is None else self._runner.info

    def runner(self, kind: str) -> ModelRunner:
        """The runner of that kind."""
        if self._runner is None or self.kind != kind:
            self.release()
            self._config = self.settings(kind)
            self._runner, self.kind = self._make(self._config), kind
        return self._runner

    def _make(self, config: EngineConfig) -> ModelRunner:
        began = time.monotonic()
        limit_memory(config.cache, self.device)
        if self._loaded is None:
            self._loaded = load_model(config.model, self.device)
        runner = ModelRunner(config, self._loaded, self.device)
        self.load_seconds = round(time.monotonic() - began, 2)
        gc.collect()
        gc.freeze()  # as the engine's process does
        for warning in runner.warnings:
            print("warning:", warning, flush=True)
        return runner

    def release(self) -> None:
        """Give the runner's memory back."""
        self._runner = None
        gc.unfreeze()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Give the model's memory back too."""
        self._loaded = None
        self.release()

    def engine(self, kind: str = WHOLE, *, caching: bool = True, sharing: bool = True) -> Engine:
        """An engine with an empty cache; its runner notes the parts of the steps."""
        runner = self.runner(kind)
        config = dataclasses.replace(
            self._config,
            cache=dataclasses.replace(self._config.cache, enable_prefix_caching=caching),
            scheduler=dataclasses.replace(self._config.scheduler, shared_prefix_attention=sharing),
        )
        return Engine(config, Metered(runner))

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(self.size.shape["vocab_size"]), k=length))

    def jobs(self, count: int, answer: int, beginnings: Sequence[tuple[int, ...]] = ((),)) -> list[Job]:
        """``count`` requests of ``size.own`` tokens under the ``beginnings``, in turn."""
        own = self.size.own
        return [Job(beginnings[i % len(beginnings)] + self.text(own), answer) for i in range(count)]

    def logprobs(self, kind: str, prompt: tuple[int, ...]) -> list[float]:
        """Of each token of a prompt but the first, by a runner with a small cache of that kind's dtype."""
        self.release()
        settings = self.settings(kind)
        config = EngineConfig(
            settings.model,
            dataclasses.replace(settings.cache, kv_cache_memory_bytes=self.size.pools[1] or 2**30),
            dataclasses.replace(settings.scheduler, max_num_seqs=4),
        )
        engine = Engine(config, self._make(config))
        engine.add(Request("p", prompt, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), 0.0))
        found: list[float] = []
        while engine.has_work:
            for update in engine.step().updates:
                if update.prompt is not None and update.prompt.prompt_logprobs is not None:
                    found = [entry.logprob for entry in update.prompt.prompt_logprobs if entry is not None]
        return found

    def run(
        self,
        engine: Engine,
        jobs: Sequence[Job],
        follow: Callable[[Job, list[int]], Job | None] = lambda job, answer: None,
        window: tuple[float, float] | None = None,
    ) -> Seen:
        """Send all jobs at once; ``follow`` says what comes after one, given its answer. Until nothing is left.

        With ``window``, what is seen is of the time between these seconds; then what still runs is aborted.
        """
        start, stop = window or (0.0, math.inf)
        seen = Seen(time.monotonic(), preemptions=-engine.stats().preemptions)
        runner = engine.runner
        assert isinstance(runner, Metered)
        seen.metered, runner.steps = runner, []
        running: dict[str, Job] = {}
        answers: dict[str, list[int]] = {}

        def add(job: Job) -> None:
            self._requests += 1
            name = f"r{self._requests}"
            seen.arrived[name] = time.monotonic()
            running[name], answers[name] = job, []
            sampling = SamplingParams(temperature=0.0, max_tokens=job.answer, ignore_eos=True)
            engine.add(Request(name, job.prompt, sampling, seen.arrived[name]))

        for job in jobs:
            add(job)
        began = before = seen.begin
        while engine.has_work and before - began < stop:
            result = engine.step()
            now = time.monotonic()
            if start and now - began >= start:
                start, runner.steps = 0.0, runner.steps[len(seen.steps) :]
                seen = Seen(now, arrived=seen.arrived, preemptions=-engine.stats().preemptions, metered=runner)
            seen.steps.append((now - before, len(result.updates)))
            before = now
            for update in result.updates:
                seen.note(update, now)
                answers[update.request_id] += update.token_ids
                if update.finish_reason is not None:
                    following = follow(running.pop(update.request_id), answers.pop(update.request_id))
                    if following is not None:
                        add(following)
        seen.end = time.monotonic()
        seen.preemptions += engine.stats().preemptions
        for name in running:
            engine.abort(name)
        while engine.has_work:
            engine.step()
        engine.check()
        return seen

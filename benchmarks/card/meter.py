"""A Runner around the real one that records where the time of each step goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from anaphora.model.runner import ModelRunner
from anaphora.types.batch import Batch, Pending, StepOutput


@dataclass(slots=True, eq=False)
class Step:
    """Seconds of the host in ``submit`` and waiting for the result; events before and after the step's GPU work."""

    submit: float = 0.0
    wait: float = 0.0
    begin: Any = None
    end: Any = None


class _Timed:
    def __init__(self, pending: Pending, step: Step) -> None:
        self._pending = pending
        self._step = step

    def result(self) -> StepOutput:
        began = time.perf_counter()
        try:
            return self._pending.result()
        finally:
            self._step.wait = time.perf_counter() - began


class Metered:
    """Wraps a runner. ``steps`` are in the order of submission, which is also the order of the results."""

    def __init__(self, runner: ModelRunner) -> None:
        self.info, self.lookahead, self.warnings = runner.info, runner.lookahead, runner.warnings
        self.free_memory = runner.free_memory
        self.steps: list[Step] = []
        self._runner = runner
        self._gpu = runner.info.device.startswith("cuda")

    def submit(self, batch: Batch) -> Pending:
        step = Step()
        self.steps.append(step)
        began = time.perf_counter()
        with self._noting_begin(step):
            pending = self._runner.submit(batch)
        if self._gpu:
            step.end = torch.cuda.Event(enable_timing=True)
            step.end.record()
        step.submit = time.perf_counter() - began
        return _Timed(pending, step)

    @contextmanager
    def _noting_begin(self, step: Step) -> Iterator[None]:
        """Record an event where the model's work begins: at its forward pass, or where a graph is replayed."""
        if not self._gpu:
            yield
            return
        forward, replay = self._runner._forward, torch.cuda.CUDAGraph.replay

        def note() -> None:
            if step.begin is None:
                step.begin = torch.cuda.Event(enable_timing=True)
                step.begin.record()

        def noted_forward(*args: Any) -> Any:
            note()
            return forward(*args)

        def noted_replay(graph: Any) -> None:
            note()
            replay(graph)

        self._runner._forward = noted_forward  # type: ignore[method-assign]
        torch.cuda.CUDAGraph.replay = noted_replay  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._runner._forward
            torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def parts(steps: Sequence[Step], seconds: Sequence[float]) -> dict[str, Any]:
    """Medians of the parts of ``steps``, which took ``seconds`` each.

    ``other_ms`` is host time except submit and wait: schedule, commit, processing of the tokens. ``gpu_ms`` is the time
    between the start and the end of a step's GPU work.
    """
    if not steps:
        return {}
    other = [whole - step.submit - step.wait for step, whole in zip(steps, seconds, strict=True)]
    found: dict[str, Any] = {
        "submit_ms": ms([step.submit for step in steps]),
        "wait_ms": ms([step.wait for step in steps]),
        "other_ms": ms(other),
    }
    timed = [step for step in steps if step.begin is not None]
    if timed:
        torch.cuda.synchronize()
        found["gpu_ms"] = ms([step.begin.elapsed_time(step.end) / 1000 for step in timed])
    return found


def idle_share(steps: Sequence[Step]) -> float | None:
    """The share of time between the first step's end and the last one's in which the GPU ran no step."""
    timed = [step for step in steps if step.begin is not None]
    if len(timed) < 2:
        return None
    torch.cuda.synchronize()
    idle = sum(max(a.end.elapsed_time(b.begin), 0.0) for a, b in pairwise(timed))
    return round(idle / timed[0].end.elapsed_time(timed[-1].end), 4)


def ms(seconds: Sequence[float]) -> float | None:
    """The median in milliseconds."""
    return round(1000 * statistics.median(seconds), 3) if seconds else None

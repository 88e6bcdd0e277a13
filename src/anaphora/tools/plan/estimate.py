"""Estimates throughput and cost of a workload on one GPU from its calibration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anaphora.errors import ConfigError
from anaphora.tools.plan.calibration import Calibration
from anaphora.tools.shared.money import machine_hours, monthly, rent

SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens: prefix shared by all prompts, own part of a prompt, answer."""

    shared: int
    own: int
    out: int


@dataclass(frozen=True)
class Estimate:
    """Estimate for one busy GPU.

    ``sequences`` run at once; ``prefill_s`` and ``decode_s`` are GPU seconds per request. ``within``: all lengths lie
    within the measured ones.
    """

    hit_rate: float
    sequences: int
    prefill_s: float
    decode_s: float
    within: bool

    @property
    def requests_per_s(self) -> float:
        """Throughput at full load."""
        return 1 / (self.prefill_s + self.decode_s)


@dataclass(frozen=True)
class Cost:
    """Hours and prices of a day's requests at full load, and the GPUs that the peak needs."""

    gpu_hours_a_day: float
    price_a_day: float | None
    price_a_month: float | None
    gpus_at_peak: int


def estimate(calibration: Calibration, workload: Workload, *, caching: bool, sequences: int | None = None) -> Estimate:
    """Returns the estimate with ``sequences`` at once, or with as many as give the most requests per second.

    Raises ConfigError if not even one request fits.
    """
    prompt, total = workload.shared + workload.own, workload.shared + workload.own + workload.out
    limit = _fitting(calibration, workload, caching)
    if total > calibration.window or limit < 1:
        holds = min(calibration.window, calibration.blocks * calibration.block_size)
        raise ConfigError(
            f"prompt and answer have {total} tokens together, and this card and model take at most {holds}: "
            "lower --shared, --own or --out"
        )
    cached = min(workload.shared, prompt - 1) if caching else 0
    shared = cached if caching else 0
    prefill = calibration.prefill_s(prompt - cached, cached)
    mean = prompt - shared + workload.out // 2
    within = calibration.reaches(prompt - cached, cached, mean)

    def at(count: int) -> Estimate:
        step = calibration.step_s(count, shared, mean)
        return Estimate(cached / prompt, count, prefill, workload.out * step / count, within)

    if sequences is not None:
        return at(min(sequences, limit))
    return max((at(count) for count in {*calibration.batches, limit} if count <= limit), key=lambda e: e.requests_per_s)


def _fitting(calibration: Calibration, workload: Workload, caching: bool) -> int:
    """Returns how many sequences the blocks hold at the end of their answers."""
    size = calibration.block_size
    shared = workload.shared // size if caching else 0
    own = math.ceil((workload.shared + workload.own + workload.out) / size) - shared
    return min((calibration.blocks - shared) // own, calibration.max_num_seqs)


def cost(requests_per_s: float, per_day: int, peak_factor: float, hour: float | None) -> Cost:
    """Returns the cost of ``per_day`` requests on GPUs of ``requests_per_s`` each, at ``hour`` per GPU hour."""
    hours = machine_hours(per_day, requests_per_s)
    price = rent(hours, hour)
    peak = math.ceil(per_day / SECONDS_A_DAY * peak_factor / requests_per_s)
    return Cost(hours, price, monthly(price), peak)

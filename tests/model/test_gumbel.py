"""Computed noise: exact bits, distribution, independence of neighbouring seeds and positions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from anaphora.model.gumbel import gumbel_noise, row_words, uniform_bits
from anaphora.model.sampler import Sampler
from anaphora.types.sampling import SamplingParams
from tests.support.sampler import CPU, join, logits_of, reference_bits, reference_noise


@given(key=st.integers(-(2**63), 2**64 + 200), position=st.integers(0, 2**20), token=st.integers(0, 300_000))
@example(key=0, position=0, token=0)
def test_the_bits_are_those_of_plain_integer_arithmetic(key: int, position: int, token: int) -> None:
    words = torch.tensor([row_words(key, position)], dtype=torch.int32)
    ids = torch.arange(token, token + 17, dtype=torch.int32)
    assert uniform_bits(words, ids)[0].tolist() == [reference_bits(key, position, token + i) for i in range(17)]


def test_the_noise_is_finite_and_close_to_the_exact_logarithms() -> None:
    words = torch.tensor([row_words(1, 2)], dtype=torch.int32)
    noise = gumbel_noise(words, torch.arange(100_000, dtype=torch.int32))[0]
    assert noise.isfinite().all()
    for token in range(0, 100_000, 97):
        assert noise[token].item() == pytest.approx(reference_noise(1, 2, token), abs=2e-6, rel=2e-6)


def chi_square_is_plausible(observed: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within five standard deviations of the mean of the chi-square distribution."""
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    freedom = observed.numel() - 1
    return abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


DRAWS = 20_000


def draws_of(logits: torch.Tensor, seeds: list[int], positions: list[int]) -> torch.Tensor:
    sampler = Sampler(logits.shape[-1], len(seeds), CPU)
    for slot, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        sampler.join(join(slot, SamplingParams(seed=seed), generated=(0,) * position, prompt=(0,)))
    return torch.tensor(sampler.sample(logits.expand(len(seeds), -1), list(range(len(seeds)))).read()[0])


@pytest.mark.parametrize("axis", ["seeds", "positions", "both"])
def test_draws_follow_the_distribution(axis: str) -> None:
    vocab = 60
    logits = logits_of(5, 1, vocab, scale=1.0)[0]
    width = {"seeds": 1, "positions": 2000, "both": math.isqrt(DRAWS)}[axis]
    seeds = [i // width for i in range(DRAWS)]
    positions = [3 if axis == "seeds" else i % width for i in range(DRAWS)]
    drawn = draws_of(logits, seeds, positions)
    observed = torch.bincount(drawn, minlength=vocab).double()
    assert chi_square_is_plausible(observed, logits.double().softmax(-1) * DRAWS)


def test_draws_over_a_large_vocabulary_are_even() -> None:
    vocab, rows = 50_000, 1_000
    drawn = draws_of(torch.zeros(vocab), list(range(rows)), [0] * rows)
    observed = torch.bincount(drawn // 1000, minlength=50).double()
    assert chi_square_is_plausible(observed, torch.full((50,), rows / 50, dtype=torch.float64))
    assert len(set(drawn.tolist())) > rows * 0.95


@pytest.mark.parametrize(("seed_step", "position_step"), [(1, 0), (0, 1), (1, 1), (1, -1)])
def test_neighbouring_draws_are_independent(seed_step: int, position_step: int) -> None:
    vocab, side = 8, 140
    pairs = [(seed, position) for seed in range(side) for position in range(1, side + 1)]
    logits = torch.zeros(vocab)
    first = draws_of(logits, [s for s, _ in pairs], [p for _, p in pairs])
    second = draws_of(logits, [s + seed_step for s, _ in pairs], [p + position_step for _, p in pairs])
    observed = torch.bincount(first * vocab + second, minlength=vocab**2).double()
    assert chi_square_is_plausible(observed, torch.full((vocab**2,), len(pairs) / vocab**2, dtype=torch.float64))

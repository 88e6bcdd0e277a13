"""Sequences and logits for the tests of the sampler, and a slow reference: one row, float64, plain Python."""

from __future__ import annotations

import math
from collections import Counter

import torch

from anaphora.model.sampler import Sampler
from anaphora.types.batch import Join
from anaphora.types.sampling import SamplingParams

CPU = torch.device("cpu")
EOS = (7,)
PROMPT = (1, 2, 3, 3)


def join(
    slot: int, sampling: SamplingParams, *, generated: tuple[int, ...] = (), choice: int = 0, prompt=PROMPT
) -> Join:
    return Join(
        slot=slot,
        sampling=sampling,
        choice=choice,
        token_ids=(*prompt, *generated),
        num_prompt=len(prompt),
        eos_token_ids=EOS,
        block_table=(),
    )


def logits_of(seed: int, rows: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(
    sampling: SamplingParams, logits: torch.Tensor, *, generated: tuple[int, ...] = (), choice: int = 0
) -> int:
    """The token that one row ``[V]`` gets, alone."""
    sampler = Sampler(logits.shape[-1], 1, CPU)
    sampler.join(join(0, sampling, generated=generated, choice=choice))
    return sampler.sample(logits[None], [0]).read()[0][0]


def reference_scores(
    logits: list[float], sampling: SamplingParams, generated: tuple[int, ...], eos: tuple[int, ...] = EOS
) -> list[float]:
    """What greedy decoding takes the argmax of."""
    scores = list(logits)
    if sampling.allowed_token_ids is not None:
        scores = [score if i in sampling.allowed_token_ids else -math.inf for i, score in enumerate(scores)]
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if len(generated) < sampling.min_tokens:
        for token in (*eos, *sampling.stop_token_ids):
            scores[token] = -math.inf
    counts = Counter(generated)
    for token in {*PROMPT, *generated}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in counts.items():
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return scores


def reference_kept(scores: list[float], sampling: SamplingParams) -> tuple[list[float], float]:
    """Scores by temperature with what may not be drawn at -inf, and how near any decision was to its threshold."""
    scores = [score / sampling.temperature for score in scores]
    margin = math.inf
    if sampling.min_p > 0:
        edge = max(scores) + math.log(sampling.min_p)
        margin = min(margin, *(abs(score - edge) for score in scores if score != max(scores)))
        scores = [score if score >= edge else -math.inf for score in scores]
    if 0 < sampling.top_k < len(scores):
        edge = sorted(scores, reverse=True)[sampling.top_k - 1]
        scores = [score if score >= edge else -math.inf for score in scores]
    if sampling.top_p < 1:
        weights = [math.exp(score - max(scores)) for score in scores]
        total, mass, kept = sum(weights), 0.0, set()
        for token in sorted(range(len(scores)), key=lambda i: -scores[i]):
            margin = min(margin, abs(mass - sampling.top_p))
            if mass < sampling.top_p:
                kept.add(token)
            mass += weights[token] / total
        scores = [score if i in kept else -math.inf for i, score in enumerate(scores)]
    return scores, margin


def mix64(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def reference_bits(key: int, position: int, token: int) -> int:
    golden = 0x9E3779B97F4A7C15
    word = mix64((mix64((key + golden) % 2**64) + (position + 1) * golden) % 2**64)
    x = (token * (word % 2**32 | 1) + word // 2**32) % 2**32
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0x735A2D97 % 2**32
    return (x ^ x >> 15) % 2**31


def reference_noise(key: int, position: int, token: int) -> float:
    return -math.log(-math.log1p(-(reference_bits(key, position, token) + 0.5) / 2**31))


def reference_sample(logits: list[float], sampling: SamplingParams, generated: tuple[int, ...]) -> tuple[int, float]:
    """The token, and the margin by which it was chosen."""
    scores = reference_scores(logits, sampling, generated)
    margin = math.inf
    if sampling.temperature > 0:
        scores, margin = reference_kept(scores, sampling)
        scores = [score + reference_noise(sampling.seed, len(generated), i) for i, score in enumerate(scores)]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return order[0], min(margin, scores[order[0]] - scores[order[1]])

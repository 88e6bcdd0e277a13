"""The sampler against slow plain Python, its noise against statistics, and rows against their neighbours."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from anaphora.errors import StepFailed
from anaphora.model.sampling import Sampler, gumbel_noise, row_words, uniform_bits
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


def draw(sampling: SamplingParams, logits: torch.Tensor, *, generated: tuple[int, ...] = (), choice: int = 0) -> int:
    """The token that one row ``[V]`` gets, alone."""
    sampler = Sampler(logits.shape[-1], 1, CPU)
    sampler.join(join(0, sampling, generated=generated, choice=choice))
    return sampler.draw(logits[None], [0]).read()[0][0]


# --- slow reference: one row, float64, plain Python -------------------------------------------------------------------


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


def reference_draw(logits: list[float], sampling: SamplingParams, generated: tuple[int, ...]) -> tuple[int, float]:
    """The token, and the margin by which it was chosen."""
    scores = reference_scores(logits, sampling, generated)
    margin = math.inf
    if sampling.temperature > 0:
        scores, margin = reference_kept(scores, sampling)
        scores = [score + reference_noise(sampling.seed, len(generated), i) for i, score in enumerate(scores)]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return order[0], min(margin, scores[order[0]] - scores[order[1]])


@st.composite
def combinations(draw, vocab: int) -> tuple[SamplingParams, tuple[int, ...]]:
    ids = st.integers(0, vocab - 1)
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0, 0.3, 1.0, 2.5])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.6, 0.01])),
        top_k=draw(st.sampled_from([0, -1, 1, 3, 12, vocab, 10**6])),
        min_p=draw(st.sampled_from([0, 0.05, 0.4])),
        presence_penalty=draw(st.sampled_from([0, 1.3, -0.7])),
        frequency_penalty=draw(st.sampled_from([0, 0.9, -0.4])),
        repetition_penalty=draw(st.sampled_from([1, 1.7, 0.6])),
        logit_bias=draw(st.dictionaries(ids, st.floats(-9, 9), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=12, max_size=20, unique=True).map(tuple)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=2))),
        min_tokens=draw(st.sampled_from([0, 3])),
    )
    return sampling, tuple(draw(st.lists(ids, max_size=6)))


VOCAB = 40


@given(data=st.data(), seed=st.integers(0, 10**6))
@settings(max_examples=150)
def test_every_combination_gives_what_the_reference_gives(data: st.DataObject, seed: int) -> None:
    cases = data.draw(st.lists(combinations(VOCAB), min_size=1, max_size=4))
    logits = logits_of(seed, len(cases), VOCAB)
    sampler = Sampler(VOCAB, len(cases), CPU)
    expected = []
    for slot, (sampling, generated) in enumerate(cases):
        token, margin = reference_draw(logits[slot].tolist(), sampling, generated)
        assume(margin > 1e-4)
        expected.append(token)
        sampler.join(join(slot, sampling, generated=generated))
    assert sampler.draw(logits, list(range(len(cases)))).read()[0] == expected


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_k=1), {0}),
        (SamplingParams(top_p=0.4), {0}),
        (SamplingParams(top_p=0.41), {0, 1}),
        (SamplingParams(top_p=0.75), {0, 1, 2}),
        (SamplingParams(min_p=0.5), {0, 1}),
        (SamplingParams(min_p=1.0), {0}),
        (SamplingParams(top_k=2, top_p=0.55), {0}),  # 0.4 of the 0.7 that top_k leaves is 0.57
        (SamplingParams(top_k=3, min_p=0.5), {0, 1}),
        (SamplingParams(temperature=0.5, top_p=0.5), {0}),  # squares: 0.16 of 0.30
        (SamplingParams(temperature=1e-6), {0}),
        (SamplingParams(allowed_token_ids=(3, 4)), {3, 4}),
        (SamplingParams(allowed_token_ids=(3, 4), top_k=1), {3}),
        (SamplingParams(logit_bias={4: 3}, top_k=1), {4}),
        (SamplingParams(), {0, 1, 2, 3, 4}),
    ],
)
def test_only_what_a_parameter_leaves_is_drawn(sampling: SamplingParams, kept: set[int]) -> None:
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log().expand(400, -1)
    sampler = Sampler(5, 400, CPU)
    for slot in range(400):
        sampler.join(join(slot, sampling, prompt=(0,)))
    assert set(sampler.draw(logits, list(range(400))).read()[0]) == kept


def test_a_nucleus_wider_than_the_first_guess_is_found_whole() -> None:
    vocab, rows = 6000, 800
    flat = logits_of(1, 1, vocab, scale=0.1)
    sampler = Sampler(vocab, rows, CPU)
    for slot in range(rows):
        sampler.join(join(slot, SamplingParams(top_p=0.5, seed=slot)))
    drawn = torch.tensor(sampler.draw(flat.expand(rows, -1), list(range(rows))).read()[0])
    order = flat[0].argsort(descending=True)
    size = int((flat[0][order].softmax(-1).cumsum(-1) < 0.5).sum()) + 1
    assert set(drawn.tolist()) <= set(order[:size].tolist())
    assert len(set(drawn.tolist()) & set(order[1024:size].tolist())) > rows // 5


def test_tokens_that_tie_at_the_edge_are_all_kept() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, -3.0]).expand(200, -1)
    for sampling in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        sampler = Sampler(5, 200, CPU)
        for slot in range(200):
            sampler.join(join(slot, sampling, prompt=(0,)))
        assert set(sampler.draw(logits, list(range(200))).read()[0]) == {0, 1, 2, 3}


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 300)
    logits[1, 5:] = 1.0
    sampler = Sampler(300, 2, CPU)
    for slot in range(2):
        sampler.join(join(slot, SamplingParams(temperature=0)))
    assert sampler.draw(logits, [0, 1]).read()[0] == [0, 5]


def test_penalties_follow_the_tokens_as_they_are_generated() -> None:
    sampling = SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=1.5)
    logits = torch.zeros(1, 10)
    logits[0, :4] = torch.tensor([4.13, 3.07, 2.51, 2.39])
    sampler = Sampler(10, 1, CPU)
    sampler.join(join(0, sampling, prompt=(0,)))
    generated: tuple[int, ...] = ()
    for _ in range(12):
        scores = logits[0].tolist()
        for token in {0, *generated}:
            scores[token] = scores[token] / 1.5
        for token, count in Counter(generated).items():
            scores[token] -= count
        expected = scores.index(max(scores))
        assert sampler.draw(logits, [0]).read()[0] == [expected]
        generated = (*generated, expected)
    assert len(set(generated)) > 3


def test_min_tokens_bans_end_and_stop_tokens_until_enough_are_generated() -> None:
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(5,))
    logits = torch.zeros(1, 10)
    logits[0, 7], logits[0, 5], logits[0, 9] = 9.0, 8.0, 1.0
    sampler = Sampler(10, 1, CPU)
    sampler.join(join(0, sampling))
    assert [sampler.draw(logits, [0]).read()[0][0] for _ in range(3)] == [9, 9, 7]
    assert draw(sampling, logits[0], generated=(9,)) == 9
    assert draw(sampling, logits[0], generated=(9, 9)) == 7


def test_where_only_end_tokens_are_allowed_min_tokens_gives_way() -> None:
    sampling = SamplingParams(temperature=0, min_tokens=5, allowed_token_ids=(7,))
    assert draw(sampling, torch.zeros(10)) == 7


def test_ids_beyond_the_logits_do_no_harm_among_the_end_tokens() -> None:
    sampler = Sampler(6, 1, CPU)  # EOS is 7
    sampler.join(join(0, SamplingParams(temperature=0, min_tokens=1)))
    assert sampler.draw(torch.arange(6.0)[None], [0]).read()[0] == [5]


# --- independence of the batch ----------------------------------------------------------------------------------------

MIXED = (
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(seed=1),
    SamplingParams(seed=1, logprobs=0),
    SamplingParams(seed=2, top_p=0.9, logprobs=5),
    SamplingParams(seed=3, top_k=5, temperature=1.7),
    SamplingParams(seed=4, min_p=0.1, repetition_penalty=1.3),
    SamplingParams(seed=5, presence_penalty=1.0, frequency_penalty=0.5, top_p=0.99, top_k=700),
    SamplingParams(seed=6, logit_bias={3: 4.0}, min_tokens=4, logprobs=20),
    SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.3),
)


@pytest.mark.parametrize("vocab", [1003, 49152])
def test_a_row_is_the_same_alone_in_any_batch_on_any_slot_and_after_preemption(vocab: int) -> None:
    steps = 5
    logits = [logits_of(i, steps, vocab, scale=1.5) for i in range(len(MIXED))]
    alone = []
    for sampling, rows in zip(MIXED, logits, strict=True):
        sampler = Sampler(vocab, 1, CPU)
        sampler.join(join(0, sampling))
        results = [sampler.draw(rows[step : step + 1], [0]).read() for step in range(steps)]
        alone.append([(tokens[0], logprobs.get(0)) for tokens, logprobs in results])

    sampler = Sampler(vocab, 32, CPU)
    slots = [3 * i + 1 for i in range(len(MIXED))]
    together: list[list] = [[] for _ in MIXED]
    for step in range(steps):
        for i, sampling in enumerate(MIXED):
            if step == 0 or (step + i) % 3 == 0:  # joined, or preempted and joined anew on another slot
                slots[i] = 31 - slots[i] if step and 31 - slots[i] not in slots else slots[i]
                sampler.join(join(slots[i], sampling, generated=tuple(token for token, _ in together[i])))
        order = sorted(range(len(MIXED)), key=lambda i: (i * 7 + step) % 5)
        order = [i for i in order if len(together[i]) == step]
        batch = torch.stack([logits[i][step] for i in order])
        tokens, logprobs = sampler.draw(batch, [slots[i] for i in order]).read()
        for i, token in zip(order, tokens, strict=True):
            together[i].append((token, logprobs.get(slots[i])))
    assert together == alone


def test_equal_seeds_differ_by_choice_and_position_and_nothing_else() -> None:
    logits = logits_of(0, 1, 1000, scale=0.2)[0]
    base = draw(SamplingParams(seed=10), logits)
    assert draw(SamplingParams(seed=10), logits) == base
    assert draw(SamplingParams(seed=9), logits, choice=1) == base
    others = {draw(SamplingParams(seed=10), logits, choice=c) for c in range(1, 9)}
    others |= {draw(SamplingParams(seed=10), logits, generated=(4,) * g) for g in range(1, 9)}
    assert len(others) > 12


def test_unseeded_sequences_differ_from_each_other_and_repeat_with_the_seed_of_the_configuration() -> None:
    logits = logits_of(0, 1, 1000, scale=0.2)

    def tokens(seed: int) -> list[int]:
        sampler = Sampler(1000, 8, CPU, seed=seed)
        for slot in range(8):
            sampler.join(join(slot, SamplingParams()))
        return sampler.draw(logits.expand(8, -1), list(range(8))).read()[0]

    assert tokens(0) == tokens(0) != tokens(1)
    assert len(set(tokens(0))) > 5


def test_the_logits_are_left_as_they_are() -> None:
    logits = logits_of(0, len(MIXED), 1003)
    before = logits.clone()
    sampler = Sampler(1003, len(MIXED), CPU)
    for slot, sampling in enumerate(MIXED):
        sampler.join(join(slot, sampling))
    sampler.draw(logits, list(range(len(MIXED)))).read()
    assert torch.equal(logits, before)


# --- noise ------------------------------------------------------------------------------------------------------------


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
    return torch.tensor(sampler.draw(logits.expand(len(seeds), -1), list(range(len(seeds)))).read()[0])


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


# --- log-probabilities and faults -------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampling = SamplingParams(
        temperature=0, logprobs=4, logit_bias={11: 50}, repetition_penalty=2.0, allowed_token_ids=(11, 12)
    )
    logits = logits_of(3, 1, 100)
    sampler = Sampler(100, 3, CPU)
    sampler.join(join(2, sampling))
    tokens, logprobs = sampler.draw(logits, [2]).read()
    expected = logits[0].double().log_softmax(-1)
    entry = logprobs[2]
    assert tokens == [11]
    assert entry.token_id == 11
    assert entry.logprob == pytest.approx(expected[11].item(), abs=1e-5)
    assert entry.rank == int((expected > expected[11]).sum()) + 1
    best = expected.topk(4)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_equal_logprobs_share_the_best_rank_and_come_in_order_of_ids() -> None:
    logits = torch.tensor([[0.0, 5.0, 0.0, 5.0, 5.0]])
    sampler = Sampler(5, 1, CPU)
    sampler.join(join(0, SamplingParams(temperature=0, logprobs=3), prompt=(0,)))
    entry = sampler.draw(logits, [0]).read()[1][0]
    assert (entry.token_id, entry.rank) == (1, 1)
    assert [token for token, _ in entry.top] == [1, 3, 4]


def test_more_logprobs_than_tokens_reports_what_there_is() -> None:
    sampler = Sampler(5, 1, CPU)
    sampler.join(join(0, SamplingParams(temperature=0, logprobs=20), prompt=(0,)))
    assert len(sampler.draw(logits_of(0, 1, 5), [0]).read()[1][0].top) == 5


def test_prompt_logprobs_are_the_same_in_slices() -> None:
    sampler = Sampler(500, 1, CPU)
    logits, following = logits_of(4, 9, 500), [3, 499, 0, 17, 3, 3, 250, 1, 2]
    whole = sampler.prompt_logprobs(logits, following, 3)
    assert whole == [
        entry
        for first, last in ((0, 1), (1, 6), (6, 9))
        for entry in sampler.prompt_logprobs(logits[first:last], following[first:last], 3)
    ]
    expected = logits.double().log_softmax(-1)
    for row, (entry, token) in enumerate(zip(whole, following, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert len(entry.top) == 3


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=1, top_p=0.9, top_k=50)])
@pytest.mark.parametrize("fault", [[math.nan], [math.inf], [math.inf, -math.inf], [math.nan, math.inf]])
def test_logits_that_are_not_finite_name_the_slot_which_can_be_joined_again(
    sampling: SamplingParams, fault: list[float]
) -> None:
    good = logits_of(0, 2, 200)
    bad = good.clone()
    bad[1, 3 : 3 + len(fault)] = torch.tensor(fault)
    untouched, failing = Sampler(200, 9, CPU), Sampler(200, 9, CPU)
    for sampler in (untouched, failing):
        sampler.join(join(4, SamplingParams(seed=8)))
        sampler.join(join(6, sampling))
    with pytest.raises(StepFailed, match=r"not finite.*\[6\]"):
        failing.draw(bad, [4, 6]).read()
    for slot, again in ((4, SamplingParams(seed=8)), (6, sampling)):
        failing.join(join(slot, again))
    assert failing.draw(good, [4, 6]).read() == untouched.draw(good, [4, 6]).read()


def test_a_row_that_the_model_masks_whole_is_refused_and_one_left_open_is_taken() -> None:
    logits = torch.full((1, 50), -math.inf)
    sampler = Sampler(50, 1, CPU)
    sampler.join(join(0, SamplingParams(seed=1, top_p=0.5)))
    with pytest.raises(StepFailed, match="not finite"):
        sampler.draw(logits, [0]).read()
    logits[0, 21] = -4.0
    assert sampler.draw(logits, [0]).read()[0] == [21]


def test_a_slot_that_nobody_joined_is_named() -> None:
    with pytest.raises(StepFailed, match="slot 2"):
        Sampler(10, 3, CPU).draw(torch.zeros(1, 10), [2]).read()

"""The sampler against a slow reference in plain Python, and rows against the same rows in other batches."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from anaphora.errors import StepFailed
from anaphora.model.sampler import Sampler
from anaphora.types.sampling import SamplingParams
from tests.support.sampler import CPU, join, logits_of, reference_sample, sample_one


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
        token, margin = reference_sample(logits[slot].tolist(), sampling, generated)
        assume(margin > 1e-4)
        expected.append(token)
        sampler.join(join(slot, sampling, generated=generated))
    assert sampler.sample(logits, list(range(len(cases)))).read()[0] == expected


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
    assert set(sampler.sample(logits, list(range(400))).read()[0]) == kept


def test_a_nucleus_wider_than_the_first_guess_is_found_whole() -> None:
    vocab, rows = 6000, 800
    flat = logits_of(1, 1, vocab, scale=0.1)
    sampler = Sampler(vocab, rows, CPU)
    for slot in range(rows):
        sampler.join(join(slot, SamplingParams(top_p=0.5, seed=slot)))
    drawn = torch.tensor(sampler.sample(flat.expand(rows, -1), list(range(rows))).read()[0])
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
        assert set(sampler.sample(logits, list(range(200))).read()[0]) == {0, 1, 2, 3}


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 300)
    logits[1, 5:] = 1.0
    sampler = Sampler(300, 2, CPU)
    for slot in range(2):
        sampler.join(join(slot, SamplingParams(temperature=0)))
    assert sampler.sample(logits, [0, 1]).read()[0] == [0, 5]


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
        assert sampler.sample(logits, [0]).read()[0] == [expected]
        generated = (*generated, expected)
    assert len(set(generated)) > 3


def test_min_tokens_bans_end_and_stop_tokens_until_enough_are_generated() -> None:
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(5,))
    logits = torch.zeros(1, 10)
    logits[0, 7], logits[0, 5], logits[0, 9] = 9.0, 8.0, 1.0
    sampler = Sampler(10, 1, CPU)
    sampler.join(join(0, sampling))
    assert [sampler.sample(logits, [0]).read()[0][0] for _ in range(3)] == [9, 9, 7]
    assert sample_one(sampling, logits[0], generated=(9,)) == 9
    assert sample_one(sampling, logits[0], generated=(9, 9)) == 7


def test_where_only_end_tokens_are_allowed_min_tokens_gives_way() -> None:
    sampling = SamplingParams(temperature=0, min_tokens=5, allowed_token_ids=(7,))
    assert sample_one(sampling, torch.zeros(10)) == 7


def test_ids_beyond_the_logits_do_no_harm_among_the_end_tokens() -> None:
    sampler = Sampler(6, 1, CPU)  # EOS is 7
    sampler.join(join(0, SamplingParams(temperature=0, min_tokens=1)))
    assert sampler.sample(torch.arange(6.0)[None], [0]).read()[0] == [5]


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
        results = [sampler.sample(rows[step : step + 1], [0]).read() for step in range(steps)]
        alone.append([(tokens[0], logprobs.get(0)) for tokens, logprobs in results])

    sampler = Sampler(vocab, 32, CPU)
    slots = [3 * i + 1 for i in range(len(MIXED))]
    together: list[list] = [[] for _ in MIXED]
    for step in range(steps):
        for i, sampling in enumerate(MIXED):
            if step == 0 or (step + i) % 3 == 0:  # joined, or preempted and joined again in another slot
                slots[i] = 31 - slots[i] if step and 31 - slots[i] not in slots else slots[i]
                sampler.join(join(slots[i], sampling, generated=tuple(token for token, _ in together[i])))
        order = sorted(range(len(MIXED)), key=lambda i: (i * 7 + step) % 5)
        order = [i for i in order if len(together[i]) == step]
        batch = torch.stack([logits[i][step] for i in order])
        tokens, logprobs = sampler.sample(batch, [slots[i] for i in order]).read()
        for i, token in zip(order, tokens, strict=True):
            together[i].append((token, logprobs.get(slots[i])))
    assert together == alone


def test_equal_seeds_differ_by_choice_and_position_and_nothing_else() -> None:
    logits = logits_of(0, 1, 1000, scale=0.2)[0]
    base = sample_one(SamplingParams(seed=10), logits)
    assert sample_one(SamplingParams(seed=10), logits) == base
    assert sample_one(SamplingParams(seed=9), logits, choice=1) == base
    others = {sample_one(SamplingParams(seed=10), logits, choice=c) for c in range(1, 9)}
    others |= {sample_one(SamplingParams(seed=10), logits, generated=(4,) * g) for g in range(1, 9)}
    assert len(others) > 12


def test_unseeded_sequences_differ_from_each_other_and_repeat_with_the_seed_of_the_configuration() -> None:
    logits = logits_of(0, 1, 1000, scale=0.2)

    def tokens(seed: int) -> list[int]:
        sampler = Sampler(1000, 8, CPU, seed=seed)
        for slot in range(8):
            sampler.join(join(slot, SamplingParams()))
        return sampler.sample(logits.expand(8, -1), list(range(8))).read()[0]

    assert tokens(0) == tokens(0) != tokens(1)
    assert len(set(tokens(0))) > 5


def test_the_logits_are_left_as_they_are() -> None:
    logits = logits_of(0, len(MIXED), 1003)
    before = logits.clone()
    sampler = Sampler(1003, len(MIXED), CPU)
    for slot, sampling in enumerate(MIXED):
        sampler.join(join(slot, sampling))
    sampler.sample(logits, list(range(len(MIXED)))).read()
    assert torch.equal(logits, before)


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
        failing.sample(bad, [4, 6]).read()
    for slot, again in ((4, SamplingParams(seed=8)), (6, sampling)):
        failing.join(join(slot, again))
    assert failing.sample(good, [4, 6]).read() == untouched.sample(good, [4, 6]).read()


def test_a_row_that_the_model_masks_whole_is_refused_and_one_left_open_is_taken() -> None:
    logits = torch.full((1, 50), -math.inf)
    sampler = Sampler(50, 1, CPU)
    sampler.join(join(0, SamplingParams(seed=1, top_p=0.5)))
    with pytest.raises(StepFailed, match="not finite"):
        sampler.sample(logits, [0]).read()
    logits[0, 21] = -4.0
    assert sampler.sample(logits, [0]).read()[0] == [21]


def test_a_slot_that_nobody_joined_is_named() -> None:
    with pytest.raises(StepFailed, match="slot 2"):
        Sampler(10, 3, CPU).sample(torch.zeros(1, 10), [2]).read()

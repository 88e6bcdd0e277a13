"""Log-probabilities of sampled and of prompt tokens."""

from __future__ import annotations

import pytest
import torch

from anaphora.model.sampler import Sampler
from anaphora.types.sampling import SamplingParams
from tests.support.sampler import CPU, join, logits_of


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampling = SamplingParams(
        temperature=0, logprobs=4, logit_bias={11: 50}, repetition_penalty=2.0, allowed_token_ids=(11, 12)
    )
    logits = logits_of(3, 1, 100)
    sampler = Sampler(100, 3, CPU)
    sampler.join(join(2, sampling))
    tokens, logprobs = sampler.sample(logits, [2]).read()
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
    entry = sampler.sample(logits, [0]).read()[1][0]
    assert (entry.token_id, entry.rank) == (1, 1)
    assert [token for token, _ in entry.top] == [1, 3, 4]


def test_more_logprobs_than_tokens_reports_what_there_is() -> None:
    sampler = Sampler(5, 1, CPU)
    sampler.join(join(0, SamplingParams(temperature=0, logprobs=20), prompt=(0,)))
    assert len(sampler.sample(logits_of(0, 1, 5), [0]).read()[1][0].top) == 5


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

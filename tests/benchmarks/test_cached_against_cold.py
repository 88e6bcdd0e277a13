"""A few requests of the airline log, cached against cold, by the script that publishes the figures of sixty."""

from __future__ import annotations

from pathlib import Path

import pytest

from anaphora.checkpoint.resolve import resolve
from anaphora.errors import ModelError
from benchmarks.cached_against_cold import compare

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def embedded() -> None:
    try:
        resolve(None)
    except ModelError as error:
        pytest.skip(f"the embedded model is not there: {error}")


def test_float32_logits_of_the_first_token_agree(shared_data: Path) -> None:
    found = compare(shared_data / "tau-bench", 2, "float32", 1, cut=700)
    assert found["prompts_with_hits"] == 1
    assert found["cached_tokens_mean"] > 300
    assert found["first_token_gap_max"] <= 1e-3


def test_bfloat16_answers_differ_only_where_the_choice_was_that_close(shared_data: Path) -> None:
    found = compare(shared_data / "tau-bench", 2, "bfloat16", 8, cut=700)
    assert found["prompts_with_hits"] == 1
    assert found["unexplained"] == 0, found["flips"]

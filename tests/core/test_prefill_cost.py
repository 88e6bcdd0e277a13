"""Prefill cost by context, and the price of reused tokens."""

from __future__ import annotations

import pytest

from anaphora.core.prefill_cost import BUCKET, PrefillCost


def test_the_price_is_zero_before_anything_was_measured() -> None:
    assert PrefillCost().price(0, 100) == 0.0


def test_tokens_are_priced_by_their_context() -> None:
    cost = PrefillCost()
    assert cost.observe(1.0, [(0, BUCKET)], decodes=0) == 1.0
    cost.observe(3.0, [(BUCKET, BUCKET)], decodes=0)
    assert cost.price(0, BUCKET // 2) == pytest.approx(0.5)
    assert cost.price(0, 2 * BUCKET) == pytest.approx(4.0)
    assert cost.price(2 * BUCKET, 3 * BUCKET) == pytest.approx(3.0)  # the nearest that was measured


def test_decode_rows_do_not_count_as_prefill() -> None:
    cost = PrefillCost()
    for _ in range(5):
        assert cost.observe(0.25, [], decodes=4) == 0.0
    assert cost.observe(1.0, [(0, 100)], decodes=4) == pytest.approx(0.75)
    assert cost.price(0, 100) == pytest.approx(0.75)
    assert cost.observe(0.1, [(0, 10)], decodes=4) == 0.0


def test_a_chunk_over_several_contexts_is_spread_over_them() -> None:
    cost = PrefillCost()
    cost.observe(2.0, [(BUCKET // 2, BUCKET)], decodes=0)
    assert cost.price(0, 2 * BUCKET) == pytest.approx(4.0)

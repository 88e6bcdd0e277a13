"""The percentile that all tools use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.tools.shared.percentiles import percentile


def interpolated(values: list[float], percent: int) -> float:
    """Linear interpolation at position percent / 100 * (n - 1) of the sorted values."""
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    low = min(int(position), len(ordered) - 2)
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (position - low)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50), st.integers(1, 99))
def test_percentiles_interpolate_between_the_two_nearest_values(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(interpolated(values, percent), rel=1e-9, abs=1e-6)


def test_one_value_and_none() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    assert percentile([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], 50) == 3.5

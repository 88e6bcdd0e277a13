"""The one definition of a percentile for everything that the tools print."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Returns the ``percent``-th percentile (1 to 99) of ``values``; None if there are none.

    The method is ``statistics.quantiles(method="inclusive")``: linear interpolation between the two nearest values,
    the smallest being percentile 0 and the largest percentile 100 (NumPy's default, R's type 7). No percentile lies
    outside the values, so a p99 of few requests is close to the largest of them.
    """
    if len(values) < 2:  # quantiles() raises for one value before Python 3.13
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]

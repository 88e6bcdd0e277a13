"""The stored measurements of a card, interpolated between the measured points."""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError

PATH = Path(__file__).parent / "calibration.json"
"""Written only by ``benchmarks/h200.py --publish``."""

Point = tuple[float, float]


def read(path: Path = PATH) -> dict[str, Any]:
    """Returns the published file. Raises ConfigError if there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"there is no calibration to compute with ({error}); benchmarks/h200.py makes one on a GPU, "
            "and its --publish puts it there"
        ) from error
    return found


@dataclass(frozen=True)
class Calibration:
    """Measurements of one card and model.

    ``prefill`` maps (computed tokens, cached tokens before them) to seconds per computed token. ``decode`` maps (batch,
    shared, own) to seconds per step of ``batch`` sequences with ``own`` tokens each after ``shared`` common tokens.
    """

    block_size: int
    blocks: int
    max_num_seqs: int
    window: int
    prefill: dict[tuple[int, int], float]
    decode: dict[tuple[int, int, int], float]

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Calibration:
        """Builds it from the ``calibration`` of one card in a stored result."""
        return cls(
            stored["block_size"],
            stored["blocks"],
            stored["max_num_seqs"],
            stored["model"]["max_position_embeddings"],
            {(length, cached): 1 / rate for length, cached, rate in stored["prefill"]},
            {(batch, shared, own): ms / 1000 for batch, shared, own, ms in stored["decode"]},
        )

    @property
    def batches(self) -> list[int]:
        """Batch sizes that were measured."""
        return sorted({batch for batch, _, _ in self.decode})

    def reaches(self, length: int, cached: int, own: int) -> bool:
        """Returns whether these prompts (in tokens) and steps with ``own`` tokens lie within the measured points."""
        lengths, starts = (max(values) for values in zip(*self.prefill, strict=True))
        return length <= lengths and cached <= starts and own <= max(own for _, _, own in self.decode)

    def prefill_s(self, length: int, cached: int) -> float:
        """Returns the GPU seconds to compute ``length`` tokens after ``cached`` ones."""
        points = []
        for start in sorted({cached for _, cached in self.prefill}):
            of_length = sorted((n, each) for (n, c), each in self.prefill.items() if c == start)
            points.append((float(start), between([(float(n), each) for n, each in of_length], length)))
        return length * between(points, cached)

    def step_s(self, batch: int, shared: int, own: int) -> float:
        """Returns the seconds of a decode step, in which shared tokens are read once for all sequences."""
        return self._own_s(batch, own) + self._shared_s(batch, shared)

    def _own_s(self, batch: int, own: int) -> float:
        levels = sorted({own for _, shared, own in self.decode if not shared})
        found, before = between(self._steps(levels[0]), batch), levels[0]
        rate = 0.0
        for below, above in pairwise(levels):
            rate = self._token_s(batch, below, above)
            if own <= above:
                break
            found, before = found + batch * (above - below) * rate, above
        return found + batch * (own - before) * rate

    def _steps(self, own: int) -> list[Point]:
        return sorted((float(b), s) for (b, shared, o), s in self.decode.items() if not shared and o == own)

    def _token_s(self, batch: int, below: int, above: int) -> float:
        """Returns the seconds that each further token of a sequence adds to a step, between two measured lengths."""
        low, high = dict(self._steps(below)), dict(self._steps(above))
        points = [(b, max(high[b] - between(list(low.items()), b), 0) / (b * (above - below))) for b in sorted(high)]
        return between(points, min(max(batch, points[0][0]), points[-1][0]))

    def _shared_s(self, batch: int, shared: int) -> float:
        """Returns the seconds that shared tokens add to a step; for a single sequence they count as its own."""
        own = min(own for _, shared, own in self.decode if shared) if self._shared_levels else 0
        points = [(0.0, 0.0)]
        for level in self._shared_levels:
            cells = sorted((b, s) for (b, shared, _), s in self.decode.items() if shared == level)
            extra = [(1.0, self._own_s(1, own + level) - self._own_s(1, own))]
            extra += [(float(b), max(s - self._own_s(b, own), 0.0)) for b, s in cells if b > 1]
            points.append((float(level), between(extra, batch)))
        return between(points, shared)

    @property
    def _shared_levels(self) -> list[int]:
        return sorted({shared for _, shared, _ in self.decode if shared})


def between(points: Sequence[Point], at: float) -> float:
    """Interpolates linearly between points with ascending x.

    Below the first point the value is the first; above the last the last line continues, but never falls below it.
    """
    xs = [x for x, _ in points]
    if len(points) == 1 or at <= xs[0]:
        return points[0][1]
    right = min(bisect.bisect_left(xs, at), len(points) - 1)
    (x, y), (x2, y2) = points[right - 1], points[right]
    found = y + (y2 - y) * (at - x) / (x2 - x)
    return max(found, y2) if at > x2 else found

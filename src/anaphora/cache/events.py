"""What the cache says of a lookup: why it found no more."""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Why a lookup did not find more. HIT: all that there was to find, and the prompt goes on from there."""

    HIT = "hit"
    SHORT = "short"
    COLD = "cold"
    DIVERGED = "diverged"
    EVICTED = "evicted"
    IN_FLIGHT = "in_flight"
    BYPASSED = "bypassed"

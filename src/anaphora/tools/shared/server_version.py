"""Reads the version that a server or its container image states."""

from __future__ import annotations

import re


def version_of(text: str | None) -> tuple[int, int, int] | None:
    """Parses a released version, such as ``v0.8.5``, into numbers.

    Returns None for text that is not a version and for builds from a branch (0.1.dev20051), whose age is unknown.
    """
    match = re.match(r"v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?(.*)", text or "")
    if not match or ("dev" in match[4] and (int(match[1]), int(match[2])) < (0, 2)):
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)

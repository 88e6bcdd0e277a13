"""Renders the diagnosis as an HTML page: one file that works offline."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

from anaphora.cache.hashing import TOKEN_BYTES
from anaphora.tools.doctor.price.diagnose import Diagnosis

MAX_SHOWN_TOKENS = 4000


def render_page(diagnosis: Diagnosis, data: dict[str, Any]) -> str:
    """Returns the page; ``data`` are the values of ``diagnosis_json.as_json``."""
    template = (resources.files(__package__) / "diagnosis_page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(template).render(data=data, heat=_heat(diagnosis))


def _heat(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Returns the pieces of the prompt of median length, each with the share of requests that computed its position.

    Only requests that are long enough to have the position count.
    """
    before, log = diagnosis.before, diagnosis.log
    median = sorted(range(len(log.prompts)), key=lambda n: before.tokens[n])[len(log.prompts) // 2]
    cached, lengths = sorted(before.cached), sorted(before.tokens)
    shown: list[dict[str, Any]] = []
    position = num_not_cached = num_shorter = 0
    for piece in log.prompts[median].pieces:
        while num_not_cached < len(cached) and cached[num_not_cached] <= position:
            num_not_cached += 1
        while num_shorter < len(lengths) and lengths[num_shorter] <= position:
            num_shorter += 1
        long_enough = len(cached) - num_shorter
        share = min(1.0, max(0, num_not_cached - num_shorter) / long_enough) if long_enough else 0.0
        shown.append({"text": log.store.piece_texts[piece], "share": share, "token": position})
        position += len(log.store.piece_tokens[piece]) // TOKEN_BYTES
        if position > MAX_SHOWN_TOKENS:
            break
    return shown

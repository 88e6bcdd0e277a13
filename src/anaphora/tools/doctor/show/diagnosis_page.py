"""The diagnosis as a page: one file that works offline."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

from anaphora.cache.hashing import TOKEN_BYTES
from anaphora.tools.doctor.price.diagnose import Diagnosis

SHOWN_TOKENS = 4000


def render_page(diagnosis: Diagnosis, data: dict[str, Any]) -> str:
    template = (resources.files(__package__) / "diagnosis_page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(template).render(data=data, heat=_heat(diagnosis))


def _heat(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """The prompt of median length in pieces, each with the share of requests that computed its place anew."""
    before, log = diagnosis.before, diagnosis.log
    number = sorted(range(len(log.prompts)), key=lambda n: before.tokens[n])[len(log.prompts) // 2]
    ends = sorted(before.cached)
    longest = sorted(before.tokens)
    shown: list[dict[str, Any]] = []
    place = behind = short = 0
    for piece in log.prompts[number].pieces:
        while behind < len(ends) and ends[behind] <= place:
            behind += 1
        while short < len(longest) and longest[short] <= place:
            short += 1
        reached = len(ends) - short
        share = min(1.0, max(0, behind - short) / reached) if reached else 0.0
        shown.append({"text": log.store.piece_texts[piece], "share": share, "token": place})
        place += len(log.store.piece_tokens[piece]) // TOKEN_BYTES
        if place > SHOWN_TOKENS:
            break
    return shown

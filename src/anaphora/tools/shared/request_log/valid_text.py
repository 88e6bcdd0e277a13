"""Replaces lone surrogates, which Python's literals and ``json.loads`` let through and no tokenizer or file takes."""

from __future__ import annotations

import json
import re
from typing import Any

_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def valid_text(text: str) -> str:
    """Returns ``text`` with the two halves of a surrogate pair joined and lone surrogates replaced by U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def loads(text: str) -> Any:
    """Decodes JSON inside a string of a log; all its strings are valid Unicode. Raises ValueError as ``json.loads``."""
    value = json.loads(text)
    return json.loads(valid_text(json.dumps(value, ensure_ascii=False))) if _ESCAPE.search(text) else value

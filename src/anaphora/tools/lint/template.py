"""Loads the chat template to check, and turns the result of the checks into plain values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from anaphora.advice.template_checks import TemplateCheck
from anaphora.errors import ConfigError
from anaphora.text.chat_template import ChatTemplate, read_template
from anaphora.text.tokenizer import Tokenizer

_SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def load_template(name: str) -> ChatTemplate:
    """Loads a template from a file, a model folder, or its own text. Raises ConfigError or ModelError."""
    path = Path(name)
    if "\n" in name or not path.is_dir():
        return read_template(name, _SPECIAL_TOKENS, "the chat template")
    template = Tokenizer.load(path).chat_template
    if template is None:
        raise ConfigError(f"{name} has no chat template")
    return template


def as_json(checks: list[TemplateCheck]) -> Iterator[dict[str, str | bool]]:
    """Yields one object a check, as ``--json`` writes them."""
    for check in checks:
        yield {
            "check": check.name,
            "ok": not (check.problem and check.breaks),
            "problem": check.problem,
            "mend": check.mend if check.problem else "",
            "before": check.before,
            "after": check.after,
        }

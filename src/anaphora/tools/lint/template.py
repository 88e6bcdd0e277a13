"""``anaphora doctor --template``: which template is meant, and what was found as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from anaphora.advice.template_checks import Check
from anaphora.errors import ConfigError
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.tokenizer import Tokenizer

_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


def load_template(name: str) -> ChatTemplate:
    """From a file with a template, or a model folder. Raises ConfigError or ModelError."""
    path = Path(name)
    if path.is_dir():
        template = Tokenizer.load(path).chat_template
        if template is None:
            raise ConfigError(f"--template: {name} has no chat template")
        return template
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), _SPECIALS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--template cannot read {name}: {error}") from None


def as_json(checks: list[Check]) -> Iterator[dict[str, str | bool]]:
    for check in checks:
        yield {
            "check": check.name,
            "ok": not (check.problem and check.breaks),
            "problem": check.problem,
            "mend": check.mend if check.problem else "",
            "before": check.before,
            "after": check.after,
        }

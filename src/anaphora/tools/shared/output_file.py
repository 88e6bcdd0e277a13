"""Writes the files that a command is asked for, such as ``--json`` and ``--html``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from anaphora.errors import ConfigError


def refuse_standard_output(options: object, *names: str) -> None:
    """Raises ConfigError if one of the named options is ``-``: standard output has the report."""
    for name in names:
        if getattr(options, name) == "-":
            raise ConfigError(f"--{name} needs the name of a file: standard output has the report")


def write_text(path: str, text: str) -> None:
    """Writes ``text`` as UTF-8 and creates missing folders. Raises ConfigError if the file cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: str, data: Any) -> None:
    """Writes ``data`` as indented JSON. Raises ConfigError if the file cannot be written."""
    write_text(path, msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n")

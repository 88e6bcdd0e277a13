"""Decides whether the argument of ``anaphora lint`` is a chat template or a command line."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

from anaphora.errors import ConfigError
from anaphora.tools.lint.command_line import names_server

_FLAG = re.compile(r"--?[A-Za-z]")


class Target(Enum):
    """The two things that can be checked."""

    TEMPLATE = "template"
    COMMAND_LINE = "command line"


def kind_of_target(target: str) -> Target:
    """Returns what ``target`` is. Raises ConfigError if it is neither.

    An existing file or folder is a template. A text that starts with Jinja, or contains Jinja and names no server, is
    a template too. A text that names a server, or consists of flags, is a command line.
    """
    text = target.strip()
    has_jinja = "{{" in text or "{%" in text
    if _exists(target) or text.startswith(("{{", "{%", "{#")):
        return Target.TEMPLATE
    if names_server(text):
        return Target.COMMAND_LINE
    if has_jinja and not _FLAG.match(text):
        return Target.TEMPLATE
    words = text.split()
    if any(_FLAG.match(word) for word in words):
        return Target.COMMAND_LINE
    raise ConfigError(
        f"{target!r:.200} is neither a chat template nor a server's command line: name a file, a model folder on this "
        'machine, or a command line in quotes such as "vllm serve MODEL --block-size 16"'
    )


def _exists(target: str) -> bool:
    try:
        return bool(target) and Path(target).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long for a name, a null byte, no home folder
        return False

"""Parses a server's command line as it was typed: which server, which model, which flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from anaphora.advice import vllm_flags
from anaphora.errors import ConfigError

T = TypeVar("T")

_ENTRY_POINTS = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "sglang.launch_server": "sglang",
    "llama-server": "llama.cpp",
}
_IMAGE = re.compile(r"(?:.*/)?(vllm/vllm-openai|lmsysorg/sglang|ggml-org/llama\.cpp)(?::([^@/]+))?(?:@.+)?")
_IMAGES = {"vllm/vllm-openai": "vllm", "lmsysorg/sglang": "sglang", "ggml-org/llama.cpp": "llama.cpp"}
CACHE_OFF_FLAGS = {"sglang": "--disable-radix-cache", "llama.cpp": "--no-cache-prompt"}
"""Servers whose flags are not listed here, each with the flag that turns its prefix cache off."""
_CONTINUATION = re.compile(r"\\\r?\n")
_SHELL_OPERATORS = frozenset({";", "&&", "||", "|", ">", ">>", "2>&1", "&"})


@dataclass(slots=True)
class CommandLine:
    """A parsed command line. ``flags`` maps long names to values; a switch is True or False.

    ``unknown`` has a message for each flag that no server has. ``version`` is the tag of the container image.
    """

    engine: str
    version: str | None = None
    model: str | None = None
    flags: dict[str, str | bool] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def number(self, flag: str, parse: Callable[[str], T]) -> T | None:
        """Returns the parsed value of a flag, None if it is not set. Raises ConfigError that names the flag."""
        given = self.flags.get(flag)
        if given is None:
            return None
        if isinstance(given, bool):
            raise ConfigError(f"the command line's {flag} has no value")
        try:
            return parse(given)
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"the command line's {flag} {given} is not valid: {error}") from None

    def text(self, flag: str) -> str | None:
        """Returns the value of a flag as it was typed; None if it is not set or stands alone."""
        given = self.flags.get(flag)
        return given if isinstance(given, str) else None

    def is_on(self, flag: str, default: bool) -> bool:
        """Whether a switch is on; ``default`` if it is not set."""
        given = self.flags.get(flag, default)
        return given if isinstance(given, bool) else given.lower() not in ("false", "0", "no")


def parse_command_line(command: str) -> CommandLine:
    """Parses a command line of vLLM, Anaphora, SGLang or llama.cpp, or flags alone (read as vLLM's).

    Skips what stands before the server's own arguments: variables, ``docker run``, ``python -m``. The flags of SGLang
    and llama.cpp are kept as typed. Raises ConfigError if the quoting is not valid.
    """
    try:
        words = _split(command)
    except ValueError as error:
        raise ConfigError(f"the command line cannot be parsed: {error} in {command!r:.200}") from None
    begin, engine, version = _find_server(words) or (0, _server_of_flags(words), None)
    end = next((at for at in range(begin, len(words)) if words[at] in _SHELL_OPERATORS), len(words))
    words = words[begin:end]
    if engine in CACHE_OFF_FLAGS:
        return _parse_unlisted(words, engine)
    parsed = CommandLine(engine, version)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            continue  # ends the options for argparse; only the model can follow
        if not word.startswith("-"):
            parsed.model = parsed.model or word
            continue
        name, equals, value = vllm_flags.normalize(word).partition("=")
        if not vllm_flags.is_known(name):
            parsed.unknown.append(vllm_flags.explain(name, vllm_flags.known()))
        if equals:
            parsed.flags[name] = value
        elif vllm_flags.is_switch(name):
            parsed.flags[name.replace("--no-", "--", 1)] = not name.startswith("--no-")
        elif at < len(words) and not words[at].startswith("-"):
            parsed.flags[name] = words[at]
            at += 1
            while vllm_flags.takes_several(name) and at < len(words) and not words[at].startswith("-"):
                parsed.flags[name] = f"{parsed.flags[name]} {words[at]}"
                at += 1
        else:
            parsed.flags[name] = True
    parsed.model = parsed.model or parsed.text("--model")
    return parsed


def _parse_unlisted(words: list[str], engine: str) -> CommandLine:
    """Parses flags that are not listed here: the word after a flag is its value unless it is a flag too."""
    parsed = CommandLine(engine)
    for word, behind in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            parsed.flags[name] = value if equals else True if behind.startswith("-") else behind
    parsed.model = parsed.text("-m") or parsed.text("--model") or parsed.text("--model-path")
    return parsed


def names_server(text: str) -> bool:
    """Whether a text contains the command, module or image of a server that is known here."""
    try:
        words = _split(text)
    except ValueError:  # an open quote
        words = text.split()
    return _find_server(words) is not None


def _split(command: str) -> list[str]:
    return shlex.split(_CONTINUATION.sub(" ", command), comments=True)


def _find_server(words: list[str]) -> tuple[int, str, str | None] | None:
    """Returns the index of the server's first argument, the server's name, and the tag of its image."""
    image: tuple[int, str, str | None] | None = None
    for at, word in enumerate(words):
        name = Path(word).name
        if word == "serve" and at and Path(words[at - 1]).name in ("vllm", "anaphora", "sglang"):
            return at + 1, Path(words[at - 1]).name, image[2] if image else None
        if name in _ENTRY_POINTS:
            return at + 1, _ENTRY_POINTS[name], image[2] if image else None
        if not image and (match := _IMAGE.fullmatch(word)):
            image = at + 1, _IMAGES[match[1]], match[2]
    if image:
        return image
    return (1, words[0], None) if words and words[0] in ("anaphora", "vllm") else None


def _server_of_flags(words: list[str]) -> str:
    """Guesses the server from flags alone."""
    if not words or not words[0].startswith("-"):
        return "vllm"
    others = (engine for engine, flag in CACHE_OFF_FLAGS.items() if flag in words)
    return next(others, "llama.cpp" if "-m" in words else "vllm")

"""The beginnings of prompts and bodies side by side: what is constant, what changes."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from anaphora.cache.hashing import TOKEN_BYTES
from anaphora.cache.index import common_tokens
from anaphora.errors import ConfigError
from anaphora.tools.doctor import diagnose, terminal
from anaphora.tools.doctor.load import Log, Model, from_bodies
from anaphora.tools.doctor.options import DoctorOptions
from anaphora.tools.doctor.patterns import common_prefix, matching
from anaphora.tools.doctor.prompts import Prompt
from anaphora.tools.doctor.report import as_json

LENGTH = 200
MOST = 20


def show(log: Log, console: Console) -> None:
    """The first characters of the first prompts, the constant part dimmed, the changing part marked."""
    heads: dict[str, int] = {}
    for prompt in log.prompts:
        head = _text(log, prompt)[:LENGTH]
        if head not in heads and len(heads) < MOST:
            heads[head] = prompt.line
    model = next(iter(heads))
    others = list(heads)[1:] or [model]
    for head, line in heads.items():
        against = model if head != model else others[0]
        text = Text(f"{line:>7}  ")
        done = 0
        for _, at, length in matching(against, head):
            text.append(_flat(head[done:at]), style="bold red")
            text.append(_flat(head[at : at + length]), style="dim")
            done = at + length
        text.append(_flat(head[done:]), style="bold red")
        console.print(text)


def _flat(text: str) -> str:
    return text.replace("\n", "⏎")


def _text(log: Log, prompt: Prompt) -> str:
    return "".join(map(log.store.piece_texts.__getitem__, prompt.pieces))


def explain(first: str, second: str, model: Model, console: Console) -> dict[str, Any]:
    """Where and why the second body's prompt stops reusing the first's; prints it and returns the figures."""
    log = from_bodies([_read(first), _read(second)], model)
    if len(log.prompts) != 2:
        why = f": {log.bad[0][1]}" if log.bad else ""
        raise ConfigError(f"{first} and {second} must hold one request each{why}")
    packed = [log.store.packed(prompt.pieces) for prompt in log.prompts]
    shared = common_tokens(*packed)
    texts = [_text(log, prompt) for prompt in log.prompts]
    at = common_prefix(*texts)
    message, role, character = place(log, log.prompts[1], at)
    lengths = [len(tokens) // TOKEN_BYTES for tokens in packed]
    console.print(
        f"{second} reuses {shared:,} of its {lengths[1]:,} tokens from {first} ({lengths[0]:,} tokens)", highlight=False
    )
    if at < min(map(len, texts)):
        console.print(f"They part in message {message} ({role}), character {character}:", highlight=False)
        for name, text in zip((first, second), texts, strict=True):
            shown = Text(f"  {name}: ")
            shown.append(_flat(text[max(0, at - 60) : at]), style="dim")
            shown.append(_flat(text[at : at + 60]), style="bold red")
            console.print(shown)
    else:
        console.print("Neither differs from the other up to the end of the shorter one.")
    data = as_json(diagnose.diagnose(log), DoctorOptions(log=first), {})
    for number, item in enumerate((b for b in data["breaks"] if b["line"] == 2), 1):
        terminal.show_break(number, item, data, console)
    return data | {"shared_tokens": shared, "message": message, "role": role, "character": character}


def place(log: Log, prompt: Prompt, at: int) -> tuple[int, str, int]:
    """(message, role, character in its text) of a place in the rendered prompt; the template's own text has role ""."""
    done = 0
    for owner, text in prompt.runs:
        length = len(log.store.text(text))
        if at < done + length:
            if owner < 0:
                return -1, "the template's own text", at - done
            segment = prompt.segments[owner]
            return segment.message, segment.role, segment.offset + at - done
        done += length
    return len(prompt.roles) - 1, "the end", 0


def _read(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None

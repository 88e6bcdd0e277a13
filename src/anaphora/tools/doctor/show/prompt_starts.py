"""The beginnings of prompts and bodies side by side: what is constant, what changes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from anaphora.cache.hashing import TOKEN_BYTES
from anaphora.cache.index import common_tokens
from anaphora.errors import ConfigError
from anaphora.text import outline
from anaphora.tools.doctor.find.patterns import common_prefix, matching
from anaphora.tools.doctor.options import DoctorOptions
from anaphora.tools.doctor.price import diagnose
from anaphora.tools.doctor.read.load_log import Log, log_from_bodies
from anaphora.tools.doctor.read.prompts import Prompt
from anaphora.tools.doctor.show import diagnosis_terminal
from anaphora.tools.doctor.show.diagnosis_json import as_json
from anaphora.tools.doctor.show.diagnosis_terminal import marked
from anaphora.tools.shared.tokenizer_and_template import TokenizerAndTemplate

LENGTH = 200
MOST = 20


def show(log: Log, console: Console) -> None:
    """The first characters of the first different prompts, the constant part dimmed, the changing part marked."""
    lines: dict[str, list[int]] = {}
    for prompt in log.prompts:
        lines.setdefault(_head(log, prompt), []).append(prompt.line)
    heads = list(lines)
    same = functools.reduce(lambda begin, head: begin[: common_prefix(begin, head)], heads)
    if len(heads) == 1:
        told = f"{len(log.prompts):,} prompts, all with the same first {len(same):,} characters"
    else:
        told = f"{len(log.prompts):,} prompts with {len(heads):,} different first {LENGTH} characters"
        told += f"; all begin with the same {len(same):,}"
    console.print(told, highlight=False)
    for head in heads[:MOST]:
        others = [other for other in heads[:MOST] if other != head]
        closest = max(others, key=lambda other: sum(length for _, _, length in matching(other, head)), default=head)
        times = f"×{len(lines[head]):,}" if len(lines[head]) > 1 else ""
        console.print(Text(f"line {lines[head][0]:>6} {times:>6}  ") + marked(compared(head, closest), console))
    if len(heads) > MOST:
        console.print(f"and {len(heads) - MOST:,} more", highlight=False)


def compared(text: str, other: str) -> Iterator[tuple[str, bool]]:
    """``text`` in pieces, each with whether it changes against ``other``. Words and ids are marked as a whole."""
    edges, last = [], 0
    for _, at, length in matching(other, text):
        edges.append((last, at))
        last = at + length
    done = 0
    for start, end in [*edges, (last, len(text))] if text != other else []:
        while start > 0 and text[start - 1].isalnum() and end > start:
            start -= 1
        while end < len(text) and text[end].isalnum() and end > start:
            end += 1
        if end > max(start, done):
            yield text[done : max(start, done)], False
            yield text[max(start, done) : end], True
            done = end
    yield text[done:], False


def _head(log: Log, prompt: Prompt) -> str:
    """The first LENGTH characters; no more of a long prompt is put together."""
    parts, length = [], 0
    for piece in prompt.pieces:
        parts.append(log.store.piece_texts[piece])
        length += len(parts[-1])
        if length >= LENGTH:
            break
    return "".join(parts)[:LENGTH]


def _text(log: Log, prompt: Prompt) -> str:
    return "".join(map(log.store.piece_texts.__getitem__, prompt.pieces))


def explain(first: str, second: str, model: TokenizerAndTemplate, console: Console) -> dict[str, Any]:
    """Where and why the second body's prompt stops reusing the first's; prints it and returns the figures."""
    log = log_from_bodies([_read(first), _read(second)], model)
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
            other = texts[0] if text is texts[1] else texts[1]
            window = slice(max(0, at - 60), at + 60)
            console.print(Text(f"  {name}: ") + marked(compared(text[window], other[window]), console))
    else:
        console.print("Neither differs from the other up to the end of the shorter one.")
    data = as_json(diagnose.diagnose(log), DoctorOptions(log=first), {})
    for number, item in enumerate((b for b in data["breaks"] if b["line"] == 2), 1):
        diagnosis_terminal.show_break(number, item, data, console)
    return data | {"shared_tokens": shared, "message": message, "role": role, "character": character}


def place(log: Log, prompt: Prompt, at: int) -> tuple[int, str, int]:
    """(message, role, character in its text) of a place in the rendered prompt."""
    owners = [outline.TextOwner(segment.message, segment.role, segment.offset) for segment in prompt.segments]
    found = outline.position_at(((owner, len(log.store.text(text))) for owner, text in prompt.runs), owners, at)
    if found is None:
        return len(prompt.roles) - 1, "the end", 0
    return found.message, found.role or "the template's own text", found.character


def _read(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None

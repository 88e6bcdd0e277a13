"""Shows where and why the prompt of a second request body stops reusing that of a first (``anaphora explain``)."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from anaphora.cache.hashing import TOKEN_BYTES
from anaphora.cache.index import common_tokens
from anaphora.errors import ConfigError
from anaphora.text import outline
from anaphora.tools.doctor.find.patterns import common_prefix
from anaphora.tools.doctor.options import DoctorOptions
from anaphora.tools.doctor.price.diagnose import diagnose
from anaphora.tools.doctor.read.load_log import Log, log_from_bodies
from anaphora.tools.doctor.read.prompts import Prompt
from anaphora.tools.doctor.show.diagnosis_json import as_json
from anaphora.tools.doctor.show.diagnosis_terminal import show_break
from anaphora.tools.doctor.show.marked_text import compared, marked
from anaphora.tools.shared.tokenizer_and_template import TokenizerAndTemplate

CONTEXT_LENGTH = 60


def explain(first: str, second: str, model: TokenizerAndTemplate, console: Console) -> dict[str, Any]:
    """Prints how many tokens the second file's request reuses from the first file's, and what ends the reuse.

    Returns the figures. Raises ConfigError if a file cannot be read or does not hold exactly one request.
    """
    log = log_from_bodies([_read(first), _read(second)], model)
    if [prompt.line for prompt in log.prompts] != [1, 2]:
        reason = f": {(first, second)[log.bad[0][0] - 1]}: {log.bad[0][1]}" if log.bad else ""
        raise ConfigError(f"{first} and {second} must hold one request each{reason}")
    packed = [log.store.packed(prompt.pieces) for prompt in log.prompts]
    lengths = [len(tokens) // TOKEN_BYTES for tokens in packed]
    shared = common_tokens(*packed)
    texts = ["".join(map(log.store.piece_texts.__getitem__, prompt.pieces)) for prompt in log.prompts]
    at = common_prefix(*texts)
    message, role, character = locate(log, log.prompts[1], at)
    console.print(
        f"{second} reuses {shared:,} of its {lengths[1]:,} tokens from {first} ({lengths[0]:,} tokens)", highlight=False
    )
    if at < min(map(len, texts)):
        console.print(f"They part in message {message} ({role}), character {character}:", highlight=False)
        window = slice(max(0, at - CONTEXT_LENGTH), at + CONTEXT_LENGTH)
        for name, text, other in ((first, *texts), (second, *reversed(texts))):
            console.print(Text(f"  {name}: ") + marked(compared(text[window], other[window]), console))
    else:
        console.print("Neither differs from the other up to the end of the shorter one.")
    data = as_json(diagnose(log), DoctorOptions(log=first), {})
    for number, item in enumerate((found for found in data["breaks"] if found["line"] == 2), 1):
        show_break(number, item, data, console)
    return data | {"shared_tokens": shared, "message": message, "role": role, "character": character}


def locate(log: Log, prompt: Prompt, at: int) -> tuple[int, str, int]:
    """Returns (message, role, character in its text) of a character of the rendered prompt."""
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
        raise ConfigError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None

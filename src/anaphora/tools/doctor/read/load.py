"""A log, read and rendered: its prompts in order, the texts, and what could not be used."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.tokenizer import Tokenizer
from anaphora.tools.doctor.read.bodies import Logged
from anaphora.tools.doctor.read.log_files import read
from anaphora.tools.doctor.read.prompts import Prompt
from anaphora.tools.doctor.read.render import Renderer
from anaphora.tools.doctor.read.token_store import Store

SAMPLE = 6
"""Requests at the beginning of a log whose prompts are tokenised as a whole too, to see how finely texts may be cut."""
KEPT_BAD_LINES = 100


@dataclass(slots=True)
class Model:
    """Tokenizer and template with which a log is read, and where they are from, in words."""

    tokenizer: Tokenizer
    template: ChatTemplate
    name: str


@dataclass(slots=True)
class Log:
    """``bad`` has the first bad lines as (number, why); ``bad_lines`` counts them all."""

    model: Model
    store: Store
    prompts: list[Prompt] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    bad_lines: int = 0
    dropped_tools: int = 0

    def skip(self, line: int, why: str) -> None:
        self.bad_lines += 1
        if len(self.bad) < KEPT_BAD_LINES:
            self.bad.append((line, why))


def load_model(folder: str | None, template: str | None) -> Model:
    """The tokenizer of a model folder and its template; without one those that come with this program.

    ``template`` is a file with a chat template to use instead. Raises ModelError or ConfigError.
    """
    ours = resources.files("anaphora.text") / "templates" / "chatml.jinja"
    if folder is None:
        packed = resources.files("anaphora.tools.doctor.read") / "tokenizer" / "tokenizer.json.gz"
        special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False}
        tokenizer = Tokenizer(gzip.decompress(packed.read_bytes()), special)
        name = "the tokenizer of SmolLM2-135M-Instruct"
    else:
        tokenizer, name = Tokenizer.load(folder), f"the tokenizer of {folder}"
    if template is not None:
        try:
            source = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template cannot read {template}: {error}") from None
        chosen, origin = ChatTemplate(source, tokenizer.special_tokens), f"the chat template {template}"
    elif tokenizer.chat_template is not None:
        chosen, origin = tokenizer.chat_template, "its own chat template"
    else:
        chosen = ChatTemplate(ours.read_text(encoding="utf-8"), tokenizer.special_tokens)
        origin = "Anaphora's ChatML template"
    return Model(tokenizer, chosen, f"{name} with {origin}")


def load(path: str, model: Model, seen: Callable[[int], None] = lambda _: None) -> Log:
    """Read a log (``-``: standard input). Raises ConfigError where it cannot be read or holds no request."""
    log = Log(model, Store(model.tokenizer))
    return _filled(log, read(path, log.skip, seen), path)


def _filled(log: Log, requests: Iterator[Logged], path: str) -> Log:
    renderer = Renderer(log.model.template, log.store)
    sample = list(itertools.islice(requests, SAMPLE))
    for logged in sample:
        try:
            log.store.check(renderer.plain(logged))
        except InvalidRequest:
            continue  # it is reported when it comes to it
    for logged in itertools.chain(sample, requests):
        try:
            log.prompts.append(renderer.render(logged))
        except InvalidRequest as error:
            log.skip(logged.line, error.message)
    if not log.prompts:
        why = f": line {log.bad[0][0]}: {log.bad[0][1]}" if log.bad else ""
        raise ConfigError(f"{path} holds no request that can be read{why}")
    log.dropped_tools = renderer.dropped_tools
    return log


def from_bodies(bodies: list[object], model: Model) -> Log:
    """A log from request bodies in memory."""
    from anaphora.tools.doctor.read.bodies import requests_of

    log = Log(model, Store(model.tokenizer))
    return _filled(log, (r for n, body in enumerate(bodies, 1) for r in requests_of(body, n)), json.dumps("bodies"))

"""A log, read and rendered: its prompts in order, the texts, and what could not be used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.tools.doctor.read.prompts import Prompt
from anaphora.tools.doctor.read.render_prompts import Renderer
from anaphora.tools.doctor.read.token_store import TokenStore
from anaphora.tools.shared.request_log.bodies import LoggedRequest
from anaphora.tools.shared.request_log.log_files import read_requests
from anaphora.tools.shared.tokenizer_and_template import TokenizerAndTemplate

SAMPLE = 6
"""Requests at the beginning of a log whose prompts are tokenised as a whole too, to see how finely texts may be cut."""
KEPT_BAD_LINES = 100


@dataclass(slots=True)
class Log:
    """``bad`` has the first bad lines as (number, why); ``bad_lines`` counts them all."""

    model: TokenizerAndTemplate
    store: TokenStore
    prompts: list[Prompt] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    bad_lines: int = 0
    dropped_tools: int = 0

    def skip(self, line: int, why: str) -> None:
        self.bad_lines += 1
        if len(self.bad) < KEPT_BAD_LINES:
            self.bad.append((line, why))


def load_log(path: str, model: TokenizerAndTemplate, seen: Callable[[int], None] = lambda _: None) -> Log:
    """Read a log (``-``: standard input). Raises ConfigError where it cannot be read or holds no request."""
    log = Log(model, TokenStore(model.tokenizer))
    return _filled(log, read_requests(path, log.skip, seen), path)


def _filled(log: Log, requests: Iterator[LoggedRequest], path: str) -> Log:
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


def log_from_bodies(bodies: list[object], model: TokenizerAndTemplate) -> Log:
    """A log from request bodies in memory."""
    from anaphora.tools.shared.request_log.bodies import requests_of

    log = Log(model, TokenStore(model.tokenizer))
    return _filled(log, (r for n, body in enumerate(bodies, 1) for r in requests_of(body, n)), json.dumps("bodies"))

"""Loads a log: renders and tokenises its requests in order, and counts the lines that cannot be used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.tools.doctor.read.prompts import Prompt
from anaphora.tools.doctor.read.render_prompts import Renderer
from anaphora.tools.doctor.read.token_store import TokenStore
from anaphora.tools.shared.request_log.bodies import LoggedRequest
from anaphora.tools.shared.request_log.log_files import checked_requests, read_requests
from anaphora.tools.shared.tokenizer_and_template import TokenizerAndTemplate

NUM_CHECKED = 6
"""The first requests of a log, whose prompts are also tokenised as a whole, to find out how finely texts may be cut."""
MAX_BAD_LINES = 100


@dataclass(slots=True)
class Log:
    """The prompts of a log. ``bad`` holds the first bad lines as (line number, reason); ``bad_lines`` counts them all.

    ``dropped_tools`` counts the requests whose tools the chat template leaves out.
    """

    model: TokenizerAndTemplate
    store: TokenStore
    prompts: list[Prompt] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    bad_lines: int = 0
    dropped_tools: int = 0

    def skip(self, line: int, reason: str) -> None:
        """Records a line that holds no usable request."""
        self.bad_lines += 1
        if len(self.bad) < MAX_BAD_LINES:
            self.bad.append((line, reason))


def load_log(path: str, model: TokenizerAndTemplate, progress: Callable[[int], None] = lambda _: None) -> Log:
    """Loads a log; ``-`` is standard input. ``progress`` is called with the number of bytes read so far.

    Raises ConfigError if the file cannot be read or holds no usable request.
    """
    log = Log(model, TokenStore(model.tokenizer))
    return _render_all(log, read_requests(path, log.skip, progress), path)


def log_from_bodies(bodies: list[object], model: TokenizerAndTemplate) -> Log:
    """Builds a log from request bodies in memory. Raises ConfigError if none of them can be used."""
    log = Log(model, TokenStore(model.tokenizer))
    requests = (request for line, body in enumerate(bodies, 1) for request in checked_requests(body, line, log.skip))
    return _render_all(log, requests, "the list of bodies")


def _render_all(log: Log, requests: Iterator[LoggedRequest], name: str) -> Log:
    renderer = Renderer(log.model.template, log.store)
    first = list(itertools.islice(requests, NUM_CHECKED))
    for request in first:
        try:
            log.store.check(renderer.text(request))
        except InvalidRequest:
            continue  # the loop below records it
    for request in itertools.chain(first, requests):
        try:
            log.prompts.append(renderer.render(request))
        except InvalidRequest as error:
            log.skip(request.line, error.message)
    if not log.prompts:
        reason = f": line {log.bad[0][0]}: {log.bad[0][1]}" if log.bad else ""
        raise ConfigError(f"{name} holds no usable request{reason}")
    log.dropped_tools = renderer.dropped_tools
    return log

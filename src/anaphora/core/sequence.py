"""One choice of one request on its way through the engine."""

from __future__ import annotations

import enum

from anaphora.cache.hashing import BlockHash
from anaphora.cache.table import BlockTable
from anaphora.types.batch import TokenLogprobs
from anaphora.types.reports import CacheReport
from anaphora.types.request import Request


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Known tokens and computed tokens; each step lets computed catch up.

    ::

        token_ids     p p p p p p p p g g g          known: prompt and generated
        in_flight                           ? ?      sampled in steps whose results are not taken yet
        computed      ───────────►                   slots that hold keys and values, results taken
        scheduled     ─────────────────────►         the same, steps in flight included

    When it was admitted, ``given`` tokens were known, of which ``matched`` were found in the cache; those are never
    written. ``epoch`` counts its admissions, so that a result can be told from one of before a preemption. ``order``
    is its place in the order of arrival. ``alone`` says that a step with it failed, so the next one is its own.
    """

    __slots__ = (
        "alone",
        "choice",
        "computed",
        "epoch",
        "failures",
        "first_scheduled",
        "given",
        "in_flight",
        "matched",
        "max_tokens",
        "num_prompt",
        "order",
        "prompt_done",
        "prompt_logprobs",
        "report",
        "request",
        "scheduled",
        "slot",
        "state",
        "table",
        "token_ids",
        "wait",
        "wait_since",
        "waited_s",
    )

    def __init__(self, request: Request, choice: int, order: int, max_tokens: int, table: BlockTable) -> None:
        self.request = request
        self.choice = choice
        self.order = order
        self.max_tokens = max_tokens
        self.table = table
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.state = State.WAITING
        self.slot = -1
        self.epoch = 0
        self.computed = 0
        self.scheduled = 0
        self.in_flight = 0
        self.given = 0
        self.matched = 0
        self.report: CacheReport | None = None
        self.first_scheduled: float | None = None
        self.wait: BlockHash | None = None
        self.wait_since = 0.0
        self.waited_s = 0.0
        self.prompt_done = False
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.failures = 0
        self.alone = False

    @property
    def total(self) -> int:
        """Known tokens and those whose results are on their way."""
        return len(self.token_ids) + self.in_flight

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def prefilling(self) -> bool:
        """Tokens that it was admitted with are still to be computed."""
        return self.scheduled < self.given

    @property
    def wants_more(self) -> bool:
        """Whether another token may follow those on their way; with ``max_tokens`` 0 one is sampled and dropped."""
        return self.total - self.num_prompt < max(self.max_tokens, 1)

    def admitted(self, slot: int, matched: int) -> None:
        """It takes a slot; the first ``matched`` tokens need not be computed, but for the last one known."""
        self.state = State.RUNNING
        self.slot = slot
        self.epoch += 1
        self.given = len(self.token_ids)
        self.matched = matched
        self.computed = self.scheduled = min(matched, self.given - 1)
        if not self.prompt_done:
            self.prompt_logprobs.clear()

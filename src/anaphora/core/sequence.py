"""One choice of one request, from admission to its last token."""

from __future__ import annotations

import enum

from anaphora.cache.hashing import BlockHash
from anaphora.cache.table import BlockTable
from anaphora.types.batch import TokenLogprobs
from anaphora.types.reports import CacheReport
from anaphora.types.request import Request


class State(enum.Enum):
    """Where a sequence is: in the waiting queue, in a slot, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Known tokens and computed tokens of one choice; each step lets computed catch up with known.

    ::

        token_ids         p p p p p p p p g g g          known: prompt and generated
        num_in_flight                           ? ?      sampled in steps whose results have not been taken yet
        num_computed      ───────────►                   tokens whose keys and values are in the cache
        num_scheduled     ─────────────────────►         num_computed plus the tokens of the steps in flight

    - ``arrival_order``: sequences are admitted, and kept when blocks run out, in this order
    - ``slot``: its slot in the runner while it runs, else -1
    - ``num_admitted``: tokens known at its last admission; ``num_cached`` of them were found in the cache, and are
      never written by this sequence
    - ``admission_count``: how often it was admitted; results of chunks from an earlier admission are dropped
    - ``pending_block``: the hash of the block for which it waits, since another sequence is computing it;
      ``waited_s``: seconds spent waiting
    - ``report``, ``first_scheduled``: set at the first admission of the request's prompt (choice 0), once
    - ``prompt_done``: the prompt has been computed once and its PromptDone sent
    - ``run_alone``: a step with this sequence has failed, so its next step contains no other
    """

    __slots__ = (
        "admission_count",
        "arrival_order",
        "choice",
        "failures",
        "first_scheduled",
        "max_tokens",
        "num_admitted",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_prompt",
        "num_scheduled",
        "pending_block",
        "prompt_done",
        "prompt_logprobs",
        "report",
        "request",
        "run_alone",
        "slot",
        "state",
        "table",
        "token_ids",
        "wait_since",
        "waited_s",
    )

    def __init__(self, request: Request, choice: int, arrival_order: int, max_tokens: int, table: BlockTable) -> None:
        self.request = request
        self.choice = choice
        self.arrival_order = arrival_order
        self.max_tokens = max_tokens
        self.table = table
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.state = State.WAITING
        self.slot = -1
        self.admission_count = 0
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_in_flight = 0
        self.num_admitted = 0
        self.num_cached = 0
        self.report: CacheReport | None = None
        self.first_scheduled: float | None = None
        self.pending_block: BlockHash | None = None
        self.wait_since = 0.0
        self.waited_s = 0.0
        self.prompt_done = False
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.failures = 0
        self.run_alone = False

    @property
    def num_tokens(self) -> int:
        """Number of known tokens and of those in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_generated(self) -> int:
        """Number of known tokens behind the prompt."""
        return len(self.token_ids) - self.num_prompt

    @property
    def prefilling(self) -> bool:
        """Whether tokens that were known at admission are still to be scheduled."""
        return self.num_scheduled < self.num_admitted

    @property
    def wants_more(self) -> bool:
        """Whether to sample after the tokens in flight. With ``max_tokens`` 0 one token is sampled and dropped."""
        return self.num_tokens - self.num_prompt < max(self.max_tokens, 1)

    def admit(self, slot: int, num_cached: int) -> None:
        """Start to run in ``slot``. The last known token is computed even if it is cached, to get logits."""
        self.state = State.RUNNING
        self.slot = slot
        self.admission_count += 1
        self.num_admitted = len(self.token_ids)
        self.num_cached = num_cached
        self.num_computed = self.num_scheduled = min(num_cached, self.num_admitted - 1)
        if not self.prompt_done:
            self.prompt_logprobs.clear()

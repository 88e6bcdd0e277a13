"""Generated workloads: which requests are sent in which order, and which prefixes they share.

Every round has its own prefixes, so that nothing is cached from an earlier round, and both sides of a round get the
same requests. Lengths are exact in the server's own tokens if it can count them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from anaphora.errors import ConfigError
from anaphora.tools.bench.client import PlannedRequest, Server
from anaphora.tools.bench.exact_lengths import common_prefix_length, estimate, fit
from anaphora.tools.bench.options import BenchOptions
from anaphora.tools.bench.prompt_texts import Writer, opening

Message = dict[str, Any]

CLOSING_FROM = 60
DOCUMENTS = 40
DOCUMENT_PASSAGES = 3


@dataclass(frozen=True, slots=True)
class Session:
    """Requests in sequence: each is sent when the one before has been answered.

    Sessions of the same ``burst`` arrive together in an open loop. ``at`` is the arrival in seconds after the first.
    """

    requests: tuple[PlannedRequest, ...]
    burst: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of traffic, with lengths in tokens: ``shared`` prefix, ``own`` part of a prompt, ``out`` of an answer.

    ``fresh`` is the share of requests that are the first with their prefix; if it is None there are ``tenants``
    prefixes. ``turns`` is the range of turns of a conversation. With ``visits`` a session sends several independent
    requests with the same prefix, each after the answer to the one before.
    """

    shared: int
    own: int
    out: int
    turns: tuple[int, int] = (1, 1)
    tenants: int = 1
    fresh: float | None = None
    bursts: bool = False
    visits: bool = False
    beginning: str = "policies"
    question: str = "questions"


SHAPES = {
    "customer-service": Shape(2300, 120, 200),
    "support-chat": Shape(2300, 80, 120, turns=(3, 5), fresh=0.175, bursts=True),
    "code-generation": Shape(1600, 160, 120, fresh=0.72, visits=True, beginning="snippets", question="snippets"),
    "knowledge-base": Shape(1120, 1280, 150, question="retrieved"),
    "knowledge-base-raw": Shape(0, 1600, 150, question="retrieved"),
}


def shape_of(options: BenchOptions) -> Shape:
    """Returns the workload's shape with the sizes that the user gave."""
    shape = SHAPES.get(options.workload_name, SHAPES["customer-service"])
    sizes = {
        name: value for name in ("shared", "own", "out", "tenants") if (value := getattr(options, name)) is not None
    }
    if options.tenants is not None:
        sizes["fresh"] = None
    if options.turns is not None:
        sizes |= {"turns": (options.turns, options.turns), "visits": False}
    return replace(shape, **sizes)


def deal(shape: Shape, requests: int, rng: random.Random) -> list[list[int]]:
    """Returns the turns of each session by prefix: [[4, 2], [5, 1]] are two prefixes of six requests each."""
    count = shape.tenants if shape.fresh is None else max(1, round(shape.fresh * requests))
    count = min(count, requests)
    shares = [requests // count + (index < requests % count) for index in range(count)]
    rng.shuffle(shares)
    return [_cut(share, shape, rng) for share in shares]


def _cut(share: int, shape: Shape, rng: random.Random) -> list[int]:
    if shape.visits:
        return [share]
    turns = []
    while share:
        turns.append(min(share, rng.randint(*shape.turns)))
        share -= turns[-1]
    return turns


class SessionMaker:
    """Makes the sessions of one round. ``seed`` (which includes the round) determines all texts."""

    def __init__(self, server: Server, shape: Shape, seed: str) -> None:
        self.server = server
        self.shape = shape
        self.seed = seed
        self._rng = random.Random(seed)
        self._documents = self._make_documents() if shape.question == "retrieved" else []

    async def sessions(self, requests: int, progress: Callable[[int], None]) -> list[Session]:
        """Returns sessions of ``requests`` requests; ``progress`` is called with each number of requests made."""
        dealt = deal(self.shape, requests, self._rng)
        made: list[Session] = []
        for beginning, turns in enumerate(dealt):
            system = await self._system(f"{self.seed}/{beginning}")
            for number, count in enumerate(turns):
                seed = f"{self.seed}/{beginning}/{number}"
                make = self._visit if self.shape.visits else self._chat
                made.append(Session(tuple(await make(system, count, seed)), burst=beginning))
                progress(count)
        if not self.shape.bursts and not self.shape.visits:
            self._rng.shuffle(made)
            made = [replace(session, burst=number) for number, session in enumerate(made)]
        return made

    async def _system(self, seed: str) -> list[Message]:
        if not self.shape.shared:
            return []
        writer = Writer(seed)
        between = "\n\n\n" if self.shape.beginning == "snippets" else "\n\n"
        pieces = writer.pieces(
            self.shape.beginning, self.shape.shared * 2, between, start=opening(self.shape.beginning, writer)
        )

        async def shared(text: str) -> int:
            """Returns the tokens that two prompts with this system text share, whatever their users write."""
            ends = [[_message("system", text), _message("user", end)] for end in ("A", "zebra")]
            first, second = [await self.server.tokenize({"messages": messages}) for messages in ends]
            return common_prefix_length(first, second) if first and second else 8 + estimate(text)

        return [_message("system", await fit(pieces, self.shape.shared, shared))]

    async def _visit(self, system: list[Message], count: int, seed: str) -> list[PlannedRequest]:
        wanted = self.shape.shared + self.shape.own
        return [await self._planned(system, wanted, f"{seed}/{turn}") for turn in range(count)]

    async def _chat(self, system: list[Message], turns: int, seed: str) -> list[PlannedRequest]:
        """Each turn adds a scripted answer of ``out`` tokens and a question of ``own`` tokens."""
        planned: list[PlannedRequest] = []
        history = system
        for turn in range(turns):
            wanted = self.shape.shared + self.shape.own + turn * (self.shape.own + self.shape.out)
            planned.append(await self._planned(history, wanted, f"{seed}/{turn}"))
            history = [*planned[-1].body["messages"], await self._answer(f"{seed}/{turn}/answer")]
        return planned

    async def _planned(self, history: list[Message], wanted: int, seed: str) -> PlannedRequest:
        pieces, closing = self._question(seed)

        def messages(text: str) -> list[Message]:
            return [*history, _message("user", (text + closing).lstrip())]

        async def count(text: str) -> int:
            tokens = await self.server.tokenize({"messages": messages(text)})
            return len(tokens) if tokens else sum(8 + estimate(m["content"]) for m in messages(text))

        try:
            body = {"messages": messages(await fit(pieces, wanted, count))}
        except ConfigError as error:
            raise ConfigError(f"--own {self.shape.own} cannot be met: {error.message}") from None
        tokens = await self.server.tokenize(body)
        return PlannedRequest(body, self.shape.out, wanted=wanted, tokens=tokens)

    async def _answer(self, seed: str) -> Message:
        async def count(text: str) -> int:
            tokens = await self.server.tokenize({"prompt": text or " "})
            return len(tokens) if tokens else estimate(text)

        pieces = Writer(seed).pieces("answers", self.shape.out * 2)
        return _message("assistant", await fit(pieces, self.shape.out, count))

    def _question(self, seed: str) -> tuple[list[str], str]:
        """Returns words to choose from, and the sentence that ends the message (if there is room for one)."""
        writer = Writer(seed)
        room = self.shape.own * 2
        if self.shape.question == "snippets":
            return writer.pieces("snippets", room, "\n\n\n"), ""
        closing = " " + next(writer.passages("questions")) if self.shape.own >= CLOSING_FROM else ""
        if self.shape.question == "questions":
            return writer.pieces("questions", room), closing
        rng = random.Random(seed)
        chosen: list[str] = []
        while sum(map(len, chosen)) < self.shape.own * 8:
            # The square makes some documents more popular than others.
            chosen.append(self._documents[int(rng.random() ** 2 * DOCUMENTS)])
        return writer.pieces(
            "articles", room, "\n\n", start="\n\n".join(dict.fromkeys(chosen))
        ), "\n\n" + closing.strip()

    def _make_documents(self) -> list[str]:
        passages = Writer(f"{self.seed}/documents").passages("articles")
        return ["\n\n".join(next(passages) for _ in range(DOCUMENT_PASSAGES)) for _ in range(DOCUMENTS)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}

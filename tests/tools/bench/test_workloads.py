"""The made workloads: lengths exact in the server's tokens, and as many hits as their names promise."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterator

import pytest

from anaphora.errors import ConfigError
from anaphora.tools.bench.client import PlannedRequest, Server
from anaphora.tools.bench.exact_lengths import estimate, fit
from anaphora.tools.bench.load_generator import arrivals
from anaphora.tools.bench.options import WORKLOADS, BenchOptions
from anaphora.tools.bench.prompt_texts import Writer
from anaphora.tools.bench.workloads import SHAPES, Session, SessionMaker, deal, shape_of
from tests.tools.fake_server import Fake, render, serving, words
from tests.tools.shared.test_simulate import simulate


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Fake()) as fake:
        yield fake.url


def make(url: str, requests: int, seed: str = "7/0", **options: object) -> list[Session]:
    async def run() -> list[Session]:
        server = Server(url)
        try:
            await server.connect()
            shape = shape_of(BenchOptions(**options))  # type: ignore[arg-type]
            return await SessionMaker(server, shape, seed).sessions(requests, lambda count: None)
        finally:
            await server.close()

    return asyncio.run(run())


def flat(sessions: list[Session]) -> list[PlannedRequest]:
    return [planned for session in sessions for planned in session.requests]


@pytest.mark.parametrize("workload", [name for name in WORKLOADS if name in SHAPES])
def test_lengths_are_exact_in_the_servers_tokens(url: str, workload: str) -> None:
    sessions = make(url, 12, workload=workload)
    shape = SHAPES[workload]
    assert len(flat(sessions)) == 12
    for session in sessions:
        for turn, planned in enumerate(session.requests):
            ids = render(planned.body["messages"])
            grown = 0 if shape.visits else turn * (shape.own + shape.out)
            assert len(ids) == shape.shared + shape.own + grown == planned.wanted
            assert list(planned.tokens or ()) == ids
            assert planned.out == shape.out


def test_the_shared_beginning_is_what_any_two_prompts_have_in_common(url: str) -> None:
    first, second = (render(p.body["messages"]) for p in flat(make(url, 2, shared=321, own=77, out=5)))
    same = next(index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    # The two questions may begin with the same words by chance, never with whole sentences.
    assert 321 <= same < 321 + 12
    assert len(first) == len(second) == 321 + 77


@pytest.mark.parametrize(
    ("workload", "requests", "tokens", "share"),
    [
        ("customer-service", 16, (0.80, 0.95), (0.93, 0.94)),
        ("support-chat", 16, (0.6, 0.9), (0.80, 0.85)),
        ("support-chat", 40, (0.6, 0.9), (0.80, 0.85)),
        ("code-generation", 16, (0.20, 0.35), (0.20, 0.35)),
        ("code-generation", 40, (0.20, 0.35), (0.20, 0.35)),
        ("knowledge-base", 16, (0.45, 0.55), (0.9, 1.0)),
        ("knowledge-base", 40, (0.45, 0.55), (0.9, 1.0)),
        ("knowledge-base-raw", 40, (0.01, 0.35), (0.1, 0.8)),
    ],
)
def test_each_workload_hits_as_its_name_promises(
    url: str, workload: str, requests: int, tokens: tuple[float, float], share: tuple[float, float]
) -> None:
    prompts = [render(p.body["messages"]) for p in flat(make(url, requests, workload=workload))]
    hits = simulate(prompts)
    assert tokens[0] <= sum(hits) / sum(map(len, prompts)) <= tokens[1]
    assert share[0] <= sum(hit > 0 for hit in hits) / len(hits) <= share[1]


def test_rounds_share_nothing_and_a_seed_repeats_itself(url: str) -> None:
    def prompts(seed: str) -> list[list[int]]:
        return [render(p.body["messages"]) for p in flat(make(url, 4, seed, workload="customer-service"))]

    first, again, other = prompts("7/0"), prompts("7/0"), prompts("7/1")
    assert first == again
    assert sum(simulate(first + other)) == sum(simulate(first)) + sum(simulate(other))


def test_tenants_and_turns_of_the_users_own(url: str) -> None:
    sessions = make(url, 12, shared=200, own=40, out=20, turns=3, tenants=2)
    assert [len(session.requests) for session in sessions] == [3, 3, 3, 3]
    systems = [session.requests[0].body["messages"][0]["content"] for session in sessions]
    assert len(set(systems)) == 2
    roles = [message["role"] for message in sessions[0].requests[2].body["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    # Each turn holds all of the turn before.
    for session in sessions:
        for before, after in zip(session.requests, session.requests[1:], strict=False):
            assert after.body["messages"][: len(before.body["messages"])] == before.body["messages"]


@pytest.mark.parametrize("requests", [1, 2, 5, 16, 97])
@pytest.mark.parametrize("workload", list(SHAPES))
def test_every_request_is_dealt_once(workload: str, requests: int) -> None:
    shape = SHAPES[workload]
    dealt = deal(shape, requests, random.Random(3))
    assert sum(sum(turns) for turns in dealt) == requests
    assert all(1 <= turn <= max(shape.turns[1], 2 * shape.visits) for turns in dealt for turn in turns)


def test_an_own_part_too_small_for_the_template_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="--own 2"):
        make(url, 1, shared=100, own=2, out=5)


def test_without_tokenize_lengths_are_near(url: str) -> None:
    with serving(Fake(tokenize=False)) as fake:
        sessions = make(fake.url, 2, workload="customer-service")
    for planned in flat(sessions):
        assert planned.tokens is None
        text = "".join(message["content"] for message in planned.body["messages"])
        assert abs(estimate(text) - 2420) < 60


@pytest.mark.parametrize("wanted", [1, 2, 17, 100, 999])
def test_fit_meets_every_length(wanted: int) -> None:
    async def count(text: str) -> int:
        return len(words(text))

    async def run() -> str:
        return await fit(Writer(f"fit {wanted}").pieces("articles", 2 * wanted + 4), wanted, count)

    text = asyncio.run(run())
    assert len(words(text)) == wanted


def test_fit_says_when_the_words_are_too_few() -> None:
    async def count(text: str) -> int:
        return len(words(text))

    with pytest.raises(ConfigError, match="only 3 of 500"):
        asyncio.run(fit(["one", " two", " three"], 500, count))


def test_texts_have_no_open_slots_and_do_not_end() -> None:
    for name in ("policies", "questions", "answers", "articles", "snippets"):
        text = "".join(Writer("slots").pieces(name, 6000))
        assert len(text.split()) == 6000
        assert "$" not in text
        assert "${" not in text


def test_open_loop_arrivals_have_the_rate_and_keep_bursts_together() -> None:
    planned = PlannedRequest({"prompt": "x"}, 1)
    sessions = [Session((planned,) * 3, burst=number // 2) for number in range(4000)]
    placed = arrivals(sessions, rate=12.0, seed="s")
    assert all(a.at == b.at for a, b in zip(placed[::2], placed[1::2], strict=True))
    gaps = [b.at - a.at for a, b in zip(placed[::2], placed[2::2], strict=False)]
    # Exponential gaps: mean and standard deviation are both six requests over twelve a second.
    assert statistics.fmean(gaps) == pytest.approx(0.5, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.1)
    assert placed == arrivals(sessions, rate=12.0, seed="s")
    assert placed != arrivals(sessions, rate=12.0, seed="t")

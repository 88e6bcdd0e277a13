"""The demo's story against a server whose cache is known."""

from __future__ import annotations

import asyncio
import io
import re

import pytest
from rich.console import Console

from anaphora.errors import AnaphoraError
from anaphora.tools.bench.client import RequestResult, Server
from anaphora.tools.demo import SHAPE, bar, summary, tell
from tests.tools.fake_server import Fake, serving, words
from tests.tools.shared.test_simulate import simulate


def told(fake: Fake) -> tuple[list[RequestResult], str]:
    async def run() -> list[RequestResult]:
        server = Server(fake.url)
        try:
            await server.connect()
            return await tell(server, console)
        finally:
            await server.close()

    page = io.StringIO()
    console = Console(file=page, width=120)
    with serving(fake):
        return asyncio.run(run()), page.getvalue()


def test_cold_hit_id_in_front_and_id_at_the_end() -> None:
    fake = Fake()
    results, page = told(fake)
    prompts = [body["prompt"] for body in fake.seen[1:]]
    expected = simulate([words(prompt) for prompt in prompts])
    assert [result.cached_tokens for result in results] == expected
    assert expected[0] == expected[2] == 0
    assert min(expected[1], expected[3]) >= SHAPE.shared - 32
    assert prompts[2].startswith("[Request ID: ")
    assert re.search(r"\n\[Request ID: [0-9a-f]{16}\]$", prompts[3])
    for prompt, cached in zip(prompts, expected, strict=True):
        assert f"{cached:,} cached, {len(words(prompt)) - cached:,} computed" in page
    assert "an id in front threw that away" in summary(results)


def test_the_bar_is_to_scale() -> None:
    results, _ = told(Fake())
    cells = bar(results[1])
    spans = {str(span.style): span.end - span.start for span in cells.spans}
    share = (results[1].cached_tokens or 0) / (results[1].prompt_tokens or 1)
    assert spans["green"] / (spans["green"] + spans["red"]) == pytest.approx(share, abs=0.02)


def test_a_failing_server_is_told() -> None:
    with pytest.raises(AnaphoraError, match="HTTP 500"):
        told(Fake(fail=(1,)))

"""Shows the prefix cache in four requests: cold, hit, an id in front, the id at the end."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from anaphora.errors import AnaphoraError
from anaphora.tools.bench.client import PlannedRequest, RequestResult, Server
from anaphora.tools.bench.figures import ttft
from anaphora.tools.bench.own_server import OwnServer, end_on_terminate
from anaphora.tools.bench.workloads import SessionMaker, Shape

SHAPE = Shape(shared=2300, own=120, out=40)
BAR_WIDTH = 48
CACHED, COMPUTED = "green", "red"


def request_id() -> str:
    """Returns a random id, as tracing adds it to prompts."""
    return f"[Request ID: {secrets.token_hex(8)}]"


def in_front(prompt: str) -> str:
    """Puts an id before everything else: no two prompts share a prefix."""
    return f"{request_id()}\n{prompt}"


def at_the_end(prompt: str) -> str:
    """Puts an id after the user's message."""
    return f"{prompt}\n{request_id()}"


def unchanged(prompt: str) -> str:
    """Returns the prompt as it is."""
    return prompt


STEPS: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("cold", "The first customer asks. Nobody has sent this system prompt before.", unchanged),
    ("hit", "Another customer, another question, the same system prompt.", unchanged),
    ("id in front", "The same with a request id in front, for tracing.", in_front),
    ("id at the end", "The id moved to the end of the user's message.", at_the_end),
)


def bar(result: RequestResult) -> Text:
    """Returns a bar of a prompt's cached and computed tokens, to scale."""
    total, cached = result.prompt_tokens or 0, result.cached_tokens or 0
    filled = round(BAR_WIDTH * cached / total) if total else 0
    return Text.assemble(
        ("█" * filled, CACHED),
        ("█" * (BAR_WIDTH - filled), COMPUTED),
        f" {cached:,} cached, {total - cached:,} computed",
    )


async def ask(server: Server, console: Console, prompt: str) -> RequestResult:
    """Sends a prompt and shows the answer as it comes, after a clock that stops at the first token."""
    begun, written = time.perf_counter(), ""
    first: float | None = None

    def shown() -> Text:
        seconds = time.perf_counter() - begun if first is None else first
        clock = f"   {seconds:.1f} s  " if first is None else f"   {seconds:.2f} s  "
        return Text.assemble((clock, "bold"), (" ".join(written.split()), "dim"), no_wrap=True, overflow="ellipsis")

    def on_text(text: str) -> None:
        nonlocal first, written
        first = time.perf_counter() - begun if first is None else first
        written += text

    with Live(get_renderable=shown, console=console, refresh_per_second=10, transient=True):
        return await server.send(PlannedRequest({"prompt": prompt}, SHAPE.out), on_text=on_text)


async def tell(server: Server, console: Console) -> list[RequestResult]:
    """Sends the four requests one after the other and prints each result. Raises AnaphoraError if one fails."""
    with console.status(f"writing {len(STEPS)} prompts …"):
        sessions = await SessionMaker(server, SHAPE, secrets.token_hex(4)).sessions(len(STEPS), lambda made: None)
    console.print(
        f"A system prompt of about {SHAPE.shared:,} tokens and a question of {SHAPE.own} for {server.model}.\n"
    )
    results = []
    for number, ((name, story, change), session) in enumerate(zip(STEPS, sessions, strict=True), 1):
        console.print(f"[bold]{number}. {name}[/bold]: {story}", highlight=False)
        # As plain text: a chat template would put its own first tokens, which are always the same, before the id.
        prompt = "\n\n".join(message["content"] for message in session.requests[0].body["messages"])
        result = await ask(server, console, change(prompt))
        seconds = ttft(result)
        if result.error or seconds is None:
            raise AnaphoraError(f"the server failed the request: {result.error or 'it sent no text'}")
        console.print(bar(result))
        console.print(f"   first token after [bold]{seconds:.2f} s[/bold]\n", highlight=False)
        results.append(result)
    return results


def summary(results: list[RequestResult]) -> str:
    """Returns what the four times to first token show."""
    cold, hit, front, end = (ttft(result) or 0.0 for result in results)
    return (
        f"One model, one server, the same words. From the cache the first token came {cold / hit:.0f} times sooner; "
        f"an id in front threw that away ({front:.2f} s), at the end it cost nothing ({end:.2f} s)."
    )


async def run(console: Console) -> None:
    """Starts a server, sends the requests, stops the server."""
    end_on_terminate()
    own = OwnServer(None, caching=True)
    try:
        with console.status("starting anaphora serve: reading the model, then a first step …"):
            seconds = await own.ready()
        console.print(f"[dim]ready after {seconds:.0f} s at {own.url}[/dim]\n", highlight=False)
        server = Server(own.url)
        try:
            await server.connect()
            results = await tell(server, console)
        finally:
            await server.close()
    finally:
        own.stop()
    console.print(f"{summary(results)}\nThe A/B with hours and prices: make bench", highlight=False)


def main() -> int:
    """Runs the demo and returns the exit code."""
    try:
        asyncio.run(run(Console()))
    except AnaphoraError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

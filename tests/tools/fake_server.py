"""A small OpenAI-compatible server for tests: its tokens, cache, faults and delays are given."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

BLOCK = 16
WINDOW = 8192
MODEL = "fake-1"
PIECE = re.compile(r" ?[A-Za-z]{1,6}|\S|\s")


def words(text: str) -> list[int]:
    """Tokens of a text: up to six letters with the space before them, each other character by itself."""
    return [zlib.crc32(piece.encode()) for piece in PIECE.findall(text)]


def render(messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    """A ChatML-like prompt: each message costs four tokens around its text, the generation prompt three."""
    ids: list[int] = words(json.dumps(tools)) if tools else []
    for message in messages:
        ids += [1, words(message["role"])[0], 2, *words(message.get("content") or ""), 3]
    return [*ids, 1, 4, 2]


@dataclass
class Fake:
    """What the server does. ``fail`` are the numbers of the requests that fail (0 is the first after the warm-up)."""

    caching: bool = True
    usage: bool = True
    cached_in_usage: bool = True
    metrics: bool = True
    tokenize: bool = True
    refuses: tuple[str, ...] = ()
    fail: tuple[int, ...] = ()
    break_off: tuple[int, ...] = ()
    silent: bool = False
    prefill_s: float = 0.0
    step_s: float = 0.0
    role_first_s: float = 0.0
    gather: int = 0
    """Answers wait until this many requests have been in flight together."""
    gathered: asyncio.Event = field(default_factory=asyncio.Event)
    api_key: str | None = None
    known: set[tuple[str | None, int]] = field(default_factory=set)
    seen: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0
    queries: int = 0
    hits: int = 0
    prefill_sum: float = 0.0
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    def look_up(self, ids: list[int], salt: str | None) -> int:
        """Returns the cached tokens of a prompt and stores its blocks."""
        chain, found, going = 0, 0, True
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            chain = hash((chain, *ids[start : start + BLOCK]))
            going = going and (salt, chain) in self.known and start + BLOCK < len(ids)
            found += BLOCK * going
            self.known.add((salt, chain))
        return found if self.caching else 0


def application(fake: Fake) -> Starlette:
    async def models(request: Request) -> Response:
        if fake.api_key and request.headers.get("authorization") != f"Bearer {fake.api_key}":
            return JSONResponse({"error": {"message": "no"}}, 401)
        return JSONResponse({"data": [{"id": MODEL, "max_model_len": WINDOW}]})

    async def tokenize(request: Request) -> Response:
        body = await request.json()
        if not fake.tokenize:
            return JSONResponse({"error": {"message": "no such route"}}, 404)
        ids = render(body["messages"], body.get("tools")) if "messages" in body else words(body["prompt"])
        return JSONResponse({"count": len(ids), "tokens": ids, "max_model_len": WINDOW})

    async def metrics(_: Request) -> Response:
        if not fake.metrics:
            return PlainTextResponse("no", 404)
        lines = [
            "# TYPE vllm:prefix_cache_queries counter",
            *(f'vllm:prefix_cache_queries_total{{engine="{n}"}} {v}' for n, v in enumerate((1000.0, fake.queries))),
            "# TYPE vllm:prefix_cache_hits counter",
            *(f'vllm:prefix_cache_hits_total{{engine="{n}"}} {v}' for n, v in enumerate((900.0, fake.hits))),
            "# TYPE vllm:request_prefill_time_seconds histogram",
            f'vllm:request_prefill_time_seconds_bucket{{le="+Inf"}} {fake.answered}',
            f"vllm:request_prefill_time_seconds_sum {fake.prefill_sum}",
            f"vllm:request_prefill_time_seconds_count {fake.answered}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def answer(request: Request) -> Response:
        body = await request.json()
        if wrong := [name for name in fake.refuses if name in body]:
            return JSONResponse({"error": {"message": f"unknown field {wrong[0]}"}}, 400)
        fake.seen.append(body)
        number = len(fake.seen) - 2
        if number in fake.fail:
            return JSONResponse({"error": {"message": "out of luck"}}, 500)
        return StreamingResponse(stream(fake, body, number), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/metrics", metrics),
            Route("/v1/chat/completions", answer, methods=["POST"]),
            Route("/v1/completions", answer, methods=["POST"]),
        ]
    )


async def stream(fake: Fake, body: dict[str, Any], number: int) -> AsyncIterator[str]:
    """Role, tokens, finish reason, usage, [DONE], each after the delay set in ``fake``."""
    fake.in_flight += 1
    fake.most_in_flight = max(fake.most_in_flight, fake.in_flight)
    if fake.in_flight >= fake.gather:
        fake.gathered.set()
    chat = "messages" in body
    ids = render(body["messages"], body.get("tools")) if chat else words(body["prompt"])
    cached = fake.look_up(ids, body.get("cache_salt"))
    fake.queries += len(ids)
    fake.hits += cached
    count = body["max_tokens"] if body.get("ignore_eos") else min(body.get("max_tokens") or 5, 5)
    if chat:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(fake.role_first_s)
    if number >= 0:
        await fake.gathered.wait()
    await asyncio.sleep(fake.prefill_s)
    fake.answered += 1
    fake.prefill_sum += fake.prefill_s
    for index in range(count):
        if index:
            await asyncio.sleep(fake.step_s)
        text = "" if fake.silent else " word"
        last = index == count - 1
        reason = {"finish_reason": ("length" if last else None)}
        yield event({"choices": [{"index": 0, **({"delta": {"content": text}} if chat else {"text": text}), **reason}]})
        if number in fake.break_off:
            fake.in_flight -= 1
            return
    if fake.usage:
        usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": count}
        if fake.cached_in_usage:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        yield event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"
    fake.in_flight -= 1


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


@contextlib.contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """Run it on a free port in a thread; ``fake.url`` says where."""
    server = uvicorn.Server(uvicorn.Config(application(fake), host="127.0.0.1", port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < until, "the fake server did not start"
            time.sleep(0.01)
        fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)

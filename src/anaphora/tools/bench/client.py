"""Client of an OpenAI-compatible server: sends and times requests, counts tokens, reads /metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from anaphora.config import parse_server_url
from anaphora.errors import AnaphoraError, ConfigError
from anaphora.tools.shared.metrics_page import Growth, hits, parse
from anaphora.tools.shared.sse import EventParser

TIMEOUT = httpx.Timeout(30, read=900)
_PREFILL = "vllm:request_prefill_time_seconds"
WARM_UP = "Name three rivers of Europe, and say in one sentence through which countries each of them flows."


OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send.

    ``body`` has ``messages`` or ``prompt``. ``out`` is the most tokens of the answer (None: the body decides); with
    ``fixed`` the answer has exactly as many. ``wanted`` is the prompt length asked for, ``tokens`` are the prompt's
    token ids; both None if unknown.
    """

    body: dict[str, Any]
    out: int | None
    fixed: bool = True
    wanted: int | None = None
    tokens: tuple[int, ...] | None = None

    @property
    def path(self) -> str:
        """Route that the body belongs to."""
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


@dataclass(slots=True)
class RequestResult:
    """What happened to one request. Times are time.perf_counter(); None if there was no such event.

    ``content_events`` counts the events that carried text. ``cached_tokens`` are those that the server reported.
    """

    request: PlannedRequest
    started: float
    first_token: float | None = None
    last_token: float | None = None
    ended: float = 0.0
    content_events: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums from /metrics; None if the server has no such counter. ``prefill_buckets``: upper bound to count."""

    queries: float | None
    hits: float | None
    prefill_s: float | None
    prefills: float | None
    prefill_buckets: dict[float, float]


def read_counters(text: str) -> Counters:
    """Returns sums over all label sets (engines) of a /metrics page, under the names of any known server."""
    growth = Growth(parse(text))
    looked = hits(growth)
    return Counters(
        queries=looked.looked_up if looked else None,
        hits=looked.found if looked else None,
        prefill_s=growth.total(f"{_PREFILL}_sum"),
        prefills=growth.total(f"{_PREFILL}_count"),
        prefill_buckets=growth.at_most(_PREFILL),
    )


@dataclass(slots=True)
class Capabilities:
    """What the server accepts beyond OpenAI's API, as tried at the warm-up."""

    ignore_eos: bool = True
    salt: bool = True
    tokenize: bool = True
    notes: list[str] = field(default_factory=list)


class Server:
    """The server to measure. Call ``connect`` first and ``close`` at the end."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.url = parse_server_url(url)
        self.model = model
        self.window: int | None = None
        self.version: str | None = None
        self.capabilities = Capabilities()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=None),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=httpx.URL(self.url).host not in ("127.0.0.1", "localhost", "::1"),
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def connect(self) -> None:
        """Finds out model name, window and version, and warms the server up with one unrelated request.

        Raises ConfigError if no server answers or it refuses the key, AnaphoraError if it fails the request.
        """
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ConfigError(
                f"no server answers at {self.url} ({describe(error)}): start it, or check the URL"
            ) from None
        if response.status_code in (401, 403):
            raise ConfigError(f"{self.url} refuses the key (HTTP {response.status_code}): give the right --api-key")
        self._learn(response)
        self.version = await self._read_version()
        self.capabilities.tokenize = await self.tokenize({"prompt": WARM_UP}) is not None
        await self._warm_up()

    def _learn(self, response: httpx.Response) -> None:
        try:
            models = msgspec.json.decode(response.content, type=_Models).data
        except (msgspec.DecodeError, RecursionError):
            models = []
        if self.model is None:
            if not models:
                raise ConfigError(f"{self.url} lists no model at /v1/models: name it with --model")
            self.model = models[0].id
        for model in models:
            if model.id == self.model:
                self.window = model.max_model_len

    async def _read_version(self) -> str | None:
        try:
            response = await self._http.get("/version")
            return str(msgspec.json.decode(response.content)["version"]) if response.is_success else None
        except (httpx.HTTPError, msgspec.MsgspecError, KeyError, TypeError, RecursionError):
            return None

    async def _warm_up(self) -> None:
        """Finds out which fields the server refuses: the first request has all of them, the next ones fewer."""
        planned = PlannedRequest({"messages": [{"role": "user", "content": WARM_UP}]}, out=4)
        result = await self.send(planned, salt="warm-up")
        if result.error and result.error.startswith("HTTP 4"):
            self.capabilities.salt = False
            result = await self.send(planned)
        if result.error and result.error.startswith("HTTP 4"):
            self.capabilities.ignore_eos = False
            self.capabilities.notes.append("the server refuses ignore_eos, so answers may be shorter than asked for")
            result = await self.send(planned)
        if result.error:
            raise AnaphoraError(f"{self.url} fails a first short request: {result.error}")

    async def tokenize(self, body: dict[str, Any]) -> tuple[int, ...] | None:
        """Returns the token ids of a prompt or of rendered messages; None if the server has no /tokenize."""
        if not self.capabilities.tokenize:
            return None
        keep = ("messages", "prompt", "tools", "chat_template_kwargs")
        content = {key: body[key] for key in keep if body.get(key) is not None}
        try:
            response = await self._http.post("/tokenize", json={"model": self.model, **content})
            return msgspec.json.decode(response.content, type=_Tokens).tokens if response.is_success else None
        except (httpx.HTTPError, msgspec.DecodeError, RecursionError):
            return None

    async def counters(self) -> Counters | None:
        """Returns the sums of /metrics; None if the server has none."""
        try:
            response = await self._http.get("/metrics")
            return read_counters(response.text) if response.is_success else None
        except (httpx.HTTPError, ValueError):
            return None

    async def send(
        self, planned: PlannedRequest, salt: str | None = None, on_text: OnText | None = None
    ) -> RequestResult:
        """Sends a request and streams its answer; ``on_text`` is called with each piece of text.

        Failures are in the result's ``error``; nothing is raised.
        """
        body = self._complete(planned, salt)
        result = RequestResult(planned, started=time.perf_counter())
        try:
            async with self._http.stream("POST", planned.path, json=body) as response:
                if response.is_success:
                    await read_stream(response.aiter_bytes(), result, on_text)
                else:
                    result.error = (
                        f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace'):.300}"
                    )
        except httpx.HTTPError as error:
            result.error = describe(error)
        result.ended = time.perf_counter()
        return result

    def _complete(self, planned: PlannedRequest, salt: str | None) -> dict[str, Any]:
        body = planned.body | {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"temperature": 0}
        if planned.out is not None:
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = planned.out
            if planned.fixed and self.capabilities.ignore_eos:
                body["ignore_eos"] = True
        if salt is not None and self.capabilities.salt:
            body["cache_salt"] = f"{salt}/{own}" if (own := planned.body.get("cache_salt")) else salt
        return body


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: tuple[int, ...]


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """One event of a streamed completion."""

    error: Any = None
    choices: list[_Choice] | None = None
    usage: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


def describe(error: Exception) -> str:
    """Returns class and message of an exception; httpx's often have no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def read_stream(
    chunks: AsyncIterator[bytes],
    result: RequestResult,
    on_text: OnText | None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Reads the server-sent events of one answer into ``result``, and calls ``on_text`` with each piece of its text.

    The first token is the first event that carries content. Stops at an error.
    """
    parser = EventParser()
    ended = False
    async for chunk in chunks:
        now = clock()
        for data in parser.feed(chunk):
            ended = _read_event(data, result, on_text, now) or ended
        if result.error:
            return
    for data in parser.close():
        ended = _read_event(data, result, on_text, clock()) or ended
    if not ended:
        result.error = result.error or "the stream ended without a finish reason"


def _read_event(data: bytes, result: RequestResult, on_text: OnText | None, now: float) -> bool:
    """Returns whether the answer ended with this event, which arrived at ``now``."""
    if data == b"[DONE]":
        return True
    try:
        event = _EVENTS.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        kind = "is not an event of a completion" if isinstance(error, msgspec.ValidationError) else "is not JSON"
        result.error = f"the server sent what {kind}: {data.decode(errors='replace'):.100}"
        return False
    if event.error:
        result.error = f"the server broke off: {event.error!s:.300}"
        return False
    _read_usage(event.usage, result)
    ended = False
    for choice in event.choices or ():
        if content := _content(choice):
            result.first_token = result.first_token or now
            result.last_token = now
            result.content_events += 1
            if on_text is not None:
                on_text(content)
        if choice.finish_reason is not None:
            ended, result.last_token = True, now
            if choice.finish_reason in ("error", "abort"):
                result.error = f"the answer ended with {choice.finish_reason}"
    return ended


def _content(choice: _Choice) -> str:
    """Returns what an event adds to the answer: its text, or its tool calls as text."""
    delta = choice.delta or {}
    fields = (
        choice.text,
        *(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")),
    )
    return next((str(field) for field in fields if field), "")


def _read_usage(usage: Any, result: RequestResult) -> None:
    """Takes the latest usage; fields missing in it keep their earlier values, and so do those that are not counts."""
    if not isinstance(usage, dict):
        return
    details = usage.get("prompt_tokens_details")
    counts = (
        ("prompt_tokens", usage.get("prompt_tokens")),
        ("output_tokens", usage.get("completion_tokens")),
        ("cached_tokens", details.get("cached_tokens") if isinstance(details, dict) else None),
    )
    for name, count in counts:
        if type(count) is int and count >= 0:
            setattr(result, name, count)

"""Servers for tests: over a scripted engine, over an engine process, and as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
from starlette.types import ASGIApp

from anaphora.config import EngineConfig, ModelConfig, ServerConfig, from_dict
from anaphora.errors import EngineDead
from anaphora.remote.client import EngineClient
from anaphora.server.app import build_app, load_text, serve
from anaphora.server.service import ModelNames, Service
from anaphora.types.batch import ModelInfo, TokenLogprobs
from anaphora.types.outputs import EngineInfo, EngineStats, FinishReason, PromptDone, SequenceUpdate, StepResult
from anaphora.types.reports import CacheReport
from anaphora.types.request import Request
from tests.support.tokenizers import write_tokenizer

MODEL = "tiny"
VOCAB = 259
FAKE = "tests.support.engine:load_fake"
ROOT = Path(__file__).resolve().parents[2]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class ScriptedEngine:
    """Answers every request with the ids of ``reply``, one per step, then EOS."""

    reply: tuple[int, ...]
    info: EngineInfo
    eos: int
    stats: EngineStats = field(default_factory=lambda: EngineStats(total_blocks=64))
    dead: str | None = None
    hung: str | None = None
    cache_fault: str | None = None
    on_step: list[Callable[[StepResult], None]] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    fail_after: int | None = None
    cached: int = 0
    report: CacheReport | None = None
    hold: asyncio.Event | None = None

    async def generate(self, request: Request) -> AsyncIterator[SequenceUpdate]:
        if self.dead is not None:
            raise EngineDead(self.dead)
        self.seen.append(request)
        self.running.add(request.id)
        left = dict.fromkeys(range(request.sampling.n))
        self.open = left
        try:
            for step, token in enumerate((*self.reply, self.eos)):
                for choice in list(left):
                    yield self._update(request, choice, step, token)
                    if token == self.eos or step + 1 >= (request.sampling.max_tokens or 0):
                        left.pop(choice, None)
                if not left:
                    return
                await (self.hold.wait() if self.hold is not None and step == 0 else asyncio.sleep(0))
        finally:
            self.running.discard(request.id)
            if left:
                self.aborted.append(request.id)

    async def finish_choice(self, request_id: str, choice: int) -> None:
        self.open.pop(choice, None)

    async def reset_prefix_cache(self) -> bool:
        return not self.running

    async def explain(self, request: Request) -> CacheReport:
        return self._report(request)

    def _report(self, request: Request) -> CacheReport:
        length = len(request.prompt_token_ids)
        if self.report is not None:
            return replace(self.report, prompt_tokens=length)
        return CacheReport(length, self.cached, "hit" if self.cached else "cold")

    def _update(self, request: Request, choice: int, step: int, token: int) -> SequenceUpdate:
        sampling, now = request.sampling, time.monotonic()
        if step == self.fail_after:
            return SequenceUpdate(request.id, choice, (), now, finish_reason=FinishReason.ERROR, error="out of memory")
        finish = None
        if token == self.eos:
            finish = FinishReason.STOP
        elif step + 1 >= (sampling.max_tokens or 0):
            finish = FinishReason.LENGTH
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = (scored(token, sampling.logprobs),)
        done = None
        if step == 0 and choice == 0:
            done = PromptDone(self._report(request), 0.25, 0.0, 0.5, self._prompt_scores(request))
        tokens = (token,) if sampling.max_tokens else ()
        return SequenceUpdate(request.id, choice, tokens, now, logprobs if tokens else None, done, finish)

    def _prompt_scores(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        top = request.sampling.prompt_logprobs
        if top is None:
            return None
        return (None, *(scored(token, top) for token in request.prompt_token_ids[1:]))


def scored(token: int, top: int) -> TokenLogprobs:
    """Returns made-up log-probabilities: the token itself is the most likely, its neighbours follow."""
    return TokenLogprobs(token, -0.5, 1, tuple((token + n, -0.5 - n) for n in range(top)))


def tiny_info(max_model_len: int = 512) -> EngineInfo:
    model = ModelInfo(MODEL, "identity", VOCAB, 512, 65, 16, 1024, "float32", "float32", "cpu")
    return EngineInfo(model, max_model_len)


@dataclass
class ScriptedServer:
    """The application over a scripted engine, and an HTTP client."""

    engine: ScriptedEngine
    service: Service
    app: ASGIApp
    client: httpx.AsyncClient


@contextlib.asynccontextmanager
async def scripted(folder: Path, reply: str = "Hello, world", **server: object) -> AsyncIterator[ScriptedServer]:
    """Yields a ScriptedServer; ``server`` are fields of ServerConfig."""
    config = EngineConfig()
    folder.mkdir(parents=True, exist_ok=True)
    eos = write_tokenizer(folder, VOCAB, CHATML)
    text = load_text(folder, config)
    engine = ScriptedEngine(tuple(text.tokenizer.encode(reply, add_special_tokens=False)), tiny_info(), eos)
    service = Service(
        engine, text, ModelNames((MODEL, "alias"), "org/tiny"), ServerConfig(**server), {"block_size": "16"}
    )  # type: ignore[arg-type]
    app = build_app(service)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield ScriptedServer(engine, service, app, client)
    finally:
        service.close()


@dataclass
class EngineServer:
    """The application over an engine process with a fake runner, and an HTTP client."""

    engine: EngineClient
    service: Service
    app: ASGIApp
    client: httpx.AsyncClient


@contextlib.asynccontextmanager
async def engine_server(
    folder: Path, max_model_len: int, runner: str = FAKE, **server: object
) -> AsyncIterator[EngineServer]:
    """Yields an EngineServer and ends with the engine's invariant check; ``server`` are fields of ServerConfig."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, 1000, CHATML)
    config = EngineConfig(ModelConfig(max_model_len=max_model_len), runner=runner)
    engine = await EngineClient.start(config)
    service = Service(engine, load_text(folder, config), ModelNames((MODEL,), MODEL), ServerConfig(**server), {})  # type: ignore[arg-type]
    try:
        app = build_app(service)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield EngineServer(engine, service, app, client)
        await engine.check()
    finally:
        service.close()
        await engine.close()


def events(body: str) -> list[dict[str, object]]:
    """Returns the JSON documents of an event stream, which must end in [DONE]."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@dataclass
class RunningServer:
    """``anaphora serve`` as a process. ``log`` grows while it runs."""

    process: subprocess.Popen[str]
    url: str
    log: list[str]

    def stop(self, number: int = signal.SIGINT, timeout: float = 20) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


def environment() -> dict[str, str]:
    """Returns an environment in which server processes and their children can import ``tests``."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def cli_server(model: Path | str, *flags: str) -> contextlib.AbstractContextManager[RunningServer]:
    """Runs ``anaphora serve MODEL FLAGS`` on a free port."""
    command = [sys.executable, "-m", "anaphora", "serve", str(model), "--host", "127.0.0.1", "--port", "0", *flags]
    return running_server(command)


def fake_server(folder: Path, runner: str = FAKE, **server: object) -> contextlib.AbstractContextManager[RunningServer]:
    """Runs the server with an engine process and a runner without a model.

    ``server`` are fields of ServerConfig, and ``max_model_len``.
    """
    return running_server(fake_command(folder, runner, **server))


def fake_command(folder: Path, runner: str = FAKE, **server: object) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, 1000, CHATML)
    return [sys.executable, "-m", "tests.support.servers", str(folder), runner, json.dumps(server)]


@contextlib.contextmanager
def running_server(command: list[str], timeout: float = 60) -> Iterator[RunningServer]:
    """Runs a server's command until the block ends; it accepts connections when the block begins."""
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    assert process.stderr is not None
    errors = process.stderr
    log: list[str] = []
    address: list[str] = []
    known = threading.Event()

    def follow() -> None:
        for line in errors:
            log.append(line)
            if " at http://" in line:
                address.append(line.split(" at ")[1].split("/v1")[0])
                known.set()
        known.set()

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        known.wait(timeout)
        assert address, f"the server did not start:\n{''.join(log)}"
        yield RunningServer(process, address[0], log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(5)
        errors.close()


@dataclass(frozen=True)
class FakeSource:
    folder: Path
    name: str = MODEL


if __name__ == "__main__":
    _, folder, runner, server = sys.argv
    settings = {"host": "127.0.0.1", "port": 0} | json.loads(server)
    config = EngineConfig(ModelConfig(max_model_len=settings.pop("max_model_len", None)), runner=runner)
    sys.exit(serve(config, from_dict(ServerConfig, settings), FakeSource(Path(folder))))

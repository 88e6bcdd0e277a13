"""The server process: builds the application, starts the engine, serves until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from anaphora.advice.server_flags import FlagWarning, ServerSettings, check_server_flags
from anaphora.advice.template_checks import check_template
from anaphora.config import EngineConfig, ServerConfig
from anaphora.errors import AnaphoraError, ConfigError
from anaphora.observe.log import describe_pool
from anaphora.observe.record import open_log
from anaphora.remote.client import EngineClient
from anaphora.server.api.routes import on_crash, on_error, on_http_error, routes
from anaphora.server.cache_api.warm import Entry, read_warm_file, warm_up
from anaphora.server.http.asgi import KeyGuard, Straight
from anaphora.server.http.lifetime import Ending, Server
from anaphora.server.service import Names, Service, TextSide
from anaphora.text.chat_template import read_template
from anaphora.text.generation_config import load_defaults
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import EngineInfo

logger = logging.getLogger("anaphora.server")

STILL_LOADING_S = 30


class Source(Protocol):
    """A resolved model (model.source.ModelSource)."""

    @property
    def folder(self) -> Path: ...
    @property
    def name(self) -> str: ...


def build_app(service: Service) -> ASGIApp:
    """The ASGI application over a service; closing the service is the caller's part."""
    app = Starlette(
        routes=routes(service),
        exception_handlers={AnaphoraError: on_error, HTTPException: on_http_error, Exception: on_crash},
    )
    keys = service.config.api_key
    return Straight(KeyGuard(app, keys, app.routes) if keys else app)


def load_text(folder: Path, config: EngineConfig) -> TextSide:
    """Tokenizer, chat template and sampling defaults of a model folder."""
    tokenizer = Tokenizer.load(folder)
    template = tokenizer.chat_template
    if config.model.chat_template is not None:
        template = read_template(config.model.chat_template, tokenizer.special_tokens)
    return TextSide(tokenizer, template, load_defaults(folder, config.model.generation_config, tokenizer))


def cache_settings(config: EngineConfig, client: EngineClient) -> dict[str, str]:
    """The labels of vllm:cache_config_info."""
    model, cache = client.info.model, config.cache
    return {
        "block_size": str(model.block_size),
        "cache_dtype": model.kv_dtype,
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        "kv_cache_memory_bytes": str(cache.kv_cache_memory_bytes),
        "num_gpu_blocks": str(model.num_blocks),
        "prefix_caching_hash_algo": "sha256",
    }


def serve(engine_config: EngineConfig, server_config: ServerConfig, source: Source) -> int:
    """Serve the model until SIGINT or SIGTERM; returns the exit code.

    A taken port, a log that cannot be written or a --warm file that cannot be read is told at once, before the model is
    loaded (ConfigError). Requests that run at the end get ``shutdown_timeout`` seconds; a second signal cuts that short
    and kills the engine process, which ends with the server in every case.
    """
    _configure_logging()
    if server_config.record is not None:
        open_log(Path(server_config.record)).close()
    prefixes = read_warm_file(server_config.warm) if server_config.warm is not None else []
    if prefixes and not engine_config.cache.enable_prefix_caching:
        raise ConfigError("--warm needs prefix caching; leave --no-enable-prefix-caching out")
    listeners = _bind(server_config.host, server_config.port)
    model = dataclasses.replace(engine_config.model, model=str(source.folder))
    config = dataclasses.replace(engine_config, model=model)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.ExitStack() as closing:
        for listener in listeners:
            closing.enter_context(listener)
        runner.run(_serve(config, server_config, source, listeners, prefixes))
    return 0


async def _serve(
    config: EngineConfig,
    server_config: ServerConfig,
    source: Source,
    listeners: list[socket.socket],
    prefixes: list[Entry],
) -> None:
    began = time.monotonic()
    ending = Ending()
    told = asyncio.create_task(ending.told.wait())
    logger.info("loading %s", _what_takes_time(source))
    starting = asyncio.create_task(EngineClient.start(config))
    loading = asyncio.create_task(asyncio.to_thread(load_text, source.folder, config))
    patience = asyncio.create_task(_say_that_it_takes_long(source.name))

    def on_signal(number: int) -> None:
        ending.signal(number)
        if ending.at_once.is_set() and _came(starting):
            starting.result().kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        if not await _before(asyncio.gather(starting, loading), told):
            logger.info("%s: ended before the engine was ready", ending.why)
            return
        patience.cancel()
        client, text = starting.result(), loading.result()
        names = Names(config.model.served_model_name or (source.name,), source.name)
        service = Service(client, text, names, server_config, cache_settings(config, client))
        for warning in (*client.info.warnings, *await asyncio.to_thread(_flag_warnings, config, client.info, text)):
            logger.warning("%s", warning)
        logger.info("%s", describe_pool(client.info))
        gc.collect()
        gc.freeze()  # what is there now stays; the collector need not look at it again
        server = Server(
            build_app(service),
            ending,
            server_config.shutdown_timeout,
            client.fail,
            lambda: _announce(names.served, listeners[0], began),
        )
        try:
            if prefixes and not await _before(asyncio.create_task(warm_up(service, prefixes)), told):
                logger.info("%s: ended before the prefixes of --warm were computed", ending.why)
                return
            await server.serve(sockets=listeners)
        finally:
            service.close()
    finally:
        told.cancel()
        patience.cancel()
        await _close(starting)
        logger.info("ended")


def _came(starting: asyncio.Task[EngineClient]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None


def _flag_warnings(config: EngineConfig, info: EngineInfo, text: TextSide) -> list[FlagWarning]:
    """Returns what in the settings and in the chat template breaks reuse or memory."""
    checks = check_template(text.template) if text.template is not None else []
    setup = ServerSettings(
        exact=True,
        prefix_caching=config.cache.enable_prefix_caching,
        block_size=info.model.block_size,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        max_num_seqs=config.scheduler.max_num_seqs if info.model.device != "cpu" else None,
        pool_tokens=(info.model.num_blocks - 1) * info.model.block_size,
        gpu_memory_utilization=config.cache.gpu_memory_utilization if info.model.device != "cpu" else None,
        template=tuple((check.problem, check.mend) for check in checks if check.problem and check.breaks),
    )
    return check_server_flags(setup)


def _what_takes_time(source: Source) -> str:
    size = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    weights = f"{size / 2**30:.2f} GiB of weights" if size else "the weights"
    return f"{source.name} from {source.folder}: {weights}, then the cache and a first step"


async def _say_that_it_takes_long(name: str) -> None:
    waited = 0
    while True:
        await asyncio.sleep(STILL_LOADING_S)
        waited += STILL_LOADING_S
        logger.info("still loading %s, for %d s", name, waited)


async def _before(work: asyncio.Future[Any], end: asyncio.Task[bool]) -> bool:
    """Whether ``work`` came to its end before ``end`` did; raises what it raised."""
    await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        return False
    await work
    return True


async def _close(starting: asyncio.Task[EngineClient]) -> None:
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, AnaphoraError):
        await (await starting).close()


def _announce(names: tuple[str, ...], listener: socket.socket, began: float) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    logger.info(
        "serving %s at http://%s:%d/v1, ready after %.1f s", ", ".join(names), shown, port, time.monotonic() - began
    )


def _bind(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of ``host``; an address that this machine lacks is left out."""
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            taken = bound[0].getsockname()[1] if bound else port
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind((address[0], taken, *address[2:]))
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
            else:
                bound.append(listener)
    except (OSError, OverflowError) as error:
        for listener in bound:
            listener.close()
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error}") from None
    if not bound:
        raise ConfigError(f"cannot listen on --host {host}: it is no address of this machine")
    return bound


def _configure_logging() -> None:
    """To standard error; ANAPHORA_LOGGING_LEVEL (DEBUG, INFO, WARNING …) says how much. ConfigError if it is none."""
    wanted, levels = os.environ.get("ANAPHORA_LOGGING_LEVEL", "INFO").upper(), logging.getLevelNamesMapping()
    if wanted not in levels:
        raise ConfigError(f"ANAPHORA_LOGGING_LEVEL must be one of {', '.join(levels)}, got {wanted!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("anaphora", wanted), ("uvicorn", "WARNING")):
        named = logging.getLogger(name)
        named.handlers = [handler]
        named.propagate = False
        named.setLevel(level)

"""The server process: starts the engine, builds the application, and serves until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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
from anaphora.observe.log_lines import describe_pool
from anaphora.observe.record import open_log
from anaphora.remote.client import EngineClient
from anaphora.server.cache_api.warm_file import WarmEntry, read_warm_file, warm_up
from anaphora.server.http.asgi import ApiKeyMiddleware, DirectSendMiddleware
from anaphora.server.http.uvicorn_server import HttpServer, Shutdown
from anaphora.server.listening import bind
from anaphora.server.routes import on_crash, on_error, on_http_error, routes
from anaphora.server.service import ModelNames, Service, TextComponents
from anaphora.text.chat_template import read_template
from anaphora.text.generation_config import load_defaults
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import EngineInfo

logger = logging.getLogger("anaphora.server")

STILL_LOADING_S = 30


class Source(Protocol):
    """A resolved model (checkpoint.resolve.ModelSource)."""

    @property
    def folder(self) -> Path: ...
    @property
    def name(self) -> str: ...


def build_app(service: Service) -> ASGIApp:
    """Returns the ASGI application over a service. The caller closes the service."""
    app = Starlette(
        routes=routes(service),
        exception_handlers={AnaphoraError: on_error, HTTPException: on_http_error, Exception: on_crash},
    )
    keys = service.config.api_key
    return DirectSendMiddleware(ApiKeyMiddleware(app, keys, app.routes) if keys else app)


def load_text(folder: Path, config: EngineConfig) -> TextComponents:
    """Loads tokenizer, chat template and sampling defaults of a model folder. Raises ConfigError or ModelError."""
    tokenizer = Tokenizer.load(folder)
    template = tokenizer.chat_template
    if config.model.chat_template is not None:
        template = read_template(config.model.chat_template, tokenizer.special_tokens)
    return TextComponents(tokenizer, template, load_defaults(folder, config.model.generation_config, tokenizer))


def cache_settings(config: EngineConfig, client: EngineClient) -> dict[str, str]:
    """Returns the labels of the metric vllm:cache_config_info."""
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
    """Serves the model until SIGINT or SIGTERM; returns the exit code.

    At shutdown, running requests have ``shutdown_timeout`` seconds; a second signal ends them at once and kills the
    engine process.

    Raises:
        ConfigError: before the model is loaded, for a port in use, a log that cannot be written, or a --warm file that
            cannot be read; later, for a model or prefix that cannot be served.
    """
    _configure_logging()
    if server_config.record is not None:
        open_log(Path(server_config.record)).close()
    prefixes = read_warm_file(server_config.warm) if server_config.warm is not None else []
    if prefixes and not engine_config.cache.enable_prefix_caching:
        raise ConfigError("--warm needs prefix caching; remove --no-enable-prefix-caching")
    listeners = bind(server_config.host, server_config.port)
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
    prefixes: list[WarmEntry],
) -> None:
    began = time.monotonic()
    shutdown = Shutdown()
    shutdown_requested = asyncio.create_task(shutdown.requested.wait())
    logger.info("loading %s", _describe_loading(source))
    starting = asyncio.create_task(EngineClient.start(config))
    loading = asyncio.create_task(asyncio.to_thread(load_text, source.folder, config))
    reminder = asyncio.create_task(_log_still_loading(source.name))

    def on_signal(number: int) -> None:
        shutdown.signal(number)
        if shutdown.forced.is_set() and _succeeded(starting):
            starting.result().kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        if not await _completes_before(asyncio.gather(starting, loading), shutdown_requested):
            logger.info("%s: shut down before the engine was ready", shutdown.signal_name)
            return
        reminder.cancel()
        client, text = starting.result(), loading.result()
        names = ModelNames(config.model.served_model_name or (source.name,), source.name)
        service = Service(client, text, names, server_config, cache_settings(config, client))
        await _log_setup(config, client.info, text)
        gc.collect()
        gc.freeze()  # what exists now lives as long as the process: the collector need not visit it again
        server = HttpServer(
            build_app(service),
            shutdown,
            server_config.shutdown_timeout,
            client.fail,
            lambda: _announce(names.served, listeners[0], began),
        )
        try:
            if prefixes and not await _completes_before(
                asyncio.create_task(warm_up(service, prefixes)), shutdown_requested
            ):
                logger.info("%s: shut down before the prefixes of --warm were computed", shutdown.signal_name)
                return
            await server.serve(sockets=listeners)
        finally:
            service.close()
    finally:
        shutdown_requested.cancel()
        reminder.cancel()
        await _close(starting)
        logger.info("shut down")


def _succeeded(starting: asyncio.Task[EngineClient]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None


async def _log_setup(config: EngineConfig, info: EngineInfo, text: TextComponents) -> None:
    for warning in (*info.warnings, *await asyncio.to_thread(_flag_warnings, config, info, text)):
        logger.warning("%s", warning)
    logger.info("%s", describe_pool(info))


def _flag_warnings(config: EngineConfig, info: EngineInfo, text: TextComponents) -> list[FlagWarning]:
    """Returns the settings, and parts of the chat template, that prevent reuse or waste memory."""
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


def _describe_loading(source: Source) -> str:
    size = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    weights = f"{size / 2**30:.2f} GiB of weights" if size else "the weights"
    return f"{source.name} from {source.folder}: {weights}, then the cache and a first step"


async def _log_still_loading(name: str) -> None:
    waited = 0
    while True:
        await asyncio.sleep(STILL_LOADING_S)
        waited += STILL_LOADING_S
        logger.info("still loading %s, for %d s", name, waited)


async def _completes_before(work: asyncio.Future[Any], other: asyncio.Task[bool]) -> bool:
    """Returns whether ``work`` completes before ``other``, and cancels it if not. Raises what ``work`` raises."""
    await asyncio.wait((work, other), return_when=asyncio.FIRST_COMPLETED)
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


def _configure_logging() -> None:
    """Logs to standard error at the level of ANAPHORA_LOGGING_LEVEL. Raises ConfigError if that is not a level."""
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

"""``anaphora record``: listens, records until a signal, prints a summary."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import sys

from anaphora.config import parse_server_url
from anaphora.errors import ConfigError
from anaphora.observe.record import RecordWriter
from anaphora.tools.record.options import RecordOptions
from anaphora.tools.record.proxy import Proxy, Upstream

BACKLOG = 1024
OPEN_FILES = 65536
"""Limit to set: each client needs two, and with the usual 1,024 the recorder would refuse clients that the server
accepts."""


def main(options: RecordOptions) -> int:
    """Records until a signal, then waits for running responses; a second signal cuts them off."""
    assert options.upstream is not None
    assert options.out is not None
    _raise_file_limit()
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s")
    upstream = Upstream.parse(parse_server_url(options.upstream))
    writer = RecordWriter(options.out, flag="--out", rotate_bytes=options.rotate_bytes)
    proxy = Proxy(upstream, writer, keep_prompts=options.record_prompts, ask_usage=options.ask_usage)
    try:
        asyncio.run(_serve(proxy, options))
    finally:
        writer.close()
    _say(f"{writer.written:,} requests recorded in {options.out}")
    if writer.dropped:
        _say(f"{writer.dropped:,} requests passed without a record (the warnings above say why)")
    if proxy.unrecorded:
        _say(f"{proxy.unrecorded:,} requests passed without a record: their messages could not be read as HTTP/1.1")
    if proxy.with_usage < proxy.responses:
        without = proxy.responses - proxy.with_usage
        _say(f"{without:,} responses had no usage: clients must ask for it, or start with --ask-usage")
    if proxy.with_cached < proxy.with_usage:
        _say(
            f"{proxy.with_usage - proxy.with_cached:,} responses had no cached tokens: vLLM reports them with "
            "--enable-prompt-tokens-details"
        )
    return 0


async def _serve(proxy: Proxy, options: RecordOptions) -> None:
    try:
        server = await asyncio.start_server(proxy.serve, options.host, options.port, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on --host {options.host} --port {options.port}: {error}") from None
    port = server.sockets[0].getsockname()[1]
    try:
        _refuse_a_loop(proxy.upstream, port)
        await _until_signal(proxy, options, port)
    finally:
        server.close()
    await _shut_down(proxy)


async def _until_signal(proxy: Proxy, options: RecordOptions, port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    prompts = "with prompts" if options.record_prompts else "without prompts"
    _say(f"recording at http://{options.host}:{port} to {options.out} ({prompts}); server: {options.upstream}")
    await stop.wait()


async def _shut_down(proxy: Proxy) -> None:
    loop = asyncio.get_running_loop()
    ending = asyncio.ensure_future(proxy.shut_down())
    if proxy.pending_requests:
        _say(f"waiting for {proxy.pending_requests} running requests (again: cut them off)")
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await ending


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _refuse_a_loop(upstream: Upstream, port: int) -> None:
    if upstream.port == port and upstream.host in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):
        raise ConfigError(f"--upstream and --port name the same port {port} of this machine: choose another --port")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""--warm FILE: prefixes that are computed and pinned before the server is ready."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from anaphora.advice.server_flags import ServerSettings, check_server_flags
from anaphora.errors import ConfigError, InvalidRequest, NotFound
from anaphora.server.api.body_parsing import parse
from anaphora.server.api.protocol import Body, ChatPrefix, CompletionPrefix
from anaphora.server.api.request_context import RequestContext
from anaphora.server.cache_api.prefix_routes import compute_and_pin
from anaphora.server.service import Service

logger = logging.getLogger("anaphora.server")


@dataclass(frozen=True, slots=True)
class WarmEntry:
    """One entry of the file; ``where`` is flag, path and line, for messages."""

    where: str
    body: Body
    raw: dict[str, Any]


def read_warm_file(path: str) -> list[WarmEntry]:
    """Reads the prefixes in a file: a JSON document, a JSON list, JSON lines, or else the whole file as one text.

    A JSON object is a body of /v1/chat/completions or /v1/completions; a JSON string is the text of a prompt. If the
    file is one text, its last line break is dropped.

    Raises:
        ConfigError: names the line that cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a path
        raise ConfigError(f"--warm cannot read {path}: {error}") from None
    entries = [_entry(f"--warm {path}{place}", value) for place, value in _values(text, path)]
    if not entries:
        raise ConfigError(f"--warm {path} is empty: write one request body per line, or a text")
    return entries


def _values(text: str, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the values in the file, each with its position for messages."""
    if not text.lstrip().startswith(("{", "[", '"')):
        if text.strip():
            yield "", text.removesuffix("\n")
        return
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield f", line {number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(
                        f"--warm {path}, line {number}: not valid JSON: {error} (a text must be a JSON string here)"
                    ) from None
        return
    if isinstance(whole, list):
        yield from ((f", entry {number}", value) for number, value in enumerate(whole, 1))
    else:
        yield "", whole


def _entry(where: str, value: Any) -> WarmEntry:
    plain = {"prompt": value} if isinstance(value, str) else value
    try:
        body, raw = parse(msgspec.json.encode(plain), ChatPrefix, CompletionPrefix)
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error.message}") from None
    except (UnicodeEncodeError, RecursionError) as error:  # half a character, or nested too deeply
        raise ConfigError(f"{where}: not a request body: {error}") from None
    return WarmEntry(where, body, raw)


async def warm_up(service: Service, entries: list[WarmEntry]) -> None:
    """Computes and pins the entries one after another. Raises ConfigError, naming the entry that cannot be pinned."""
    began = time.monotonic()
    tokens, block_size = 0, service.info.model.block_size
    for entry in entries:
        try:
            service.model_name(entry.body.model)
            context = RequestContext(entry.body, entry.raw, "--warm", time.monotonic(), None)
            reports = await compute_and_pin(service, context)
        except (InvalidRequest, NotFound) as error:
            raise ConfigError(f"{entry.where}: {error.message}") from None
        tokens += sum(report.tokens for report in reports)
        settings = ServerSettings(exact=True, block_size=block_size, system_tokens=min(r.tokens for r in reports))
        for warning in check_server_flags(settings):
            logger.warning("%s: %s", entry.where, warning)
    logger.info(
        "warmed and pinned %d prefixes of %d tokens in %.1f s; %d of %d KV blocks are pinned",
        *(len(entries), tokens, time.monotonic() - began),
        *(service.engine.stats.pinned_blocks, service.engine.stats.total_blocks),
    )

"""--warm FILE: beginnings of prompts that are computed before the server is ready, and kept."""

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
from anaphora.server.api.protocol import Body, ChatPrefix, TextPrefix, parse
from anaphora.server.cache_api.prefix_routes import keep
from anaphora.server.service import Call, Service

logger = logging.getLogger("anaphora.server")


@dataclass(frozen=True, slots=True)
class Entry:
    """One beginning of the file; ``where`` names its place for messages."""

    where: str
    body: Body
    plain: dict[str, Any]


def read_warm_file(path: str) -> list[Entry]:
    """The beginnings in a file: one JSON document or a list, JSON lines, or else the whole file as one text.

    A JSON object is a body of /v1/chat/completions or /v1/completions, a JSON string is the text of a prompt; of a file
    that is one text the last line break is left out. ConfigError, naming the line, for what cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no path
        raise ConfigError(f"--warm cannot read {path}: {error}") from None
    entries = [_entry(f"--warm {path}{place}", value) for place, value in _values(text, path)]
    if not entries:
        raise ConfigError(f"--warm {path} holds nothing: write a request body a line, or a text")
    return entries


def _values(text: str, path: str) -> Iterator[tuple[str, Any]]:
    """What the file holds, each with its place in it."""
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
                        f"--warm {path}, line {number}: no valid JSON: {error} (a text must be a JSON string here)"
                    ) from None
        return
    if isinstance(whole, list):
        yield from ((f", entry {number}", value) for number, value in enumerate(whole, 1))
    else:
        yield "", whole


def _entry(where: str, value: Any) -> Entry:
    plain = {"prompt": value} if isinstance(value, str) else value
    try:
        body, checked = parse(msgspec.json.encode(plain), ChatPrefix, TextPrefix)
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error.message}") from None
    except (UnicodeEncodeError, RecursionError) as error:  # half a character, nested too deeply
        raise ConfigError(f"{where}: no body of a request: {error}") from None
    return Entry(where, body, checked)


async def warm_up(service: Service, entries: list[Entry]) -> None:
    """Compute and pin them, one after another. ConfigError names the entry that cannot be kept."""
    began = time.monotonic()
    tokens, block = 0, service.info.model.block_size
    for entry in entries:
        try:
            service.model_name(entry.body.model)
            call = Call(entry.body, entry.plain, "--warm", time.monotonic(), None)
            reports = await keep(service, call)
        except (InvalidRequest, NotFound) as error:
            raise ConfigError(f"{entry.where}: {error.message}") from None
        tokens += sum(report.tokens for report in reports)
        settings = ServerSettings(exact=True, block_size=block, system_tokens=min(r.tokens for r in reports))
        for warning in check_server_flags(settings):
            logger.warning("%s: %s", entry.where, warning)
    logger.info(
        "warmed and pinned %d prefixes of %d tokens in %.1f s; %d of %d KV blocks are pinned",
        *(len(entries), tokens, time.monotonic() - began),
        *(service.engine.stats.pinned_blocks, service.engine.stats.total_blocks),
    )

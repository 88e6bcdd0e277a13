"""Reads requests from a log: the airline conversations, or the user's JSONL of request bodies or records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from anaphora.errors import ConfigError
from anaphora.tools.bench.client import PlannedRequest, Server
from anaphora.tools.bench.exact_lengths import estimate
from anaphora.tools.bench.workloads import Session

_TIME_KEYS = ("time", "timestamp", "arrival", "created")


def read_log(path: str, out: int | None, timing: bool) -> list[Session]:
    """Returns one session per line, in the order of the log, or with ``timing`` in the order of arrival.

    The answer's length is ``out``, else the recorded one, else the body's own limit. Raises ConfigError with the line's
    number for a line without a body.
    """
    found = []
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        body = _body_of(line, where)
        recorded = line.get("output_tokens") if line is not body else None
        length = out or recorded or None
        planned = PlannedRequest(body, length, fixed=length is not None)
        found.append((_arrival(line, where) if timing else 0.0, planned))
    if not found:
        raise ConfigError(f"{path} has no request")
    found.sort(key=lambda entry: entry[0])
    start = found[0][0]
    return [Session((planned,), burst=index, at=at - start) for index, (at, planned) in enumerate(found)]


def _lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, msgspec.json.decode(line, type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read the log {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}, line {number} is not a JSON object: {error}") from None


def _body_of(line: dict[str, Any], where: str) -> dict[str, Any]:
    for candidate in (line.get("body"), line.get("request"), line):
        if isinstance(candidate, dict) and (candidate.get("messages") or candidate.get("prompt")):
            return candidate
    if "prompt_tokens" in line:
        raise ConfigError(f"{where} has lengths but no body: record again with --record-prompts")
    raise ConfigError(f"{where} has no request: neither messages nor prompt")


def _arrival(line: dict[str, Any], where: str) -> float:
    """Returns Unix seconds from a number or an ISO time."""
    for key in _TIME_KEYS:
        value = line.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) / (1000 if value > 1e11 else 1)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                raise ConfigError(f"{where}: {key} is {value!r}, neither seconds nor an ISO time") from None
    raise ConfigError(f"{where} has no arrival time ({', '.join(_TIME_KEYS)}), which --timing needs")


def read_airline(folder: str | None, requests: int) -> list[Session]:
    """Reads conversations as sessions: each assistant message is a request whose prompt is all that precedes it.

    Raises ConfigError if ``folder`` is None or has no log.
    """
    if folder is None:
        raise ConfigError(
            "the agent workload replays the airline conversations of tau-bench: name the folder with "
            "airline_conversations.jsonl and tools-airline.json by --data"
        )
    path = Path(folder)
    log, tools_file = path / "airline_conversations.jsonl", path / "tools-airline.json"
    if not log.exists():
        raise ConfigError(
            f"the agent workload replays the airline conversations of tau-bench, which are not at {path}: "
            "name the folder with airline_conversations.jsonl and tools-airline.json by --data"
        )
    tools = msgspec.json.decode(tools_file.read_bytes()) if tools_file.exists() else None
    sessions: list[Session] = []
    left = requests
    for _, line in _lines(str(log)):
        messages = line["messages"]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"][:left]
        bodies = [{"messages": messages[:index]} | ({"tools": tools} if tools else {}) for index in answers]
        lengths = [_answer_length(messages[index]) for index in answers]
        planned = tuple(PlannedRequest(body, length) for body, length in zip(bodies, lengths, strict=True))
        if planned:
            sessions.append(Session(planned, burst=len(sessions)))
        left -= len(planned)
        if not left:
            break
    return sessions


def _answer_length(message: dict[str, Any]) -> int:
    calls = message.get("tool_calls")
    return estimate((message.get("content") or "") + (msgspec.json.encode(calls).decode() if calls else ""))


async def prepare(sessions: list[Session], server: Server, out: int | None) -> tuple[list[Session], int]:
    """Tokenizes the prompts and drops requests that are too long for the server's window.

    Returns the sessions and the number of dropped requests. A session ends before its first request that does not fit.
    """
    kept: list[Session] = []
    skipped = 0
    for session in sessions:
        fitting: list[PlannedRequest] = []
        for planned in session.requests:
            tokens = await server.tokenize(planned.body)
            length = out or planned.out
            if tokens and server.window and len(tokens) + (length or 1) > server.window:
                break
            fitting.append(replace(planned, tokens=tokens, out=length))
        skipped += len(session.requests) - len(fitting)
        if fitting:
            kept.append(replace(session, requests=tuple(fitting)))
    return kept, skipped

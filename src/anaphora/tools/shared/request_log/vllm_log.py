"""Reads requests from the log of a vLLM server started with ``--enable-log-requests``.

vLLM writes the rendered prompt as a Python string literal into one line:

    INFO 02-19 16:05:43 logger.py:37] Received request ID: prompt: '…', params: SamplingParams(…), prompt_token_ids: …
    (APIServer pid=1) INFO 11-05 12:39:35 [logger.py:40] Received request ID: prompt: '…', params: SamplingParams(…), …
    (APIServer pid=1) DEBUG 03-01 09:00:00 [logger.py:33] Request ID details: prompt: '…', prompt_token_ids: …

The last form is today's, written only if VLLM_LOGGING_LEVEL is DEBUG; its INFO line has only the parameters.
"""

from __future__ import annotations

import ast
import re
from datetime import datetime, timedelta
from typing import Any

from anaphora.tools.shared.request_log.valid_text import valid_text

_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_PROMPT = re.compile(rf"(?:Received request \S+: |Request \S+ details: )prompt: (?P<prompt>{_STRING}|None)(?:,|\.?$)")
_PARAMETERS = re.compile(r"Received request \S+: params: ")
_LINE = re.compile(r"(?:^|\| |\) )(?:INFO|DEBUG|WARNING|ERROR|CRITICAL)(?:: {2,}| \d\d-\d\d \d\d:)")
_TIME = re.compile(r"(?:INFO|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d)")
_ADAPTER = re.compile(rf"lora_name=({_STRING})")
_WRAPPERS = ("log", "message", "msg", "MESSAGE")


class VllmLogReader:
    """Reads the lines of one log, which may be mixed with other programs' lines."""

    def __init__(self) -> None:
        self._found = False

    def read(self, text: str) -> dict[str, Any] | None:
        """Returns the request in a line; None for a line that the server wrote about something else.

        Raises ValueError with the reason for any other line, or if the request cannot be used.
        """
        if match := _PROMPT.search(text):
            self._found = True
            if match["prompt"] == "None":
                raise ValueError("it has token ids instead of a prompt, which cannot be shown; log the text")
            adapter = _ADAPTER.search(text, match.end())
            return {
                "body": {"prompt": _text(match["prompt"])},
                "model": _text(adapter[1]) if adapter else "",
                "time": _time(text),
            }
        if _PARAMETERS.search(text) and not self._found:
            raise ValueError("vLLM left the prompt out: it writes prompts where VLLM_LOGGING_LEVEL is DEBUG")
        if self._found or _LINE.search(text):
            return None
        raise ValueError("neither JSON nor a line of a server's log")

    def unwrap(self, value: dict[str, Any]) -> str | None:
        """Returns the server's line from a log collector's JSON object; None if the object is something else."""
        text = next((value[key] for key in _WRAPPERS if isinstance(value.get(key), str)), None)
        if text is None or any(key in value for key in ("messages", "prompt", "body", "request")):
            return None
        return text if any(pattern.search(text) for pattern in (_PROMPT, _PARAMETERS, _LINE)) else None


def _text(literal: str) -> str:
    try:
        return valid_text(str(ast.literal_eval(literal)))
    except SyntaxError:
        raise ValueError("its prompt is damaged: no text as Python writes it") from None


def _time(text: str) -> float | None:
    """Returns Unix time. The log has no year, so it is the latest year that is not in the future."""
    match = _TIME.search(text)
    if match is None:
        return None
    now = datetime.now()
    for year in (now.year, now.year - 1):
        try:
            time = datetime.strptime(f"{year}-{match[1]}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            continue  # no such day, or not in this year
        if time <= now + timedelta(days=1):
            return time.timestamp()
    return None

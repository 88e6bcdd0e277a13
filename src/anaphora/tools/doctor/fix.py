"""The log written again with the repairs: bodies say the same, in the order that would be reused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.text.outline import TOOLS
from anaphora.tools.doctor.diagnose import Diagnosis
from anaphora.tools.doctor.prompts import Prompt
from anaphora.tools.doctor.read import read
from anaphora.tools.doctor.render import Renderer
from anaphora.tools.doctor.slots import SlotMoves
from anaphora.tools.doctor.toolset import ToolStage

_STEP = re.compile(r"([A-Za-z_]+)|\[(\d+)\]")


def write(diagnosis: Diagnosis, source: str, target: str) -> tuple[int, int]:
    """Write ``source`` with the accepted repairs to ``target``; returns how many bodies it has and how many changed.

    Only repairs that keep every word are made: parts of texts that move, tools in another order. Raises ConfigError.
    """
    if source == "-":
        raise ConfigError("--fix reads the log a second time; give a file instead of standard input")
    if Path(target).exists() and Path(target).samefile(source):
        raise ConfigError(f"--fix would overwrite the log {source}; name another file")
    moves = next(stage for stage in diagnosis.stages if isinstance(stage, SlotMoves))
    tools = next(stage for stage in diagnosis.stages if isinstance(stage, ToolStage))
    renderer = Renderer(diagnosis.log.model.template, diagnosis.log.store)
    written = changed = 0
    try:
        with open(target, "wb") as out:
            for logged in read(source, lambda *_: None):
                try:
                    prompt = renderer.render(logged)
                except InvalidRequest:
                    continue
                changed += _rewrite(logged.body, prompt, moves, tools)
                out.write(msgspec.json.encode(logged.outer) + b"\n")
                written += 1
    except OSError as error:
        raise ConfigError(f"--fix cannot write {target}: {error.strerror}") from None
    return written, changed


def _rewrite(body: dict[str, Any], prompt: Prompt, moves: SlotMoves, tools: ToolStage) -> bool:
    """Change one body in place."""
    changed, late = False, ""
    for segment in prompt.segments:
        if segment.text in moves.of_text and segment.message != TOOLS:
            mended, moved = moves.mended(segment.text)
            if mended != segment.text:
                _set(body, segment.path, moves.store.text(mended))
                changed, late = True, late + moved
    if late:
        users = [s for s in prompt.segments if s.kind in ("content", "prompt") and s.role in ("user", "prompt")]
        last = users[-1] if users else None
        if last is None:
            body["messages"].append({"role": "user", "content": late.strip("\n")})
        else:
            own = moves.store.text(last.text)
            _set(body, last.path, f"{own}\n{late}")
    if tools.active & {"tool_order", "tool_set"} and isinstance(body.get("tools"), list):
        order = tools.order(prompt.tool_texts)
        if order != sorted(order):
            body["tools"] = [body["tools"][i] for i in order]
            changed = True
    return changed


def _set(body: dict[str, Any], path: str, text: str) -> None:
    """Put a text where ``path`` (``messages[0].content[1].text``) says."""
    steps: list[Any] = [name or int(index) for name, index in _STEP.findall(path)]
    place: Any = body
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = text

"""Shows the beginnings of a log's prompts (``--heads``), each compared with the most similar one."""

from __future__ import annotations

import functools

from rich.console import Console
from rich.text import Text

from anaphora.tools.doctor.find.patterns import common_prefix, matching
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import Prompt
from anaphora.tools.doctor.show.marked_text import compared, marked

LENGTH = 200
MAX_SHOWN = 20


def show_prompt_starts(log: Log, console: Console) -> None:
    """Prints the first LENGTH characters of the prompts, equal ones once, and marks what changes in them."""
    lines: dict[str, list[int]] = {}
    for prompt in log.prompts:
        lines.setdefault(_start_of(log, prompt), []).append(prompt.line)
    starts = list(lines)
    shared = functools.reduce(lambda prefix, start: prefix[: common_prefix(prefix, start)], starts)
    if len(starts) == 1:
        summary = f"{len(log.prompts):,} prompts, all with the same first {len(shared):,} characters"
    else:
        summary = f"{len(log.prompts):,} prompts with {len(starts):,} different first {LENGTH} characters"
        summary += f"; all begin with the same {len(shared):,}"
    console.print(summary, highlight=False)
    for start in starts[:MAX_SHOWN]:
        others = [other for other in starts[:MAX_SHOWN] if other != start]
        closest = max(others, key=lambda other: sum(length for _, _, length in matching(other, start)), default=start)
        times = f"×{len(lines[start]):,}" if len(lines[start]) > 1 else ""
        console.print(Text(f"line {lines[start][0]:>6} {times:>6}  ") + marked(compared(start, closest), console))
    if len(starts) > MAX_SHOWN:
        console.print(f"and {len(starts) - MAX_SHOWN:,} more", highlight=False)


def _start_of(log: Log, prompt: Prompt) -> str:
    parts, length = [], 0
    for piece in prompt.pieces:  # the rest of a long prompt is not joined
        parts.append(log.store.piece_texts[piece])
        length += len(parts[-1])
        if length >= LENGTH:
            break
    return "".join(parts)[:LENGTH]

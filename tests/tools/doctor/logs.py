"""Planted logs, and what caching them is worth, computed without any of the doctor's code."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers

from anaphora.tools.shared.tokenizer_and_template import default_tokenizer_json

Body = dict[str, Any]

SUBJECTS = ("refunds", "parcels", "invoices", "returns", "warranties", "coupons", "orders", "accounts", "deliveries")
VERBS = ("check", "explain", "confirm", "forward", "repeat", "summarise", "translate", "verify", "record", "refuse")
BLOCK = 16


def rules(seed: int = 0, lines: int = 60) -> str:
    """A system prompt of about 20 tokens a line."""
    rng = random.Random(seed)
    return "\n".join(
        f"- Rule {i}: always {rng.choice(VERBS)} questions about {rng.choice(SUBJECTS)} and never "
        f"{rng.choice(VERBS)} {rng.choice(SUBJECTS)} for anyone but the owner."
        for i in range(lines)
    )


def sentence(rng: random.Random, words: int = 14) -> str:
    return " ".join(rng.choice((*SUBJECTS, *VERBS, "please", "today", "why", "my", "the", "and")) for _ in range(words))


def system(text: str) -> Body:
    return {"role": "system", "content": text}


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def assistant(text: str) -> Body:
    return {"role": "assistant", "content": text}


def tool(name: str, text: str = "") -> Body:
    words = text or f"{name} looks things up. " * 8
    schema = {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "description": words, "parameters": schema}}


def conversations(count: int = 20, turns: int = 3, *, seed: int = 0, head: str | None = None) -> list[list[Body]]:
    """Clean conversations: each body is a turn, its messages extend those of the turn before."""
    rng = random.Random(seed)
    text = rules() if head is None else head
    made = []
    for _ in range(count):
        messages = [system(text)] if text else []
        bodies = []
        for _ in range(turns):
            messages = [*messages, user(sentence(rng))]
            bodies.append({"messages": messages})
            messages = [*messages, assistant(sentence(rng, 30))]
        made.append(bodies)
    return made


def interleaved(made: Iterable[list[Body]]) -> list[Body]:
    """The first turns of all, then the second ones, and so on."""
    made = list(made)
    return [bodies[i] for i in range(max(map(len, made))) for bodies in made if i < len(bodies)]


def with_system(body: Body, change: Callable[[str], str]) -> Body:
    first, *rest = body["messages"]
    return {**body, "messages": [{**first, "content": change(first["content"])}, *rest]}


def with_last_user(body: Body, text: str) -> Body:
    """``text`` behind the last user message."""
    messages = list(body["messages"])
    at = max(i for i, message in enumerate(messages) if message["role"] == "user")
    messages[at] = {**messages[at], "content": f"{messages[at]['content']}\n\n{text}"}
    return {**body, "messages": messages}


@functools.cache
def _tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(default_tokenizer_json())


def written(body: Body) -> str:
    """ChatML, written by hand."""
    parts = []
    messages = body["messages"]
    tools = body.get("tools")
    if tools:
        lines = "".join("\n" + json.dumps(t, ensure_ascii=False) for t in tools)
        block = f"# Tools: <tools>{lines}\n</tools>"
        if messages[0]["role"] == "system":
            messages = [{**messages[0], "content": f"{messages[0]['content']}\n\n{block}"}, *messages[1:]]
        else:
            messages = [system(block), *messages]
    for message in messages:
        calls = "".join("\n" + json.dumps(c["function"]) for c in message.get("tool_calls") or ())
        parts.append(f"<|im_start|>{message['role']}\n{message['content'] or ''}{calls}<|im_end|>\n")
    return "".join(parts) + "<|im_start|>assistant\n"


def computed(bodies: Iterable[Body], block: int = BLOCK) -> tuple[int, int]:
    """(tokens of all prompts, tokens that no full block seen before covers)."""
    seen: set[int] = set()
    total = missed = 0
    for body in bodies:
        ids = _tokenizer().encode(written(body)).ids
        hits, chain, found = 0, 0, True
        for end in range(block, len(ids) + 1, block):
            chain = hash((chain, *ids[end - block : end]))
            found = found and chain in seen
            hits = end if found else hits
            seen.add(chain)
        total += len(ids)
        missed += len(ids) - hits
    return total, missed

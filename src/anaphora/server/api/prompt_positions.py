"""Maps a token of a prompt to its position in the request's body: message, role and character."""

from __future__ import annotations

import functools
from typing import Any

from anaphora.errors import InvalidRequest
from anaphora.server.api import prompts
from anaphora.server.api.prompts import Prompt
from anaphora.server.api.protocol import ChatRequest, CompletionRequest
from anaphora.server.service import TextComponents
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.outline import (
    TOOLS,
    OutlineBuilder,
    PromptOutline,
    PromptPosition,
    TextOwner,
    position_at,
    split_rendering,
    texts_of,
    tool_text,
)
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.reports import CacheReport


def first_miss(
    text: TextComponents, body: ChatRequest | CompletionRequest, prompt: Prompt, report: CacheReport
) -> dict[str, Any] | None:
    """Returns the position of the first token that was not reused: ``message``, ``role``, ``character``.

    None if all was reused, if the cache was not read, or if the prompt was given as token ids or cut.
    """
    if prompt.text is None or report.feature or report.position >= report.prompt_tokens - 1:
        return None
    character = _character(text.tokenizer, prompt.token_ids, report.position, prompt.text)
    if not isinstance(body, ChatRequest):
        return _as_json(PromptPosition(0, "prompt", character))
    if text.template is None:
        return None
    found = _in_chat(text.template, body, prompt.text, character)
    return None if found is None else _as_json(found)


def _as_json(found: PromptPosition) -> dict[str, Any]:
    message = found.message if found.role and found.role != "tools" else None
    return {"message": message, "role": found.role or "template", "character": found.character}


def _character(tokenizer: Tokenizer, ids: tuple[int, ...], at: int, text: str) -> int:
    """Returns the index of the character of ``text`` in which token ``at`` begins."""
    if 2 * at > len(ids):  # decode the shorter side
        rest = b"".join(map(tokenizer.token_bytes, ids[at:]))
        whole = rest.lstrip(_INNER_BYTES)
        decoded = whole.decode("utf-8", "ignore")
        if text.endswith(decoded):
            return len(text) - len(decoded) - (whole != rest)
    decoded = b"".join(map(tokenizer.token_bytes, ids[:at])).decode("utf-8", "ignore")
    if tokenizer.strips_leading_space:
        decoded = decoded.removeprefix(" ")
    low, high = 0, min(len(decoded), len(text))
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(decoded[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


_INNER_BYTES = bytes(range(0x80, 0xC0))
"""UTF-8 continuation bytes: no character begins with them."""


@functools.lru_cache(maxsize=4)
def _outline_builder(template: ChatTemplate) -> OutlineBuilder:
    return OutlineBuilder(template)


def _in_chat(template: ChatTemplate, body: ChatRequest, text: str, character: int) -> PromptPosition | None:
    tools = body.tools or []
    owners: list[TextOwner] = []
    texts: list[tuple[str, str]] = []
    offset = 0
    for tool in tools:
        texts.append(("tool", tool_text(tool)))
        owners.append(TextOwner(TOOLS, "tools", offset))
        offset += len(texts[-1][1]) + 1
    for index, message in enumerate(body.messages):
        offset = 0
        for kind, _, own in texts_of(message):
            texts.append((kind, own))
            owners.append(TextOwner(index, message["role"], offset))
            offset += len(own) + 1
    outline = _outline(template, body, text, texts)
    return position_at(
        ((owner, len(texts[owner][1] if own is None else own)) for owner, own in outline.parts), owners, character
    )


def _outline(template: ChatTemplate, body: ChatRequest, text: str, texts: list[tuple[str, str]]) -> PromptOutline:
    """Returns the outline of this prompt; if the template prints the time or refuses placeholders, by searching."""
    options = prompts.template_options(body)
    kwargs = options.pop("kwargs") or {}
    try:
        outline = _outline_builder(template).outline_of(
            body.messages, body.tools or [], kwargs, lambda: texts, **options
        )
    except InvalidRequest:
        return split_rendering(text, texts)
    filled = "".join(texts[owner][1] if own is None else own for owner, own in outline.parts)
    return outline if filled == text else split_rendering(text, texts)

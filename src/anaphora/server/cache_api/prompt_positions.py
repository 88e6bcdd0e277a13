"""Where in a request's body a token of its prompt stands: which message, role and character."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from anaphora.errors import InvalidRequest
from anaphora.server.api import prompts
from anaphora.server.api.prompts import Prompt
from anaphora.server.api.protocol import ChatRequest, CompletionRequest
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.outline import TOOLS, Owner, Place, Skeleton, Skeletons, place, search, texts_of, tool_text
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.reports import CacheReport


class TextSide(Protocol):
    """server.service.TextSide."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def template(self) -> ChatTemplate | None: ...


def find(
    text: TextSide, body: ChatRequest | CompletionRequest, prompt: Prompt, report: CacheReport
) -> dict[str, Any] | None:
    """Where the first token that was not reused stands.

    None where nothing was missed, where the cache was not read, and where the prompt came as token ids or was cut.
    """
    if prompt.text is None or report.feature or report.position >= report.prompt_tokens - 1:
        return None
    character = _character(text.tokenizer, prompt.token_ids, report.position, prompt.text)
    if not isinstance(body, ChatRequest):
        return _told(Place(0, "prompt", character))
    if text.template is None:
        return None
    found = _in_chat(text.template, body, prompt.text, character)
    return None if found is None else _told(found)


def _told(found: Place) -> dict[str, Any]:
    message = found.message if found.role and found.role != "tools" else None
    return {"message": message, "role": found.role or "template", "character": found.character}


def _character(tokenizer: Tokenizer, ids: tuple[int, ...], at: int, text: str) -> int:
    """Where token ``at`` of a prompt begins in its text; where it begins inside a character, at that one."""
    if 2 * at > len(ids):  # what is behind it is the less to decode
        behind = b"".join(map(tokenizer.token_bytes, ids[at:]))
        whole = behind.lstrip(_INNER_BYTES)
        decoded = whole.decode("utf-8", "ignore")
        if text.endswith(decoded):
            return len(text) - len(decoded) - (whole != behind)
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
"""Of UTF-8: what no character begins with."""


@functools.lru_cache(maxsize=4)
def _skeletons(template: ChatTemplate) -> Skeletons:
    return Skeletons(template)


def _in_chat(template: ChatTemplate, body: ChatRequest, text: str, character: int) -> Place | None:
    tools = body.tools or []
    owners: list[Owner] = []
    texts: list[tuple[str, str]] = []
    offset = 0
    for tool in tools:
        texts.append(("tool", tool_text(tool)))
        owners.append(Owner(TOOLS, "tools", offset))
        offset += len(texts[-1][1]) + 1
    for index, message in enumerate(body.messages):
        offset = 0
        for kind, _, own in texts_of(message):
            texts.append((kind, own))
            owners.append(Owner(index, message["role"], offset))
            offset += len(own) + 1
    skeleton = _skeleton(template, body, text, texts)
    return place(
        ((owner, len(texts[owner][1] if own is None else own)) for owner, own in skeleton.parts), owners, character
    )


def _skeleton(template: ChatTemplate, body: ChatRequest, text: str, texts: list[tuple[str, str]]) -> Skeleton:
    """The skeleton of this very prompt: the template may print the time, or refuse the marks that stand for texts."""
    options = prompts.template_options(body)
    kwargs = options.pop("kwargs") or {}
    try:
        skeleton = _skeletons(template).of(body.messages, body.tools or [], kwargs, lambda: texts, **options)
    except InvalidRequest:
        return search(text, texts)
    filled = "".join(texts[owner][1] if own is None else own for owner, own in skeleton.parts)
    return skeleton if filled == text else search(text, texts)

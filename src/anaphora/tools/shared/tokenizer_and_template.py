"""Loads the tokenizer and the chat template with which a tool renders and counts prompts."""

from __future__ import annotations

import functools
import gzip
from dataclasses import dataclass
from importlib.resources import files

from anaphora.text.chat_template import ChatTemplate, default_template, read_template
from anaphora.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TokenizerAndTemplate:
    """A tokenizer, a chat template, and ``name``: where both come from, for the report."""

    tokenizer: Tokenizer
    template: ChatTemplate
    name: str


@functools.cache
def default_tokenizer_json() -> bytes:
    """Returns tokenizer.json of SmolLM2-135M-Instruct, which is part of the package."""
    return gzip.decompress((files("anaphora.tools.shared") / "tokenizer" / "tokenizer.json.gz").read_bytes())


def load_tokenizer_and_template(folder: str | None, template: str | None) -> TokenizerAndTemplate:
    """Loads the tokenizer and the chat template of a model folder; by default those in the package.

    ``template`` is a chat template to use instead: a file, or the template's text. Raises ModelError or ConfigError.
    """
    if folder is None:
        special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False}
        tokenizer = Tokenizer(default_tokenizer_json(), special)
        name = "the tokenizer of SmolLM2-135M-Instruct"
    else:
        tokenizer, name = Tokenizer.load(folder), f"the tokenizer of {folder}"
    if template is not None:
        chosen, origin = read_template(template, tokenizer.special_tokens), f"the chat template {template}"
    elif tokenizer.chat_template is not None:
        chosen, origin = tokenizer.chat_template, "its own chat template"
    else:
        chosen = ChatTemplate(default_template(), tokenizer.special_tokens)
        origin = "Anaphora's ChatML template"
    return TokenizerAndTemplate(tokenizer, chosen, f"{name} with {origin}")

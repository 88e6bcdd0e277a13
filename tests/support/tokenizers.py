"""A small byte-level tokenizer on disk."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

EOS = "<eos>"
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int, template: str | None = TEMPLATE) -> int:
    """Ids 0 to 255 are the bytes, the last one ends an answer (returned), id i between them reads ``<i>``.

    Ids between are never the result of encoding, but a model may say them.
    """
    end = vocab_size - 1
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"<{token}>" for token in range(len(alphabet), end)]
    backend = tokenizers.Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    assert backend.token_to_id(EOS) == end
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOS} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return end

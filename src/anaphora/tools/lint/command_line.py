"""``anaphora doctor --serve-flags "…"``: a server's command line as typed, and what in it breaks reuse or memory."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from anaphora.advice import template_checks, vllm_flags
from anaphora.advice.server_flags import USUAL_BLOCK, Pitfall, Setup, pitfalls
from anaphora.config import parse_bytes, parse_count
from anaphora.errors import AnaphoraError, ConfigError
from anaphora.text.chat_template import ChatTemplate, default_template
from anaphora.text.tokenizer import read_object
from anaphora.tools.doctor.options import DoctorOptions
from anaphora.tools.lint.template import load_template
from anaphora.tools.shared.request_log.log_files import read_requests
from anaphora.tools.shared.server_version import version_of
from anaphora.tools.shared.tokenizer_and_template import TokenizerAndTemplate

T = TypeVar("T")

_STARTS = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "sglang.launch_server": "sglang",
    "llama-server": "llama.cpp",
}
_IMAGE = re.compile(r"(?:.*/)?(vllm/vllm-openai|lmsysorg/sglang|ggml-org/llama\.cpp)(?::([^@/]+))?(?:@.+)?")
_IMAGES = {"vllm/vllm-openai": "vllm", "lmsysorg/sglang": "sglang", "ggml-org/llama.cpp": "llama.cpp"}
_OFF = {"sglang": "--disable-radix-cache", "llama.cpp": "--no-cache-prompt"}
"""Of servers whose flags are not known here: the one that turns reuse off."""
_ENDS = frozenset({";", "&&", "||", "|", ">", ">>", "2>&1", "&"})
_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
LOOKED_AT = 1000
"""Requests at the beginning of a log from which the length of the system texts is taken."""


@dataclass(slots=True)
class Typed:
    """A command line: flags by their long names, a switch as True or False. ``unknown`` says what no server knows.

    ``version`` is the tag of a container image.
    """

    engine: str
    version: str | None = None
    model: str | None = None
    flags: dict[str, str | bool] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def number(self, flag: str, parse: Callable[[str], T]) -> T | None:
        """The value of a flag. ConfigError, naming it, for what cannot be read."""
        given = self.flags.get(flag)
        if given is None:
            return None
        try:
            return parse(str(given))
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"--serve-flags: {flag} {given}: {error}") from None

    def text(self, flag: str) -> str | None:
        given = self.flags.get(flag)
        return given if isinstance(given, str) else None

    def on(self, flag: str, default: bool) -> bool:
        given = self.flags.get(flag, default)
        return given if isinstance(given, bool) else given.lower() not in ("false", "0", "no")


def read_command(command: str) -> Typed:
    """Take a command line of ``vllm serve`` or ``anaphora serve`` apart, or its flags alone (read as vLLM's).

    One of SGLang or llama.cpp is known as such, and its flags are taken as they are.

    What stands before the server's own arguments (variables, docker, python -m) is passed over.
    """
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"--serve-flags cannot be taken apart: {error} in {command!r:.200}") from None
    begin, engine, version = _begin(words)
    end = next((at for at in range(begin, len(words)) if words[at] in _ENDS), len(words))
    words = words[begin:end]
    if engine in _OFF:
        return _read_other(words, engine)
    typed = Typed(engine, version)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-"):
            typed.model = typed.model or word
            continue
        name, equals, value = vllm_flags.normalize(word).partition("=")
        if not vllm_flags.is_known(name):
            typed.unknown.append(vllm_flags.explain(name, vllm_flags.known()))
        if equals:
            typed.flags[name] = value
        elif vllm_flags.is_switch(name):
            typed.flags[name.replace("--no-", "--", 1)] = not name.startswith("--no-")
        elif at < len(words) and not words[at].startswith("-"):
            typed.flags[name] = words[at]
            at += 1
            while vllm_flags.takes_several(name) and at < len(words) and not words[at].startswith("-"):
                typed.flags[name] = f"{typed.flags[name]} {words[at]}"
                at += 1
        else:
            typed.flags[name] = True
    typed.model = typed.model or typed.text("--model")
    return typed


def _read_other(words: list[str], engine: str) -> Typed:
    """A command line whose flags are not known here: what stands behind a flag is its value."""
    typed = Typed(engine)
    for word, behind in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            typed.flags[name] = value if equals else True if behind.startswith("-") else behind
    typed.model = typed.text("-m") or typed.text("--model") or typed.text("--model-path")
    return typed


def _begin(words: list[str]) -> tuple[int, str, str | None]:
    """Where the server's own arguments begin, whose they are, and the tag of its image."""
    found: tuple[int, str, str | None] | None = None
    for at, word in enumerate(words):
        name = Path(word).name
        if word == "serve" and at and Path(words[at - 1]).name in ("vllm", "anaphora", "sglang"):
            return at + 1, Path(words[at - 1]).name, found[2] if found else None
        if name in _STARTS:
            return at + 1, _STARTS[name], found[2] if found else None
        if not found and (image := _IMAGE.fullmatch(word)):
            found = at + 1, _IMAGES[image[1]], image[2]
    if found:
        return found
    if words and words[0] in ("anaphora", "vllm"):
        return 1, words[0], None
    alone = bool(words) and words[0].startswith("-")
    others = (engine for engine, flag in _OFF.items() if flag in words)
    return 0, next(others, "llama.cpp" if "-m" in words else "vllm") if alone else "vllm", None


def examine(options: DoctorOptions, model: TokenizerAndTemplate) -> tuple[Typed, list[Pitfall], list[str]]:
    """The command line, what is wrong with it, and what could not be looked at."""
    assert options.serve_flags is not None
    typed = read_command(options.serve_flags)
    if typed.engine in _OFF:
        return (
            typed,
            list(_turned_off(typed)),
            [f"of {typed.engine} only {_OFF[typed.engine]} is judged, no other flag"],
        )
    notes = (
        [f"--config {typed.flags['--config']} was not read: give its settings as flags"]
        if "--config" in typed.flags
        else []
    )
    template = _template(typed, options, notes)
    checks = template_checks.examine(template) if template is not None else []
    config = _config(typed, options)
    system, scored = _facts(options, model)
    block = typed.number("--block-size", parse_count) or USUAL_BLOCK
    exact = typed.engine == "anaphora"
    setup = Setup(
        exact=exact,
        prefix_caching=typed.on("--enable-prefix-caching", True),
        block_size=block,
        kv_cache_dtype=typed.text("--kv-cache-dtype") or "auto",
        scales_from_prompt=typed.on("--calculate-kv-scales", False),
        max_model_len=typed.number("--max-model-len", parse_count) or config.get("max_position_embeddings"),
        max_num_seqs=typed.number("--max-num-seqs", parse_count),
        pool_tokens=_pool(typed, block, config),
        gpu_memory_utilization=typed.number("--gpu-memory-utilization", float),
        hash_algo=typed.text("--prefix-caching-hash-algo") or "sha256",
        replicas=typed.number("--data-parallel-size", parse_count) or 1,
        adapters=len((typed.text("--lora-modules") or "").split()),
        reports_cached_tokens=exact or typed.on("--enable-prompt-tokens-details", False),
        chunked_prefill=typed.on("--enable-chunked-prefill", True),
        system_tokens=system,
        prompt_logprobs=scored,
        template=tuple((check.problem, check.mend) for check in checks if check.problem and check.breaks),
    )
    return typed, [*_turned_off(typed), *pitfalls(setup)], notes


def _turned_off(typed: Typed) -> Iterator[Pitfall]:
    """Reuse that is off by another server's flag, or by default in an old version."""
    flag = _OFF.get(typed.engine)
    if flag is not None and flag in typed.flags:
        yield Pitfall(flag, "prefix caching is off: every prompt is computed whole", "leave the flag out")
    version = version_of(typed.version)
    if flag is None and version and version < (0, 8, 0) and "--enable-prefix-caching" not in typed.flags:
        yield Pitfall(
            f"version {typed.version}",
            "before 0.8 prefix caching is off by default: every prompt is computed whole",
            "take a newer version, or, from 0.4 on, add --enable-prefix-caching",
        )


def _folder(typed: Typed, options: DoctorOptions) -> Path | None:
    named = options.model or typed.model
    return Path(named).expanduser() if named is not None and Path(named).expanduser().is_dir() else None


def _config(typed: Typed, options: DoctorOptions) -> dict[str, Any]:
    folder = _folder(typed, options)
    return read_object(folder / "config.json") if folder is not None and (folder / "config.json").is_file() else {}


def _template(typed: Typed, options: DoctorOptions, notes: list[str]) -> ChatTemplate | None:
    """The template that the server would use. One that is not on this machine leaves a note."""
    named = options.template or options.chat_template or typed.text("--chat-template")
    folder = _folder(typed, options)
    if named is not None or folder is not None:
        try:
            return load_template(named or str(folder))
        except AnaphoraError as error:
            notes.append(f"the chat template was not looked at: {error.message}")
            return None
    if typed.model is None and typed.engine == "anaphora":
        return ChatTemplate(default_template(), {})
    what = f"that of {typed.model} is not on this machine" if typed.model else "no model is named"
    notes.append(f"the chat template was not looked at: {what}; give --template FILE or --model FOLDER")
    return None


def _pool(typed: Typed, block: int, config: dict[str, Any]) -> int | None:
    """Tokens that the cache holds, where the flags and the model's config say it."""
    if (blocks := typed.number("--num-gpu-blocks-override", parse_count)) is not None:
        return blocks * block
    size = typed.number("--kv-cache-memory-bytes", parse_bytes)
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if size is None or not layers or not heads:
        return None
    kept = typed.text("--kv-cache-dtype") or "auto"
    width = 1 if kept.startswith(("fp8", "float8", "int8")) else _BYTES.get(kept, 2)
    if latent := config.get("kv_lora_rank"):
        values = latent + (config.get("qk_rope_head_dim") or 0)
    else:
        dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
        values = 2 * (config.get("num_key_value_heads") or heads) * dim
    return int(size // (layers * values * width)) if values else None


def _facts(options: DoctorOptions, model: TokenizerAndTemplate) -> tuple[int | None, float]:
    """From the log, where there is one: the usual length of a system text, the share that asks for prompt_logprobs."""
    if options.log is None or options.log == "-":
        return None, 0.0
    lengths: list[int] = []
    known: dict[str, int] = {}
    scored = requests = 0
    for logged in read_requests(options.log, lambda *_: None, lambda _: None):
        requests += 1
        scored += logged.body.get("prompt_logprobs") is not None
        text = next((m["content"] for m in logged.messages[:1] if m.get("role") in ("system", "developer")), None)
        if isinstance(text, str) and len(lengths) < LOOKED_AT:
            if text not in known:
                known[text] = len(model.tokenizer.encode(text, add_special_tokens=False))
            lengths.append(known[text])
    usual = int(median(lengths)) if len(lengths) * 2 > min(requests, LOOKED_AT) else None
    return usual, scored / requests if requests else 0.0

"""Checks the settings of a parsed command line, with the model's files and a log of requests if there are any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from anaphora.advice.server_flags import USUAL_BLOCK, FlagWarning, ServerSettings, check_server_flags
from anaphora.advice.template_checks import check_template
from anaphora.config import parse_bytes, parse_count
from anaphora.errors import AnaphoraError, ConfigError
from anaphora.text.chat_template import ChatTemplate, default_template
from anaphora.text.tokenizer import read_object
from anaphora.tools.lint.command_line import CACHE_OFF_FLAGS, CommandLine
from anaphora.tools.lint.options import LintOptions
from anaphora.tools.lint.template import load_template
from anaphora.tools.shared.request_log.log_files import read_requests
from anaphora.tools.shared.server_version import version_of
from anaphora.tools.shared.tokenizer_and_template import load_tokenizer_and_template

_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
SAMPLED_REQUESTS = 1000
"""Requests at the beginning of a log whose system texts are measured."""


def check_command_line(command: CommandLine, options: LintOptions) -> tuple[list[FlagWarning], list[str]]:
    """Returns what is wrong with a command line, and notes on what could not be checked.

    Raises ConfigError for a value that is not valid, and for a file of ``options`` that cannot be read.
    """
    if options.model is not None and not Path(options.model).expanduser().is_dir():
        raise ConfigError(f"--model needs a model folder on this machine, and {options.model} is not one")
    if command.engine in CACHE_OFF_FLAGS:
        flag = CACHE_OFF_FLAGS[command.engine]
        return list(_turned_off(command)), [f"for {command.engine} only {flag} is checked, no other flag"]
    notes = []
    if "--config" in command.flags:
        notes.append(f"--config {command.flags['--config']} was not read: give its settings as flags")
    settings = _server_settings(command, options, notes)
    return [*_turned_off(command), *check_server_flags(settings)], notes


def _server_settings(command: CommandLine, options: LintOptions, notes: list[str]) -> ServerSettings:
    template = _template(command, options, notes)
    checks = check_template(template) if template is not None else []
    config = _config(command, options)
    system_tokens, prompt_logprobs = _prompt_statistics(options)
    block = command.number("--block-size", parse_count) or USUAL_BLOCK
    exact = command.engine == "anaphora"
    return ServerSettings(
        exact=exact,
        prefix_caching=command.is_on("--enable-prefix-caching", True),
        block_size=block,
        kv_cache_dtype=command.text("--kv-cache-dtype") or "auto",
        scales_from_prompt=command.is_on("--calculate-kv-scales", False),
        max_model_len=command.number("--max-model-len", parse_count) or config.get("max_position_embeddings"),
        max_num_seqs=command.number("--max-num-seqs", parse_count),
        pool_tokens=_pool(command, block, config),
        gpu_memory_utilization=command.number("--gpu-memory-utilization", float),
        hash_algo=command.text("--prefix-caching-hash-algo") or "sha256",
        replicas=command.number("--data-parallel-size", parse_count) or 1,
        adapters=len((command.text("--lora-modules") or "").split()),
        reports_cached_tokens=exact or command.is_on("--enable-prompt-tokens-details", False),
        chunked_prefill=command.is_on("--enable-chunked-prefill", True),
        system_tokens=system_tokens,
        prompt_logprobs=prompt_logprobs,
        template=tuple((check.problem, check.mend) for check in checks if check.problem and check.breaks),
    )


def _turned_off(command: CommandLine) -> Iterator[FlagWarning]:
    """Yields a warning if the cache is off: by another server's flag, or by default in an old version of vLLM."""
    flag = CACHE_OFF_FLAGS.get(command.engine)
    if flag is not None and flag in command.flags:
        yield FlagWarning(flag, "prefix caching is off: every prompt is computed completely", "leave the flag out")
    version = version_of(command.version)
    if flag is None and version and version < (0, 8, 0) and "--enable-prefix-caching" not in command.flags:
        yield FlagWarning(
            f"version {command.version}",
            "before 0.8 prefix caching is off by default: every prompt is computed completely",
            "use a newer version, or (from 0.4 on) add --enable-prefix-caching",
        )


def _folder(command: CommandLine, options: LintOptions) -> Path | None:
    named = options.model or command.model
    return Path(named).expanduser() if named is not None and Path(named).expanduser().is_dir() else None


def _config(command: CommandLine, options: LintOptions) -> dict[str, Any]:
    folder = _folder(command, options)
    return read_object(folder / "config.json") if folder is not None and (folder / "config.json").is_file() else {}


def _template(command: CommandLine, options: LintOptions, notes: list[str]) -> ChatTemplate | None:
    """Loads the template that the server would use. If it is not on this machine, adds a note and returns None."""
    if options.chat_template is not None:
        return load_template(options.chat_template)
    named, folder = command.text("--chat-template"), _folder(command, options)
    if named is not None or folder is not None:
        try:
            return load_template(named or str(folder))
        except AnaphoraError as error:
            notes.append(f"the chat template was not checked: {error.message}")
            return None
    if command.model is None and command.engine == "anaphora":
        return ChatTemplate(default_template(), {})
    what = f"that of {command.model} is not on this machine" if command.model else "no model is named"
    notes.append(f"the chat template was not checked: {what}; give --chat-template FILE or --model FOLDER")
    return None


def _pool(command: CommandLine, block: int, config: dict[str, Any]) -> int | None:
    """Returns how many tokens the KV cache holds; None if flags and the model's config do not say it."""
    if (blocks := command.number("--num-gpu-blocks-override", parse_count)) is not None:
        return blocks * block
    size = command.number("--kv-cache-memory-bytes", parse_bytes)
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if size is None or not layers or not heads:
        return None
    kept = command.text("--kv-cache-dtype") or "auto"
    width = 1 if kept.startswith(("fp8", "float8", "int8")) else _BYTES.get(kept, 2)
    if latent := config.get("kv_lora_rank"):
        values = latent + (config.get("qk_rope_head_dim") or 0)
    else:
        dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
        values = 2 * (config.get("num_key_value_heads") or heads) * dim
    return int(size // (layers * values * width)) if values else None


def _prompt_statistics(options: LintOptions) -> tuple[int | None, float]:
    """Returns the median length of the log's system texts in tokens, and the share of requests with prompt_logprobs.

    The length is None without a log, and if fewer than half of the requests have a system text.
    """
    if options.log is None:
        return None, 0.0
    tokenizer = load_tokenizer_and_template(options.model, None).tokenizer
    lengths: list[int] = []
    known: dict[str, int] = {}
    with_logprobs = requests = 0
    bad: list[str] = []

    def skip(line: int, reason: str) -> None:
        if not bad:
            bad.append(f": line {line}: {reason}")

    for logged in read_requests(options.log, skip):
        requests += 1
        with_logprobs += logged.body.get("prompt_logprobs") is not None
        text = next((m["content"] for m in logged.messages[:1] if m.get("role") in ("system", "developer")), None)
        if isinstance(text, str) and len(lengths) < SAMPLED_REQUESTS:
            if text not in known:
                known[text] = len(tokenizer.encode(text, add_special_tokens=False))
            lengths.append(known[text])
    if not requests:
        raise ConfigError(f"{options.log} holds no usable request{bad[0] if bad else ''}")
    usual = int(median(lengths)) if len(lengths) * 2 > min(requests, SAMPLED_REQUESTS) else None
    return usual, with_logprobs / requests

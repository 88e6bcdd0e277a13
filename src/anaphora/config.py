"""Settings as frozen dataclasses. A field's metadata is its command-line help; names and meanings are vLLM's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

from anaphora.errors import ConfigError

T = TypeVar("T")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parse_bytes(text: str | int) -> int:
    """Parse ``512M`` and ``4G`` (powers of 1024, as in vLLM), ``4g`` (powers of 1000), or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?i?)[bB]?\s*", str(text))
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with K, M or G, such as 512M or 4G")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_gib(text: str) -> float:
    """Parse a size in GiB, such as ``24`` or ``23.5``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:Gi?B?)?\s*", text)
    if not match:
        raise ConfigError(f"{text!r} is not a size in GiB: write a number, such as 24")
    return float(match[1])


def parse_count(text: str) -> int:
    """Parse a number of tokens as vLLM does: ``32768``, ``32k`` (powers of 1000) or ``32K`` (powers of 1024)."""
    match = re.fullmatch(r"\s*(\d{1,15}|\d{1,15}\.\d+(?=[kmg]))([kKmMgG]?)\s*", text)
    if not match:
        raise ConfigError(f"{text!r} is not a number of tokens: write a whole number, 32k (32,000) or 32K (32,768)")
    return round(float(match[1]) * _UNITS[match[2]])


def parse_server_url(text: str) -> str:
    """Return a server's address without a trailing ``/v1`` or slash. Raises ConfigError if it is not HTTP."""
    try:
        parts = urlsplit(text if "//" in text else f"http://{text}")
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise ConfigError(f"{text!r} is not a server address: write something like http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")


def option(default: Any, help: str, **more: Any) -> Any:
    """Return a dataclass field that is also a command-line flag.

    ``more`` may contain choices, parse (text to value), metavar, flag, hidden, positional, also_flag (of a positional),
    remainder (everything after ``--``), cpu_note (printed if the flag is used on a machine without a GPU).
    """
    return field(default=default, metadata={"help": help, **more})


def flag_name(field: Field[Any]) -> str:
    """Return the command-line flag that sets a field."""
    return str(field.metadata.get("flag", "--" + field.name.replace("_", "-")))


@dataclass(frozen=True)
class ModelConfig:
    """Which model to load, and how."""

    model: str | None = option(
        None,
        "folder in Hugging Face layout, hub name, or GGUF file; left out: the embedded SmolLM2-135M-Instruct",
        positional=True,
        also_flag=True,
    )
    served_model_name: tuple[str, ...] = option((), "name or names under which the API knows the model", metavar="NAME")
    dtype: str = option(
        "auto",
        "data type of weights and activations",
        choices=("auto", "bfloat16", "float16", "half", "float32", "float"),
    )
    device: str = option("auto", "where the model runs: auto is a GPU if there is one", choices=("auto", "cpu", "cuda"))
    load_format: str = option(
        "auto",
        "auto and safetensors read weights from safetensors files; dummy makes random ones, for benchmarks",
        choices=("auto", "safetensors", "dummy"),
    )
    enforce_eager: bool = option(
        False,
        "on a GPU: capture no CUDA graphs, which starts sooner and runs slower",
        cpu_note="it has no effect on a CPU, where there are no graphs",
    )
    seed: int = option(0, "base of the sampling seed of requests that set none")
    max_model_len: int | None = option(
        None,
        "longest prompt plus answer in tokens; capped at what the model supports and the cache holds",
        parse=parse_count,
        metavar="N",
    )
    chat_template: str | None = option(None, "file with a Jinja chat template, or the template itself", metavar="FILE")
    trust_remote_code: bool = option(False, "run Python code that comes with a model folder")
    generation_config: str = option(
        "auto",
        "source of the default sampling parameters: auto (the model's generation_config.json), vllm (none), "
        "or a folder",
        metavar="auto|vllm|PATH",
    )

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"--max-model-len must be at least 2, one token of prompt and one of answer, got {self.max_model_len}"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed must fit into 64 bits, got {self.seed}")


@dataclass(frozen=True)
class CacheConfig:
    """The KV block pool and prefix caching."""

    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prefixes that were computed before")
    block_size: int = option(16, "tokens per KV block; does not change results", metavar="TOKENS")
    gpu_memory_utilization: float = option(
        0.9,
        "share of the GPU's memory that may be used (on a CPU: see --kv-cache-memory-bytes)",
        metavar="0..1",
        cpu_note="it has no effect on a CPU, where --kv-cache-memory-bytes sets the size of the cache",
    )
    gpu_memory: float | None = option(
        None,
        "use the GPU as if it had this many GiB, such as 24; --gpu-memory-utilization is a share of them",
        parse=parse_gib,
        metavar="GIB",
        cpu_note="it has no effect on a CPU, where --kv-cache-memory-bytes sets the size of the cache",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "exact size of the block pool, such as 512M or 4G (CPU default: a quarter of free memory, at most 4G)",
        parse=parse_bytes,
        metavar="SIZE",
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of cached keys and values; fp8 (e4m3, with a scale for each token and head) needs a GPU",
        metavar="auto|bfloat16|float16|float32|fp8",
    )

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 1024:
            raise ConfigError(f"--block-size must be 1 to 1024 tokens, got {self.block_size}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )
        if self.gpu_memory is not None and not 0 < self.gpu_memory < 2**20:
            raise ConfigError(f"--gpu-memory must be a number of GiB above 0, got {self.gpu_memory:g}")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step."""

    max_num_seqs: int = option(256, "most sequences that run at the same time", metavar="N")
    max_num_batched_tokens: int = option(2048, "most tokens computed in one step", parse=parse_count, metavar="N")
    shared_prefix_attention: bool = option(True, "in decode, read a prefix that several sequences share once per step")

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < 1:
            raise ConfigError(f"--max-num-batched-tokens must be at least 1, got {self.max_num_batched_tokens}")


@dataclass(frozen=True)
class EngineConfig:
    """All settings of the engine process. ``runner`` is the ``module:function`` that makes the Runner."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    runner: str = "anaphora.model.runner:load"


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(8000, "port to listen on")
    api_key: tuple[str, ...] = option((), "key or keys that clients must send as a bearer token", metavar="KEY")
    record: str | None = option(None, "write one JSON line per request to this file (rotated)", metavar="FILE")
    record_prompts: bool = option(False, "with --record: write the request bodies too")
    warm: str | None = option(
        None, "compute the prefixes in this file (request bodies or text) before serving, and pin them", metavar="FILE"
    )
    max_body_bytes: int = option(
        32 * 2**20, "largest request body accepted", parse=parse_bytes, metavar="SIZE", flag="--max-body-size"
    )
    shutdown_timeout: float = option(
        5.0,
        "seconds after SIGINT or SIGTERM in which running requests may finish before they are aborted",
        metavar="SECONDS",
    )
    enable_auto_tool_choice: bool = option(False, "parse tool calls in answers; needs --tool-call-parser")
    tool_call_parser: str | None = option(None, "the format in which the model writes tool calls", choices=("hermes",))
    log_interval: float = option(10.0, "seconds between the log lines with rates under load", hidden=True)

    def __post_init__(self) -> None:
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(f"--shutdown-timeout must be a number of seconds from 0, got {self.shutdown_timeout}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser, such as hermes")
        if self.record_prompts and self.record is None:
            raise ConfigError("--record-prompts needs --record FILE, the file that they are written to")


SERVE_SETTINGS: tuple[type, ...] = (ModelConfig, CacheConfig, SchedulerConfig, ServerConfig)
"""The settings of ``anaphora serve``."""

_NESTED: dict[str, type] = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}


def from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """Return a config of class ``cls`` from plain values (the reverse of dataclasses.asdict).

    Raises ConfigError for unknown names.
    """
    if unknown := set(values) - {f.name for f in fields(cls)}:  # type: ignore[arg-type]
        raise ConfigError(f"{cls.__name__} has no setting {', '.join(sorted(unknown))}")
    ready: dict[str, Any] = {}
    for name, value in values.items():
        if cls is EngineConfig and name in _NESTED:
            value = from_dict(_NESTED[name], value)
        ready[name] = tuple(value) if isinstance(value, list) else value
    return cls(**ready)


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Return an EngineConfig with these settings, given by field name.

    Raises ConfigError for an unknown name (with the closest known one) and for a value of the wrong type.
    """
    known = {f.name: (section, f) for section, cls in _NESTED.items() for f in fields(cls)}
    sections: dict[str, dict[str, Any]] = {section: {} for section in _NESTED}
    for name, value in settings.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; the settings are {', '.join(sorted(known))}"
            raise ConfigError(f"there is no setting {name!r}{hint}", param=name)
        section, spec = known[name]
        sections[section][name] = _setting(spec, value)
    return EngineConfig(**{section: from_dict(_NESTED[section], values) for section, values in sections.items()})


def _setting(spec: Field[Any], value: Any) -> Any:
    """Return the value for a field: text is parsed as on the command line, type and choices are checked."""
    if isinstance(spec.default, tuple):
        named = (value,) if isinstance(value, str) else value
        if not isinstance(named, (list, tuple)) or not all(isinstance(entry, str) for entry in named):
            raise ConfigError(f"{spec.name} must be text or a list of texts, got {value!r}", param=spec.name)
        return tuple(named)
    if isinstance(value, str) and "parse" in spec.metadata:
        try:
            return spec.metadata["parse"](value)
        except ConfigError as error:
            raise ConfigError(f"{spec.name}: {error.message}", param=spec.name) from None
    parse = spec.metadata.get("parse")
    kind = float if parse is parse_gib else int if parse else str if spec.default is None else type(spec.default)
    wanted = (int, float) if kind is float else kind
    free = value is None and spec.default is None
    if not free and (not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool)):
        raise ConfigError(f"{spec.name} must be of type {kind.__name__}, got {value!r}", param=spec.name)
    choices = spec.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{spec.name} must be one of {', '.join(choices)}, got {value!r}", param=spec.name)
    return value

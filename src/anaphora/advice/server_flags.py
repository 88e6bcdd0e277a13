"""Checks a server's settings for what breaks prefix reuse or does not fit the memory, and says how to fix it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SMALL_SHARE = 0.7
"""A ``gpu_memory_utilization`` below this is reported: it leaves much of the GPU unused."""
FEW_TOKENS = 256
"""Pool tokens per sequence. With fewer, concurrent sequences keep preempting each other."""
USUAL_BLOCK = 16
"""Tokens per block by default."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server; None means unknown. Lengths and sizes are in tokens.

    ``exact``: reuse is exact to the token, as in Anaphora, not in whole blocks. ``system_tokens`` is the length of the
    prefix that prompts share, ``prompt_logprobs`` the share of requests that use it, ``template`` has the problems of
    the chat template as (problem, fix).
    """

    exact: bool
    prefix_caching: bool = True
    block_size: int = USUAL_BLOCK
    kv_cache_dtype: str = "auto"
    scales_from_prompt: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    pool_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    hash_algo: str = "sha256"
    replicas: int = 1
    adapters: int = 0
    reports_cached_tokens: bool = True
    chunked_prefill: bool = True
    system_tokens: int | None = None
    prompt_logprobs: float = 0.0
    template: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class FlagWarning:
    """One problem. ``setting`` names the flag or field, ``mend`` says how to fix it; ``breaks`` False marks a note."""

    setting: str
    problem: str
    mend: str
    breaks: bool = True

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}. {self.mend[:1].upper()}{self.mend[1:]}"


def check_server_flags(settings: ServerSettings) -> list[FlagWarning]:
    """Returns what is wrong with the settings; what costs most reuse comes first."""
    return [
        *_check_reuse(settings),
        *_check_template(settings),
        *_check_answers(settings),
        *_check_memory(settings),
        *_check_other(settings),
    ]


def _check_reuse(settings: ServerSettings) -> Iterator[FlagWarning]:
    if not settings.prefix_caching:
        yield FlagWarning(
            "--no-enable-prefix-caching",
            "prefix caching is off: every prompt is computed completely",
            "leave the flag out",
        )
        return
    size, system = settings.block_size, settings.system_tokens
    if system is not None and system < size:
        lost = (
            "each hit copies it, concurrent prompts compute it twice, and decode does not share it"
            if settings.exact
            else "it never hits, because only whole blocks are reused"
        )
        yield FlagWarning(
            "--block-size",
            f"a block of {size} tokens is larger than the {system} tokens that prompts share: {lost}",
            f"use --block-size {USUAL_BLOCK}"
            if system >= USUAL_BLOCK
            else "make the shared prefix longer than a block",
        )
    elif system is None and size > 2 * USUAL_BLOCK and not settings.exact:
        yield FlagWarning(
            "--block-size",
            f"only whole blocks of {size} tokens are reused: the rest of a shared prefix is computed again each time, "
            "and a shared prefix of fewer tokens never hits",
            f"use --block-size {USUAL_BLOCK}",
        )
    if settings.prompt_logprobs:
        yield FlagWarning(
            "prompt_logprobs",
            f"{settings.prompt_logprobs:.0%} of the requests ask for it: all their positions must be computed, so they "
            "do not use the cache",
            "ask for logprobs of the answer, or send the scoring requests to a separate server",
        )
    if settings.replicas > 1:
        yield FlagWarning(
            "--data-parallel-size",
            f"each of {settings.replicas} replicas has its own cache: a prefix is computed {settings.replicas} times, "
            "and a conversation that moves to another replica finds nothing cached",
            "put a router in front that routes by conversation or by prefix",
        )
    if settings.adapters > 1:
        yield FlagWarning(
            "--lora-modules",
            f"{settings.adapters} adapters share no cache: a prefix is computed once for each",
            "send requests that share a prefix to the same adapter, and size the cache for all adapters",
        )


def _check_template(settings: ServerSettings) -> Iterator[FlagWarning]:
    for problem, mend in settings.template:
        yield FlagWarning("the chat template", problem, mend)


def _check_answers(settings: ServerSettings) -> Iterator[FlagWarning]:
    if settings.kv_cache_dtype.startswith(("fp8", "int8", "float8", "nvfp4", "turboquant")):
        yield FlagWarning(
            f"--kv-cache-dtype {settings.kv_cache_dtype}",
            "keys and values are rounded when stored: a hit reads rounded values, while a cold computation may use "
            "exact ones, so cached and cold answers differ more often",
            "use --kv-cache-dtype auto if answers must not depend on the cache, or accept it for twice the tokens",
        )
    if settings.scales_from_prompt:
        yield FlagWarning(
            "--calculate-kv-scales",
            "the scales of stored keys and values come from the first prompt, so answers depend on which prompt came "
            "first",
            "use a checkpoint with scales, or leave the flag out",
        )
    if settings.hash_algo not in ("sha256", "sha256_cbor"):
        yield FlagWarning(
            f"--prefix-caching-hash-algo {settings.hash_algo}",
            "an attacker can construct two prompts with the same hash: one tenant could be served another's blocks",
            "use sha256",
        )


def _check_memory(settings: ServerSettings) -> Iterator[FlagWarning]:
    pool, longest, together = settings.pool_tokens, settings.max_model_len, settings.max_num_seqs
    if pool is not None and longest is not None and pool < longest:
        yield FlagWarning(
            "--max-model-len",
            f"the cache holds {pool:,} tokens, {pool / longest:.2f} requests of the full {longest:,}: a long one does "
            "not fit, and evicts all prefixes as it runs",
            f"use --max-model-len {pool} or less, or give the cache more with --kv-cache-memory-bytes or "
            "--gpu-memory-utilization",
        )
    if pool is not None and together is not None and pool < FEW_TOKENS * together:
        yield FlagWarning(
            "--max-num-seqs",
            f"{together} sequences at once leave {pool // together} tokens of the cache for each: they preempt each "
            "other, and each preempted prompt is computed again",
            f"use --max-num-seqs {max(pool // FEW_TOKENS, 1)} or less",
        )
    if settings.gpu_memory_utilization is not None and settings.gpu_memory_utilization < SMALL_SHARE:
        yield FlagWarning(
            "--gpu-memory-utilization",
            f"{1 - settings.gpu_memory_utilization:.0%} of the GPU's memory is unused; a larger cache would evict less",
            "use 0.9 unless something else needs the GPU",
            breaks=False,
        )


def _check_other(settings: ServerSettings) -> Iterator[FlagWarning]:
    if not settings.chunked_prefill:
        yield FlagWarning(
            "--no-enable-chunked-prefill",
            "a long prompt delays all other requests until it is computed completely",
            "leave the flag out",
            breaks=False,
        )
    if not settings.reports_cached_tokens:
        yield FlagWarning(
            "--enable-prompt-tokens-details",
            "without it, usage does not report cached tokens: nobody sees when reuse stops",
            "add the flag",
            breaks=False,
        )

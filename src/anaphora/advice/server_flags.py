"""Settings of a server that break the reuse of prompt beginnings, or do not fit its memory; and what mends each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SMALL_SHARE = 0.7
"""Of the GPU's memory; less than this leaves much of it unused."""
FEW_TOKENS = 256
"""Tokens of the pool a sequence; with fewer, sequences that run together preempt each other all the time."""
USUAL_BLOCK = 16


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What is known of a server; None is unknown. Lengths and sizes in tokens.

    ``system_tokens`` is the length of what prompts begin with, ``prompt_logprobs`` the share of the requests that ask
    for them, ``template`` the problems of the chat template, each with what mends it.
    """

    exact: bool
    """Reuse is exact to the token, as Anaphora's; else whole blocks are reused."""
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
    """``setting`` is the flag, or what else it is about. ``breaks`` False: worth knowing, but nothing is lost by it."""

    setting: str
    problem: str
    mend: str
    breaks: bool = True

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}. {self.mend[:1].upper()}{self.mend[1:]}"


def check_server_flags(setup: ServerSettings) -> list[FlagWarning]:
    """What is wrong with a setup, what costs most reuse first."""
    return [*_reuse(setup), *_template(setup), *_answers(setup), *_memory(setup), *_sight(setup)]


def _reuse(setup: ServerSettings) -> Iterator[FlagWarning]:
    if not setup.prefix_caching:
        yield FlagWarning(
            "--no-enable-prefix-caching",
            "prefix caching is off: every prompt is computed whole",
            "leave the flag out",
        )
        return
    size, system = setup.block_size, setup.system_tokens
    if system is not None and system < size:
        lost = (
            "each hit copies it, prompts that come together compute it twice, and decode does not share it"
            if setup.exact
            else "it never hits, since only whole blocks are reused"
        )
        yield FlagWarning(
            "--block-size",
            f"a block of {size} tokens is larger than the {system} tokens that prompts share: {lost}",
            f"use --block-size {USUAL_BLOCK}"
            if system >= USUAL_BLOCK
            else "make what prompts share longer than a block",
        )
    elif system is None and size > 2 * USUAL_BLOCK and not setup.exact:
        yield FlagWarning(
            "--block-size",
            f"only whole blocks of {size} tokens are reused: what prompts share beyond a multiple of that is computed "
            f"each time, and a shared beginning of fewer tokens never hits",
            f"use --block-size {USUAL_BLOCK}",
        )
    if setup.prompt_logprobs:
        yield FlagWarning(
            "prompt_logprobs",
            f"{setup.prompt_logprobs:.0%} of the requests ask for it: they need every position computed, so they read "
            "nothing from the cache",
            "ask for logprobs of the answer, or send the scoring requests to a server of their own",
        )
    if setup.replicas > 1:
        yield FlagWarning(
            "--data-parallel-size",
            f"each of {setup.replicas} replicas has a cache of its own: a prefix is computed {setup.replicas} times, "
            "and a conversation that changes its replica starts anew",
            "route by conversation or by prefix in front of them",
        )
    if setup.adapters > 1:
        yield FlagWarning(
            "--lora-modules",
            f"{setup.adapters} adapters share nothing: a prefix is computed once for each",
            "send requests that share a prefix to one adapter, and count the cache's size by adapter",
        )


def _template(setup: ServerSettings) -> Iterator[FlagWarning]:
    for problem, mend in setup.template:
        yield FlagWarning("the chat template", problem, mend)


def _answers(setup: ServerSettings) -> Iterator[FlagWarning]:
    if setup.kv_cache_dtype.startswith(("fp8", "int8", "float8", "nvfp4", "turboquant")):
        yield FlagWarning(
            f"--kv-cache-dtype {setup.kv_cache_dtype}",
            "keys and values are rounded when they are stored: a hit reads rounded ones where the first computation "
            "may have used exact ones, so cached and cold answers differ more often",
            "use --kv-cache-dtype auto where answers must not depend on the cache, or accept it for twice the tokens",
        )
    if setup.scales_from_prompt:
        yield FlagWarning(
            "--calculate-kv-scales",
            "the scales of stored keys and values come from the first prompt that is run, so answers depend on which "
            "one that was",
            "use a checkpoint with scales, or leave the flag out",
        )
    if setup.hash_algo not in ("sha256", "sha256_cbor"):
        yield FlagWarning(
            f"--prefix-caching-hash-algo {setup.hash_algo}",
            "two prompts may be made to have the same hash: one tenant could be served from another's blocks",
            "use sha256",
        )


def _memory(setup: ServerSettings) -> Iterator[FlagWarning]:
    pool, longest, together = setup.pool_tokens, setup.max_model_len, setup.max_num_seqs
    if pool is not None and longest is not None and pool < longest:
        yield FlagWarning(
            "--max-model-len",
            f"the cache holds {pool:,} tokens, {pool / longest:.2f} requests of the full {longest:,}: a long one does "
            "not fit, and evicts all prefixes on its way",
            f"use --max-model-len {pool} or less, or give the cache more with --kv-cache-memory-bytes or "
            "--gpu-memory-utilization",
        )
    if pool is not None and together is not None and pool < FEW_TOKENS * together:
        yield FlagWarning(
            "--max-num-seqs",
            f"{together} sequences at once leave {pool // together} tokens of the cache for each: they preempt each "
            "other, and each preemption computes a prompt again",
            f"use --max-num-seqs {max(pool // FEW_TOKENS, 1)} or less",
        )
    if setup.gpu_memory_utilization is not None and setup.gpu_memory_utilization < SMALL_SHARE:
        yield FlagWarning(
            "--gpu-memory-utilization",
            f"{1 - setup.gpu_memory_utilization:.0%} of the GPU's memory stays unused; what is evicted for lack of "
            "blocks is computed again",
            "use 0.9 unless something else needs the GPU",
            breaks=False,
        )


def _sight(setup: ServerSettings) -> Iterator[FlagWarning]:
    if not setup.chunked_prefill:
        yield FlagWarning(
            "--no-enable-chunked-prefill",
            "a long prompt holds up all others until it is computed whole",
            "leave the flag out",
            breaks=False,
        )
    if not setup.reports_cached_tokens:
        yield FlagWarning(
            "--enable-prompt-tokens-details",
            "without it usage does not say how many tokens of a prompt were cached: nobody sees that reuse has stopped",
            "add the flag",
            breaks=False,
        )

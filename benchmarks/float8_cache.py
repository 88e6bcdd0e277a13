"""Measures how a float8 KV cache changes the log-probabilities of a real model on real conversations.

    python benchmarks/float8_cache.py --data FOLDER [--prompts 6] [--json FILE]

Takes a request of each conversation of the airline log (``--data``: the folder with airline_conversations.jsonl), its
last 1,000 tokens (what precedes them is the same in all), and asks the embedded model for the log-probability of every
prompt token. Attention runs on the CPU; what it writes to the cache is rounded first as ``--kv-cache-dtype fp8`` rounds
it on a GPU: e4m3 with a scale for each token and KV head.
For scale it also compares a bfloat16 cache with a float32 one. The model computes in float32 each time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cached_against_cold import prompts
from torch import Tensor

from anaphora import LLM, SamplingParams
from anaphora.attention.base import FLOAT8, LayerOptions
from anaphora.attention.cpu import CpuAttention
from anaphora.tools.shared.machine import commit, machine, versions

CUT = 1000
WHOLE = 10**6
TURNS = 3
"""Requests of one conversation that ``prompts`` gives, each longer than the one before."""

Round = Callable[[Tensor], Tensor]


def float8(vectors: Tensor) -> Tensor:
    scale = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 448
    return (vectors / scale).to(FLOAT8).to(vectors.dtype) * scale


def bfloat16(vectors: Tensor) -> Tensor:
    return vectors.bfloat16().to(vectors.dtype)


CACHES: dict[str, Round] = {"float32": lambda vectors: vectors, "bfloat16": bfloat16, "fp8": float8}


def logprobs(llm: LLM, ids: list[int], rounded: Round) -> tuple[list[float], list[int]]:
    """Of the prompt's tokens but the first, and the likeliest token at each place."""
    run = CpuAttention.run

    def run_rounded(
        self: CpuAttention, layer: int, query: Tensor, key: Tensor, value: Tensor | None, options: LayerOptions
    ) -> Tensor:
        return run(self, layer, query, rounded(key), None if value is None else rounded(value), options)

    CpuAttention.run = run_rounded  # type: ignore[method-assign]
    try:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        (output,) = llm.generate([ids], params, use_tqdm=False)
    finally:
        CpuAttention.run = run  # type: ignore[method-assign]
    assert output.prompt_logprobs is not None
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    return [entry.logprob for entry in entries], [entry.top[0][0] for entry in entries]


def compare(exact: tuple[list[float], list[int]], found: tuple[list[float], list[int]]) -> dict[str, float]:
    gaps = [abs(a - b) for a, b in zip(exact[0], found[0], strict=True)]
    same = [a == b for a, b in zip(exact[1], found[1], strict=True)]
    return {
        "tokens": len(gaps),
        "mean_logprob": round(statistics.fmean(found[0]), 5),
        "logprob_error_median": round(statistics.median(gaps), 6),
        "logprob_error_rms": round(statistics.fmean(gap * gap for gap in gaps) ** 0.5, 6),
        "logprob_error_max": round(max(gaps), 5),
        "same_likeliest_token": round(sum(same) / len(same), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    seen: dict[str, tuple[list[float], list[int]]] = {name: ([], []) for name in CACHES}
    with LLM(dtype="float32", device="cpu", kv_cache_memory_bytes="512M") as llm, torch.inference_mode():
        requests = prompts(options.data, TURNS * options.prompts, WHOLE, llm)
        for ids in (request[-CUT:] for request in requests[TURNS - 1 :: TURNS]):
            for name, rounded in CACHES.items():
                values, tops = logprobs(llm, ids, rounded)
                seen[name][0].extend(values)
                seen[name][1].extend(tops)
    found: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "prompts": options.prompts,
        "caches": {name: compare(seen["float32"], each) for name, each in seen.items()},
    }
    print(json.dumps(found["caches"], indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

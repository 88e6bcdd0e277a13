"""Compares the logits of cached answers with those of cold ones on real conversations.

    python benchmarks/cached_against_cold.py --data FOLDER [--prompts 60] [--json FILE]

Takes requests of the airline log (``--data``: the folder with airline_conversations.jsonl), cut to 1,500 tokens, and
runs each twice, greedily: with the cache off, and with it on after the requests before it have filled the cache. In
float32 the logits of the first token are compared. In bfloat16 the answers are compared up to the first token that
differs, where both runs have the same tokens so far: a flip is explained if the cold run prefers its own token by no
more than twice the largest difference of the logits there. What follows is not compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from anaphora import LLM, SamplingParams
from anaphora.tools.shared.machine import commit, machine, versions

CUT = 1500
ANSWER = 16


def prompts(folder: Path, count: int, cut: int, llm: LLM) -> list[list[int]]:
    """Requests of the log in order, several turns of each conversation, cut to ``cut`` tokens."""
    tokenizer = llm.get_tokenizer()
    template = tokenizer.chat_template
    assert template is not None
    found: list[list[int]] = []
    for line in (folder / "airline_conversations.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for turn in turns[:3]:
            text = template.render(messages[:turn])
            found.append(tokenizer.encode(text, add_special_tokens=False)[:cut])
            if len(found) == count:
                return found
    raise SystemExit(f"the log holds {len(found)} requests, fewer than the {count} asked for")


def logits_of(llm: LLM, ids: list[int], tokens: int) -> tuple[list[int], list[torch.Tensor], int]:
    """Greedy tokens, the logits that each was chosen from, and how many prompt tokens were cached."""
    seen: list[torch.Tensor] = []
    sampler: Any = llm._engine.runner._sampler  # type: ignore[attr-defined]
    sample = sampler.sample

    def record(logits: torch.Tensor, slots: list[int]) -> Any:
        seen.append(logits[0].float().clone())
        return sample(logits, slots)

    sampler.sample = record
    try:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        (output,) = llm.generate([ids], params, use_tqdm=False)
    finally:
        del sampler.sample
    return output.outputs[0].token_ids, seen, output.num_cached_tokens


def compare(folder: Path, count: int, dtype: str, tokens: int, cut: int = CUT) -> dict[str, Any]:
    gaps: list[float] = []
    flips: list[dict[str, float]] = []
    cached_tokens: list[int] = []
    pool = "512M"
    with (
        LLM(dtype=dtype, kv_cache_memory_bytes=pool, enable_prefix_caching=False) as cold,
        LLM(dtype=dtype, kv_cache_memory_bytes=pool) as warm,
    ):
        requests = prompts(folder, count, cut, cold)
        for done, ids in enumerate(requests):
            print(f"\r{dtype}: {done + 1} of {count}", end="", file=sys.stderr)
            expected, cold_logits, none = logits_of(cold, ids, tokens)
            assert none == 0
            got, warm_logits, cached = logits_of(warm, ids, tokens)
            cached_tokens.append(cached)
            gaps.append((cold_logits[0] - warm_logits[0]).abs().max().item())
            for at, (a, b) in enumerate(zip(expected, got, strict=True)):
                if a != b:
                    gap = (cold_logits[at] - warm_logits[at]).abs().max().item()
                    margin = (cold_logits[at][a] - cold_logits[at][b]).item()
                    flips.append({"position": at, "gap": gap, "margin": margin})
                    break
        warm.check()
    print(file=sys.stderr)
    hits = [gap for gap, cached in zip(gaps, cached_tokens, strict=True) if cached]
    return {
        "dtype": dtype,
        "prompts": count,
        "prompts_with_hits": len(hits),
        "cached_tokens_mean": statistics.fmean(cached_tokens),
        "first_tokens_equal_to_the_bit": sum(gap == 0 for gap in hits),
        "first_token_gap_max": max(hits),
        "first_token_gap_median": statistics.median(hits),
        "tokens_compared": tokens,
        "answers_that_differ": len(flips),
        "flips": flips,
        "unexplained": sum(flip["margin"] > 2 * flip["gap"] for flip in flips),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", default=60, type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "cut": CUT,
        "float32": compare(options.data, options.prompts, "float32", 1),
        "bfloat16": compare(options.data, options.prompts, "bfloat16", ANSWER),
    }
    text = json.dumps(results, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(results["float32"]["first_token_gap_max"] > 1e-3 or results["bfloat16"]["unexplained"] > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The engine on one GPU: Qwen3-8B's shape with random weights, many requests that begin with the same tokens.

    python benchmarks/h200.py [--rows NAME ...] [--again] [--tiny] [--out FILE] [--commit ID]

Rows that are stored already are passed over, and each is stored as soon as it is measured. A row's requests are all
sent at once: a system prompt of 2,300 tokens, 120 of their own, answers of 200. ``_unshared`` reads the shared prefix
once a sequence instead of once a step; ``off`` runs without the cache. ``--tiny`` is a rehearsal on any machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from anaphora.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from anaphora.core.engine import Engine
from anaphora.model.runner import ModelRunner, load
from anaphora.types import Request, SamplingParams

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Size:
    """Of model and workload, in tokens; ``part`` divides the numbers of requests in the rows' names."""

    shared: int
    own: int
    answer: int
    part: int
    budget: int
    shape: dict[str, Any]


FULL = Size(2300, 120, 200, 1, 16384, {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "dtype": "bfloat16",
})  # fmt: skip
TINY = Size(70, 12, 6, 64, 256, {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "dtype": "float32",
})  # fmt: skip


@dataclass
class Round:
    """What a set of requests that came together saw."""

    seconds: float = 0.0
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    steps: list[tuple[float, int]] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0
    preemptions: int = 0

    def figures(self) -> dict[str, Any]:
        produced = sum(self.tokens.values())
        gaps = [(self.last[k] - self.first[k]) / (n - 1) for k, n in self.tokens.items() if n > 1]
        full = len(self.first)
        decode = [seconds for seconds, rows in self.steps if rows == full]
        return {
            "requests": len(self.first),
            "seconds": round(self.seconds, 4),
            "requests_per_s": round(len(self.first) / self.seconds, 3),
            "output_tokens_per_s": round(produced / self.seconds, 1),
            "step_ms": _ms(decode),
            "ttft_ms": _ms(list(self.first.values())),
            "itl_ms": _ms(gaps),
            "hit_rate": round(self.cached / self.prompt, 4),
            "preemptions": self.preemptions,
        }


def _ms(seconds: list[float]) -> float | None:
    return round(1000 * statistics.median(seconds), 3) if seconds else None


class Bench:
    """One loaded model; each row has an engine of its own over it."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size = size
        transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"], **size.shape).save_pretrained(folder)
        self.config = EngineConfig(
            ModelConfig(model=str(folder), load_format="dummy"),
            CacheConfig(),
            SchedulerConfig(max_num_seqs=1024 // size.part, max_num_batched_tokens=size.budget),
        )
        started = time.monotonic()
        self.runner: ModelRunner = load(self.config)
        self.load_seconds = time.monotonic() - started
        self._random = random.Random(0)
        self._requests = 0

    def engine(self, *, caching: bool = True, sharing: bool = True) -> Engine:
        config = dataclasses.replace(
            self.config,
            cache=dataclasses.replace(self.config.cache, enable_prefix_caching=caching),
            scheduler=dataclasses.replace(self.config.scheduler, shared_prefix_attention=sharing),
        )
        return Engine(config, self.runner)

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self.size.shape["vocab_size"]) for _ in range(length))

    def round(self, engine: Engine, prompts: list[tuple[int, ...]], answer: int) -> Round:
        """Send all prompts at once and run until the last answer has ended."""
        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        found = Round(preemptions=-engine.stats().preemptions)
        begin = time.monotonic()
        for prompt in prompts:
            self._requests += 1
            engine.add(Request(f"r{self._requests}", prompt, sampling, begin))
        before = begin
        while engine.has_work:
            result = engine.step()
            now = time.monotonic()
            found.steps.append((now - before, len(result.updates)))
            before = now
            for update in result.updates:
                if update.error:
                    raise RuntimeError(update.error)
                name = update.request_id
                found.first.setdefault(name, now - begin)
                found.last[name] = now - begin
                found.tokens[name] = found.tokens.get(name, 0) + len(update.token_ids)
                if update.prompt is not None:
                    found.cached += update.prompt.cache.cached_tokens
                    found.prompt += update.prompt.cache.prompt_tokens
        found.seconds = time.monotonic() - begin
        found.preemptions += engine.stats().preemptions
        engine.check()
        return found

    def shared(self, count: int, *, caching: bool = True, sharing: bool = True) -> dict[str, Any]:
        """``count`` requests under one system prompt, which is computed before the clock starts."""
        size, engine = self.size, self.engine(caching=caching, sharing=sharing)
        system = self.text(size.shared)
        count //= size.part
        self.round(engine, [system + self.text(size.own)], 4)
        self.round(engine, [system + self.text(size.own) for _ in range(count)], 4)
        return self.round(engine, [system + self.text(size.own) for _ in range(count)], size.answer).figures()

    def alone(self, *, hit: bool) -> dict[str, Any]:
        """One request at a time, the median of several: time to its first token."""
        size, engine = self.size, self.engine()
        times = []
        for _ in range(12):
            system = self.text(size.shared)
            if hit:
                self.round(engine, [system + self.text(size.own)], 1)
            times.append(self.round(engine, [system + self.text(size.own)], 1))
        times = times[2:]
        return {
            "ttft_ms": _ms([seconds for each in times for seconds in each.first.values()]),
            "hit_rate": round(sum(t.cached for t in times) / sum(t.prompt for t in times), 4),
        }

    def single_stream(self) -> dict[str, Any]:
        engine = self.engine()
        prompt = self.text(self.size.shared + self.size.own)
        self.round(engine, [prompt], 4)
        return self.round(engine, [prompt], self.size.answer).figures()


def rows(bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name, in the order in which they are measured."""
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "ttft_cold": lambda: bench.alone(hit=False),
        "ttft_hit": lambda: bench.alone(hit=True),
        "single_stream": bench.single_stream,
    }
    for count in (512, 256, 1024):
        found[f"on_{count}"] = lambda count=count: bench.shared(count)
        found[f"on_{count}_unshared"] = lambda count=count: bench.shared(count, sharing=False)
    found["off_256"] = lambda: bench.shared(256, caching=False)
    return found


def machine() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"device": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return {"device": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}


def ceilings() -> dict[str, float]:
    """Of the GPU: bytes read and written by a copy, and bf16 operations of a matrix product, each a second."""
    if not torch.cuda.is_available():
        return {}
    from triton.testing import do_bench

    source = torch.randn(2**30, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = do_bench(lambda: a @ b, return_mode="median")
    return {"copy_bytes_per_s": 4 * 2**30 / copy * 1000, "bf16_flop_per_s": 2 * 8192**3 / product * 1000}


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="which to measure (all)")
    parser.add_argument("--again", action="store_true", help="measure rows that are stored already")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with a tiny model")
    parser.add_argument("--out", type=Path, default=RESULTS / f"h200-{date.today()}.json")
    parser.add_argument("--commit", help="of the code, where this is no git repository")
    options = parser.parse_args()
    stored: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    with tempfile.TemporaryDirectory() as folder:
        stored["ceilings"] = stored.get("ceilings") or ceilings()
        torch.cuda.empty_cache()
        bench = Bench(TINY if options.tiny else FULL, Path(folder))
        stored["machine"] = machine()
        stored["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        stored["commit"] = options.commit or commit()
        info = bench.runner.info
        stored["engine"] = dataclasses.asdict(info) | {"load_seconds": round(bench.load_seconds, 1)}
        known = rows(bench)
        if strange := sorted(set(options.rows or ()) - known.keys()):
            parser.error(f"there is no row {', '.join(strange)}; the rows are {', '.join(known)}")
        done = set() if options.again else {row["name"] for row in stored["rows"]}
        for name, measure in known.items():
            if name in done or (options.rows and name not in options.rows):
                continue
            row = {"name": name} | measure()
            stored["rows"] = [old for old in stored["rows"] if old["name"] != name] + [row]
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(stored, indent=1) + "\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""Microseconds of one layer's attention on a GPU: by batch, with and without shared-prefix attention, by tile config.

    python benchmarks/attention.py [--tune] [--json FILE]

Times are of CUDA graph replays over the pools of several layers, so that no layer finds its keys in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from anaphora.attention import gpu as backend_module
from anaphora.attention import gpu_plan
from anaphora.attention.base import KVLayout, LayerOptions, QueryRange, StepLayout
from anaphora.attention.gpu_tiles import TileConfig
from anaphora.types.batch import PrefixGroup

LAYOUT = KVLayout(8, 128, 128)  # Qwen3-8B
HEADS = 32
LAYERS = 4
BLOCK = 16
DEVICE = torch.device("cuda")
OPTIONS = LayerOptions(128**-0.5)


def make(rows: list[tuple[int, int, int]], groups: int) -> tuple[StepLayout, int]:
    """``rows`` are (shared keys, own keys, new tokens); row i shares the blocks of group i modulo ``groups``."""
    heads = [1 + g * 1024 for g in range(groups)]
    next_block = 1 + groups * 1024
    queries, members, row = [], [[] for _ in range(groups)], 0
    for slot, (shared, own, new) in enumerate(rows):
        first = heads[slot % groups] if groups else 0
        own_blocks = -(-(own + new) // BLOCK)
        table = [*range(first, first + shared // BLOCK), *range(next_block, next_block + own_blocks)]
        next_block += own_blocks
        queries.append(QueryRange(slot, row, new, shared + own, table))
        if groups:
            members[slot % groups].append(slot)
        row += new
    slots = [q.blocks[p // BLOCK] * BLOCK + p % BLOCK for q in queries for p in range(q.start, q.start + q.length)]
    found = tuple(PrefixGroup(0, rows[m[0]][0] // BLOCK, tuple(m)) for m in members if len(m) > 1)
    return StepLayout(torch.tensor(slots, device=DEVICE), tuple(queries), found), next_block


def decode(batch: int, shared: int, own: int, groups: int = 1) -> tuple[StepLayout, int]:
    return make([(shared, own, 1)] * batch, groups)


def time_layer(step: tuple[StepLayout, int], share: bool) -> float:
    """Microseconds of one layer."""
    layout, blocks = step
    if not share:
        layout = StepLayout(layout.slot_mapping, layout.queries)
    backend = backend_module.TritonAttention([LAYOUT] * LAYERS, blocks, BLOCK, torch.bfloat16, DEVICE)
    for pool in backend.pools:
        pool.normal_()
    rows = len(layout.slot_mapping)
    query = torch.randn(rows, HEADS, 128, dtype=torch.bfloat16, device=DEVICE).transpose(0, 1)
    key, value = torch.randn(2, rows, 8, 128, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
    backend.plan(layout)

    def layers() -> None:
        for layer in range(LAYERS):
            backend.run(layer, query, key, value, OPTIONS)

    return graph_time(layers) / LAYERS


def graph_time(work: Callable[[], None]) -> float:
    """Microseconds of a replay, the median."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return 1000 * float(triton.testing.do_bench(graph.replay, warmup=10, rep=60, return_mode="median"))


CASES = {
    "decode 1 x 2528": (decode(1, 2304, 224), False),
    "decode 16": (decode(16, 2304, 224), True),
    "decode 64": (decode(64, 2304, 224), True),
    "decode 256": (decode(256, 2304, 224), True),
    "decode 512": (decode(512, 2304, 224), True),
    "decode 256, 8192 shared": (decode(256, 8192, 224), True),
    "decode 256, 16 groups": (decode(256, 2304, 224, 16), True),
    "decode 1024, 16 groups": (decode(1024, 2304, 224, 16), True),
    "prompt 2420": (make([(0, 0, 2420)], 0), False),
    "6 prompts of 2420": (make([(0, 0, 2420)] * 6, 0), False),
    "hit: 132 over 2288": (make([(2288, 0, 132)], 1), False),
    "64 hits: 120 over 2304": (make([(2304, 0, 120)] * 64, 1), False),
}


def table() -> dict[str, dict[str, float]]:
    found = {}
    for name, (step, shares) in CASES.items():
        found[name] = {"apart_us": time_layer(step, False)} | ({"shared_us": time_layer(step, True)} if shares else {})
        print(f"{name:28}" + "".join(f"  {key} {value:8.1f}" for key, value in found[name].items()), flush=True)
    return found


def gate() -> list[tuple[int, int, float, float]]:
    """Measure where sharing pays: (members, keys, µs without sharing, µs with) for batches of one group."""
    found = []
    gpu_plan.MIN_SHARED_KEYS = gpu_plan.MIN_SAVED_BYTES = 1
    for members in (2, 4, 8, 16, 32, 64):
        for keys in (64, 128, 256, 512, 1024, 2048, 4096):
            step = decode(members, keys, 128)
            found.append((members, keys, time_layer(step, False), time_layer(step, True)))
            print("gate {:4d} members {:5d} keys: apart {:7.1f} shared {:7.1f}".format(*found[-1]), flush=True)
    return found


def tune() -> None:
    shapes = backend_module.tile_configs
    small, large = shapes(LAYOUT, 4, 2)
    small_trials = [(16, n, w, 3) for n in (32, 64, 128) for w in (1, 2, 4)] + [(16, 64, 4, 4), (16, 128, 4, 2)]
    large_trials = [(128, n, 8, s) for n in (64, 128) for s in (2, 3, 4)]
    large_trials += [(64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 3)]
    trials = [("small", TileConfig(*trial)) for trial in small_trials]
    trials += [("large", TileConfig(*trial)) for trial in large_trials]
    work = {
        "small": ("decode 1 x 2528", "decode 256", "decode 512"),
        "large": ("decode 256", "decode 512", "6 prompts of 2420", "hit: 132 over 2288"),
    }
    for kind, shape in trials:
        backend_module.tile_configs = lambda *_: (shape, large) if kind == "small" else (small, shape)  # noqa: B023
        try:
            times = [(name, time_layer(*CASES[name])) for name in work[kind]]
        except Exception as error:  # too large a tile for the processor
            print(kind, shape, str(error)[:90].replace("\n", " "), flush=True)
            continue
        print(
            kind,
            shape.block_m,
            shape.block_n,
            shape.num_warps,
            shape.num_stages,
            *(f"{t:8.1f}" for _, t in times),
            flush=True,
        )
    backend_module.tile_configs = shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    found["cases"] = table()
    if options.tune:
        tune()
    found["gate"] = gate()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

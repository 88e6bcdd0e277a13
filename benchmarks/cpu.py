"""The figures of this machine's CPU: row by row, each stored as soon as it is there.

    python benchmarks/cpu.py [--rows NAME…] [--json FILE]

Everything runs through real servers with the embedded model, as `anaphora bench` starts them. Without --json the rows
are only printed. A file that is there is added to: rows in it are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from anaphora.tools.bench.own_server import OwnServer
from anaphora.tools.shared.machine import commit, machine, versions

Row = dict[str, Any]
COLD_TFLOP = 0.72
"""Of the prefill of a cold prompt of 2,420 tokens by the embedded model."""
KEPT = (
    *("requests", "requests_per_s", "output_tokens_per_s", "prefill_mean_s", "ttft_mean_s", "ttft_p50_s"),
    *("ttft_p99_s", "itl_p50_s", "hit_rate", "hit_rate_requests"),
)


def bench(arguments: str) -> dict[str, Any]:
    """What ``anaphora bench`` with these arguments writes to its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "bench.json")
        subprocess.run(
            [sys.executable, "-m", "anaphora", "bench", *shlex.split(arguments), "--json", str(target)], check=True
        )
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def sides(found: dict[str, Any]) -> Row:
    row: Row = {side: {key: found[side][key] for key in KEPT} for side in ("off", "on") if found.get(side)}
    if found.get("cost_ratio"):
        row["cost_ratio"] = found["cost_ratio"]
    return row


def gemm_rate() -> float:
    """TFLOP/s of bfloat16 GEMMs of the embedded model's MLP (2,048 rows, 576 to 1,536) on all cores, the median."""
    import torch

    rows, size, outputs = 2048, 576, 1536
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, size).bfloat16())
    x = torch.randn(rows, size).bfloat16()
    times = []
    for _ in range(60):
        begun = time.perf_counter()
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        times.append(time.perf_counter() - begun)
    return 2 * rows * size * outputs / statistics.median(times[10:]) / 1e12


def alone() -> Row:
    """One request at a time: the time to the first token, cold and with the shared prefix cached.

    The GEMM rate, measured before and after, says what the machine gave: a cold prompt of 2,420 tokens is 0.72 TFLOP.
    """
    rates = [gemm_rate()]
    found = bench("--workload customer-service --requests 6 --concurrency 1 --out 16 --rounds 1")
    on = sorted(found["on"]["ttft_s"])
    rates.append(gemm_rate())
    row: Row = {"ttft_cold_s": found["off"]["ttft_p50_s"], "ttft_hit_s": statistics.median(on[:-1])}
    row["gemm_tflop_per_s"] = statistics.mean(rates)
    return row | {"cold_over_gemm_time": row["ttft_cold_s"] * row["gemm_tflop_per_s"] / COLD_TFLOP}


def concurrency_8() -> Row:
    return sides(bench("--workload customer-service --requests 16 --concurrency 8 --rounds 2"))


def concurrency_32() -> Row:
    """64 requests, 32 at a time, with the cache alone."""

    async def run() -> Row:
        server = OwnServer(None, caching=True)
        try:
            await server.ready()
            load = "--workload customer-service --requests 64 --concurrency 32 --rounds 1"
            return sides(await asyncio.to_thread(bench, f"{load} --url {server.url}"))
        finally:
            await asyncio.to_thread(server.stop)

    return asyncio.run(run())


def little_to_reuse(workload: str) -> Callable[[], Row]:
    return lambda: sides(bench(f"--workload {workload} --requests 12 --concurrency 4 --rounds 2"))


def sweep() -> Row:
    """Median prefill at 10, 20 and 30 requests at once, with short answers."""
    found = bench("--shared 2300 --own 120 --out 8 --requests 10 --rounds 1 --sweep 10,20,30")
    return {"sweep": found["sweep"]}


def server() -> Row:
    """Seconds from start to ready, CPU seconds in ten idle ones, and seconds of ``anaphora --help``.

    The start is the second: the first may compile kernels, which are then kept.
    """

    async def run() -> Row:
        first = OwnServer(None, caching=True)
        try:
            await first.ready()
        finally:
            await asyncio.to_thread(first.stop)
        own = OwnServer(None, caching=True)
        try:
            ready = await own.ready()
            family = [psutil.Process(own.pid), *psutil.Process(own.pid).children(recursive=True)]
            await asyncio.sleep(2)
            before = sum(sum(p.cpu_times()[:2]) for p in family)
            await asyncio.sleep(10)
            idle = sum(sum(p.cpu_times()[:2]) for p in family) - before
        finally:
            await asyncio.to_thread(own.stop)
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-m", "anaphora", "--help"], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - begun)
        return {"ready_s": ready, "idle_cpu_s_in_10_s": idle, "help_s": statistics.median(times)}

    return asyncio.run(run())


ROWS: dict[str, Callable[[], Row]] = {
    "server": server,
    "alone": alone,
    "concurrency_8": concurrency_8,
    "concurrency_32": concurrency_32,
    "code-generation": little_to_reuse("code-generation"),
    "knowledge-base-raw": little_to_reuse("knowledge-base-raw"),
    "knowledge-base": little_to_reuse("knowledge-base"),
    "sweep": sweep,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stored: dict[str, Any] = {"machine": machine(), "versions": versions(), "commit": commit(), "rows": {}}
    if options.json and options.json.exists():
        stored = json.loads(options.json.read_text())
    for name in options.rows:
        if name in stored["rows"]:
            continue
        print(f"== {name}", file=sys.stderr)
        row = ROWS[name]() | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit()}
        stored["rows"][name] = row
        print(json.dumps({name: row}, indent=2))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(stored, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Anaphora and vLLM's CPU build on this machine, in turn within one run: the same client, model and requests.

    python benchmarks/vllm_cpu.py --vllm "vllm serve MODEL --dtype bfloat16 ..." [--rounds N] [--json FILE]

The command starts vLLM's server on the embedded model's folder; ``--port``, ``--served-model-name`` and the flag that
switches prefix caching on or off are added here. Each round starts each server twice (caching off, then on), and the
order of the two systems alternates. Quote the ratios, and of several rounds the smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from anaphora.tools.bench.own_server import OwnServer, free_port
from anaphora.tools.shared.machine import commit, machine, versions

START_SECONDS = 300
ALONE = "--requests 6 --concurrency 1 --out 16"
LOADS = {"at_8": "--requests 16 --concurrency 8", "at_32": "--requests 64 --concurrency 32"}


@asynccontextmanager
async def anaphora_server(caching: bool) -> AsyncIterator[str]:
    """Run our own server; yields its URL."""
    server = OwnServer(None, caching=caching)
    try:
        await server.ready()
        yield server.url
    finally:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def vllm_server(command: str, caching: bool) -> AsyncIterator[str]:
    """Run vLLM's server from ``command``; yields its URL."""
    port = free_port()
    flags = f"--port {port} --served-model-name SmolLM2-135M-Instruct --{'' if caching else 'no-'}enable-prefix-caching"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            shlex.split(f"{command} {flags}"), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url, begun = f"http://127.0.0.1:{port}", time.perf_counter()
            async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
                while True:
                    if process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
                        output.seek(0)
                        sys.exit("vLLM did not start:\n" + output.read().decode(errors="replace")[-3000:])
                    try:
                        if (await client.get(f"{url}/health")).is_success:
                            break
                    except httpx.HTTPError:
                        pass
                    await asyncio.sleep(0.5)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            await asyncio.to_thread(process.wait)


async def bench(url: str, load: str) -> dict[str, Any]:
    """What ``anaphora bench --url`` measures with this load."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "bench.json")
        command = f"bench --workload customer-service --rounds 1 --url {url} {load} --json {target}"
        done = await asyncio.create_subprocess_exec(sys.executable, "-m", "anaphora", *shlex.split(command))
        if await done.wait():
            sys.exit(f"anaphora {command} ended with code {done.returncode}")
        found: dict[str, Any] = json.loads(target.read_text())["on"]
        return found


async def measure(system: str, command: str, loads: Sequence[str]) -> dict[str, float]:
    """One round of one system: seconds to the first token alone, requests a second and TTFT p99 under load."""

    def server(caching: bool) -> Any:
        return anaphora_server(caching) if system == "anaphora" else vllm_server(command, caching)

    row: dict[str, float] = {}
    async with server(False) as url:
        row["ttft_cold_s"] = (await bench(url, ALONE))["ttft_p50_s"]
        if "at_8" in loads:
            found = await bench(url, LOADS["at_8"])
            row |= {"off_at_8_requests_per_s": found["requests_per_s"], "off_at_8_ttft_p99_s": found["ttft_p99_s"]}
    async with server(True) as url:
        alone = sorted((await bench(url, ALONE))["ttft_s"])
        row["ttft_hit_s"] = statistics.median(alone[:-1])  # the slowest is the cold one
        for name in loads:
            found = await bench(url, LOADS[name])
            row |= {f"on_{name}_requests_per_s": found["requests_per_s"]}
    return row


async def run(command: str, rounds: int, loads: Sequence[str]) -> list[dict[str, dict[str, float]]]:
    found = []
    for number in range(rounds):
        order = ("anaphora", "vllm") if number % 2 == 0 else ("vllm", "anaphora")
        found.append({system: await measure(system, command, loads) for system in order})
        print(json.dumps(found[-1], indent=2))
    return found


def ratios(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """How many times faster Anaphora is, of all rounds the smallest; below 1 it is slower."""
    smallest = {}
    for name in rounds[0]["vllm"]:
        faster = [(row["vllm"][name], row["anaphora"][name]) for row in rounds]
        smallest[name] = min(a / b if name.endswith("_s") and "requests" not in name else b / a for a, b in faster)
    return smallest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="COMMAND", help="starts vLLM's server")
    parser.add_argument("--vllm-version", default="", help="stored with the result")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS), help="besides one request alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stored = {"machine": machine(), "versions": versions() | {"vllm": options.vllm_version}, "commit": commit()}
    stored["rounds"] = asyncio.run(run(options.vllm, options.rounds, options.loads))
    stored["times_faster_smallest"] = ratios(stored["rounds"])
    print(json.dumps(stored["times_faster_smallest"], indent=2))
    if options.json:
        options.json.write_text(json.dumps(stored, indent=2) + "\n")


if __name__ == "__main__":
    main()

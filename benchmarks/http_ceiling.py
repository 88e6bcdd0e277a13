"""Measures how many tokens per second one server process can stream: everything except the model.

    python benchmarks/http_ceiling.py [--streams N] [--tokens N] [--rounds N] [--json FILE]

The engine is a process of its own, with a runner that computes nothing; clients are processes that read raw sockets and
count. If server, engine and clients share few cores, ``tokens_per_s`` is what they reach together, and
``tokens_per_cpu_s``, tokens per second of the server process's CPU time, what the server alone would reach.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from anaphora.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from anaphora.tools.shared.machine import commit, machine, versions
from anaphora.types.batch import Batch, ModelInfo, Pending, Runner, StepOutput

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 49_152
BLOCK = 16
STEP_S = 0.01
PROMPT = 32
CLIENTS = 2
DEADLINE_S = 300


# --- a model that computes nothing; runs in the engine process --------------------------------------------------------


class _Done:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class StubRunner:
    """Answers every step with words of the vocabulary, after the time that a GPU would take (a sleep)."""

    lookahead = 0
    warnings: tuple[str, ...] = ()

    def __init__(self, max_num_seqs: int) -> None:
        blocks = max_num_seqs * 4096 // BLOCK + 1
        self.info = ModelInfo("stub", "stub", VOCAB, 4096, blocks, BLOCK, BLOCK * 4, "none", "none", "cpu")

        self._next = time.monotonic()

    def submit(self, batch: Batch) -> Pending:
        tokens = {c.slot: 300 + (batch.step * 31 + c.slot * 7) % 40_000 for c in batch.chunks if c.sample}
        self._next = max(self._next + STEP_S, time.monotonic())
        time.sleep(max(0.0, self._next - time.monotonic()))
        rows = sum(chunk.length for chunk in batch.chunks if chunk.token_ids is not None)
        return _Done(StepOutput(batch.step, tokens, prompt_tokens_computed=rows))

    def free_memory(self) -> int:
        return 2**30


def load(config: EngineConfig) -> Runner:
    """Returns the runner; EngineConfig.runner names this function."""
    return StubRunner(config.scheduler.max_num_seqs)


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level tokenizer whose words are a space and 3 letters, the average length of English tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"
    words = ["Ġ" + a + b + c for a in letters for b in letters for c in letters][: VOCAB - len(symbols) - 1]
    tokens = [*symbols, "<|end|>", *words]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


@dataclass(frozen=True)
class Source:
    """A resolved model, as anaphora.server.app.serve takes it."""

    folder: Path
    name: str = "stub"


def serve(folder: str, streams: int) -> None:
    """Runs the server; the command of its process."""
    from anaphora.server.app import serve as run

    engine = EngineConfig(
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=streams, max_num_batched_tokens=max(2048, streams)),
        runner="benchmarks.http_ceiling:load",
    )
    sys.exit(run(engine, ServerConfig(host="127.0.0.1", port=0), Source(Path(folder))))


# --- clients ----------------------------------------------------------------------------------------------------------


def request(number: int, tokens: int) -> bytes:
    """Returns the bytes of a streamed completion request for ``tokens`` tokens, with a prompt of its own."""
    prompt = [300 + (number * 131 + index) % 40_000 for index in range(PROMPT)]
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    content = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def read_streams(port: int, numbers: range, tokens: int, found: Any) -> None:
    """Sends the requests and reads every stream to its end; puts (chunks, completion tokens) into ``found``."""
    ready = selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    chunks = done = 0
    for number in numbers:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request(number, tokens))
        connection.setblocking(False)
        ready.register(connection, selectors.EVENT_READ)
        tails[connection] = b""
    while tails:
        for key, _ in ready.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if data := connection.recv(262_144):
                chunks += data.count(b'"text":')
                tails[connection] = (tails[connection] + data)[-1000:]
                continue
            end = tails.pop(connection)
            done += int(end.rsplit(b'"completion_tokens":', 1)[1].split(b",")[0]) if b"[DONE]" in end else 0
            ready.unregister(connection)
            connection.close()
    found.put((chunks, done))


# --- measurement --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(streams: int) -> Iterator[tuple[psutil.Process, int]]:
    """Runs a server for ``streams`` requests at once; yields its process and port."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path}
        command = [sys.executable, __file__, "--serve", folder, "--streams", str(streams)]
        log = Path(folder, "server.log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stderr=output, env=environment)
        try:
            yield psutil.Process(process.pid), port_of(process, log)
        finally:
            process.terminate()
            process.wait(30)


def port_of(process: subprocess.Popen[bytes], log: Path) -> int:
    """Waits until the server logs its address; returns the port."""
    while process.poll() is None:
        if found := re.search(r" at http://127\.0\.0\.1:(\d+)/", log.read_text()):
            return int(found[1])
        time.sleep(0.05)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def measure(streams: int, tokens: int) -> dict[str, float]:
    """Returns the rates of one round in a fresh server."""
    fork = multiprocessing.get_context("fork")
    with running(streams) as (server, port):
        warm, found = fork.SimpleQueue(), fork.SimpleQueue()
        read_streams(port, range(8), 20, warm)
        before, began = server.cpu_times(), time.perf_counter()
        clients = [
            fork.Process(target=read_streams, args=(port, range(first, streams, CLIENTS), tokens, found))
            for first in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join(DEADLINE_S)
        wall, after = time.perf_counter() - began, server.cpu_times()
        counts = [found.get() for _ in clients]
    done = sum(count for _, count in counts)
    if done != streams * tokens:
        raise SystemExit(f"{done} of {streams * tokens} tokens arrived")
    cpu = after.user + after.system - before.user - before.system
    return {
        "tokens_per_s": done / wall,
        "tokens_per_cpu_s": done / cpu,
        "chunks_per_token": sum(chunks for chunks, _ in counts) / done,
        "server_cpu_share": cpu / wall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.streams)
        return
    rounds = []
    for _ in range(options.rounds):
        rounds.append(measure(options.streams, options.tokens))
        print({name: round(value, 2) for name, value in rounds[-1].items()}, flush=True)
    row = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    print({"median": {name: round(value, 2) for name, value in row.items()}})
    if options.json:
        stored = {
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "streams": options.streams,
            "tokens": options.tokens,
            "rounds": rounds,
            "median": row,
        }
        Path(options.json).write_text(json.dumps(stored, indent=2) + "\n")


if __name__ == "__main__":
    main()

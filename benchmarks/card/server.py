"""Streaming clients on raw sockets against the server, and against a stub that shows what they themselves bear."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from card.engines import Bench
from card.meter import ms

CLIENTS = Path(__file__).parent / "clients.py"
PROCESSES = 4
READY_SECONDS = 300
REST_SECONDS = 1.5
"""In which the engine, at rest for a moment, checks its books."""


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, then words that no text encodes to, so that every id of the model reads as something."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"<{token}>" for token in range(len(alphabet), vocab_size)]
    backend = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def http(bench: Bench, named: int) -> dict[str, Any]:
    """``named`` streaming requests at once through ``anaphora serve``, as on_512 sends them to the engine."""
    size, count = bench.size, bench.size.count(named)
    bench.forget()  # the server's process needs the memory
    write_tokenizer(bench.folder, size.shape["vocab_size"])
    port = free_port()
    command = [sys.executable, "-m", "anaphora", "serve", str(bench.folder), "--load-format", "dummy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", str(count)]
    if size.pools[0]:
        command += ["--kv-cache-memory-bytes", str(size.pools[0])]
    command += ["--max-num-batched-tokens", str(size.budget), "--served-model-name", "m"]
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait(port, server, log)
            ready = time.monotonic() - began
            system = bench.text(size.shared)
            for warm, answer in ((1, 4), (count, 4), (1, 4)):
                _clients(port, [system + bench.text(size.own) for _ in range(warm)], answer)
            prompts = [system + bench.text(size.own) for _ in range(count)]
            found = _clients(port, prompts, size.answer)
        finally:
            server.terminate()
            server.wait(30)
    return found | {"ready_s": round(ready, 1), "clients_alone": stub(count, size.answer)}


def stub(count: int, answer: int) -> dict[str, Any]:
    """The same clients against a server that does nothing but send."""
    command = [sys.executable, str(CLIENTS), "stub", str(count), str(answer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = _clients(int(server.stdout.readline()), [(0,)] * count, answer)
        finally:
            server.terminate()
    return {name: found[name] for name in ("requests_per_s", "output_tokens_per_s")}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait(port: int, server: subprocess.Popen[bytes], log: Any) -> None:
    began = time.monotonic()
    while time.monotonic() - began < READY_SECONDS:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    log.seek(0)
    raise RuntimeError("the server did not become ready:\n" + log.read().decode(errors="replace")[-3000:])


def _clients(port: int, prompts: list[tuple[int, ...]], answer: int) -> dict[str, Any]:
    """Send all prompts at once from several processes; all are connected before the first is sent."""
    parts = [prompts[i::PROCESSES] for i in range(PROCESSES) if prompts[i::PROCESSES]]
    processes = []
    for part in parts:
        process = subprocess.Popen(
            [sys.executable, str(CLIENTS), "client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"port": port, "prompts": part, "answer": answer}) + "\n")
        process.stdin.flush()
        processes.append(process)
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    time.sleep(REST_SECONDS)
    began = time.monotonic()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate()[0]) for process in processes]
    if failed := [error for result in results for error in result["errors"]]:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0]}")
    firsts = [first - began for result in results for first in result["first"]]
    seconds = max(result["end"] for result in results) - began
    tokens = sum(result["tokens"] for result in results)
    return {
        "requests": len(prompts),
        "seconds": round(seconds, 4),
        "requests_per_s": round(len(prompts) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "ttft_ms": ms(firsts),
    }

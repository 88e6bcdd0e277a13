"""A person with a hit rate of 0: from the server's metrics over the log to the repair, on a real server and model."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from anaphora.observe.record import read
from anaphora.text.chat_template import default_template
from anaphora.tools.doctor import DoctorOptions, run
from anaphora.tools.shared.metrics_page import Growth, Page, hits, parse
from anaphora.tools.shared.tokenizer_and_template import default_tokenizer_json
from tests.support.servers import RunningServer, cli_server
from tests.tools.doctor.logs import rules, sentence

pytestmark = pytest.mark.slow

CHATS = 50
RULES = rules(lines=50)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a real tokenizer and our ChatML template."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_bytes(default_tokenizer_json())
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": default_template()}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=2,
        bos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "server.jsonl"


@pytest.fixture(scope="module")
def server(model: Path, log: Path) -> Iterator[RunningServer]:
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--record", str(log), "--record-prompts")
    with cli_server(model, *flags, "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture(scope="module")
def recorder(server: RunningServer, log: Path) -> Iterator[tuple[str, Path]]:
    """``anaphora record`` in front of the server: its address and its log."""
    out = log.with_name("recorder.jsonl")
    command = [sys.executable, "-m", "anaphora", "record", "--upstream", server.url, "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--out", str(out), "--record-prompts"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    address = process.stderr.readline().split()[2]
    reader = threading.Thread(target=process.stderr.read, daemon=True)
    reader.start()
    yield address, out
    process.terminate()
    assert process.wait(20) == 0
    reader.join(5)
    process.stderr.close()


def chats() -> list[dict[str, Any]]:
    rng = random.Random(7)
    made = []
    for _ in range(CHATS):
        head = f"[Request ID: {rng.getrandbits(32):08x}]\n{RULES}"
        messages = [{"role": "system", "content": head}, {"role": "user", "content": sentence(rng) + "?"}]
        made.append({"model": "tiny", "messages": messages, "max_tokens": 2})
    return made


def page(server: RunningServer) -> Page:
    return parse(httpx.get(f"{server.url}/metrics").text)


def send(url: str, bodies: list[dict[str, Any]]) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        for body in bodies:
            assert client.post("/v1/chat/completions", json=body).status_code == 200


def rate(after: Page, before: Page) -> float:
    looked = hits(Growth(after, before))
    assert looked is not None
    assert looked.rate is not None
    return looked.rate


def test_a_hit_rate_of_nothing_is_found_told_and_mended(
    server: RunningServer, recorder: tuple[str, Path], model: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, recorded = recorder
    before = page(server)
    send(address, chats())
    assert rate(page(server), before) < 0.01

    # What the metrics say.
    watched = log.with_name("live.json")
    assert run(DoctorOptions(log=server.url, sample=0, json=str(watched), min_hit_rate=0.5)) == 1
    live = json.loads(watched.read_text())
    assert live["engine"] == "Anaphora"
    assert live["caching"]["on"] is True
    assert live["since_start"]["requests"] == CHATS
    assert live["advice"][0]["title"] == "Find what changes at the head of the prompts"
    assert max(live["misses"], key=live["misses"].get) == "diverged"

    # What the logs say: the server's own, and that of the recorder in front of it.
    fixed = log.with_name("fixed.jsonl")
    for path in (log, recorded):
        out = log.with_name("diagnosis.json")
        capsys.readouterr()
        assert run(DoctorOptions(log=str(path), model=str(model), json=str(out), fix=str(fixed))) == 0
        diagnosis = json.loads(out.read_text())
        (found,) = (item for item in diagnosis["breaks"] if item["status"] != "latent")
        assert (found["class"], found["status"]) == ("request_id", "confirmed")
        assert (found["message"], found["role"]) == (0, "system")
        assert 0 <= found["start"] <= len("[Request ID: ") < found["end"] <= len("[Request ID: 01234567]")
        assert diagnosis["requests"] == CHATS
        assert diagnosis["hit_rate"] < 0.01
        assert diagnosis["reported"]["hit_rate"] == pytest.approx(diagnosis["hit_rate"], abs=0.002)
        assert found["predicted_hit_rate"] > 0.8
        assert "request_id in message 0 (system)" in capsys.readouterr().out

    # What the repair is worth, on the server.
    bodies = [json.loads(line)["body"] for line in fixed.read_text().splitlines()]
    assert all(
        body["messages"][0]["content"] != chat["messages"][0]["content"]
        for body, chat in zip(bodies, chats(), strict=True)
    )
    before = page(server)
    send(server.url, bodies)
    reached = rate(page(server), before)
    assert reached > 0.8
    assert reached == pytest.approx(found["predicted_hit_rate"], abs=0.01)


def test_both_logs_tell_the_same(server: RunningServer, recorder: tuple[str, Path], log: Path) -> None:
    own, seen = list(read(log))[:CHATS], list(read(recorder[1]))
    assert len(seen) == CHATS
    for one, other in zip(own, seen, strict=True):
        assert one.prompt_tokens == other.prompt_tokens
        assert one.cached_tokens == other.cached_tokens
        assert one.output_tokens == other.output_tokens
        assert (one.finish, one.model) == (other.finish, other.model)
        assert one.body == other.body
        assert re.sub(r"-\d+$", "", one.id) == other.id
        assert other.total_s > 0

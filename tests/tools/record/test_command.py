"""``anaphora record`` as a process: from its flags to its end."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from anaphora import cli
from anaphora.observe.record import read
from anaphora.tools.record import RecordOptions
from tests.tools.fake_server import MODEL, Fake, serving

MESSAGES = [{"role": "user", "content": "Which trains go to the sea on Sundays, and which of them carry bicycles?"}]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving(Fake()) as fake:
        yield fake


ANAPHORA = [sys.executable, "-m", "anaphora"]


def start(*flags: str, command: list[str] = ANAPHORA) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [*command, "record", "--host", "127.0.0.1", "--port", "0", *flags], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("recording at http://"), line
    return process, line.split()[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_client_of_openais_sees_the_server_and_the_log_sees_both(
    fake: Fake, number: signal.Signals, tmp_path: Path
) -> None:
    out = tmp_path / "log.jsonl"
    process, url = start("--upstream", fake.url, "--out", str(out), "--record-prompts")
    assert process.stderr is not None
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        for _ in range(2):
            stream = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, max_tokens=5, stream_options={"include_usage": True}
            )
            assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == " word" * 5
        fake.usage = False
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, max_tokens=5))
        assert client.models.list().data[0].id == MODEL
    process.send_signal(number)
    assert process.wait(20) == 0
    printed = process.stderr.read()
    assert f"3 requests recorded in {out}" in printed
    assert "1 responses had no usage" in printed
    assert "cached tokens" not in printed
    process.stderr.close()
    cold, warm, blind = read(out)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens
    assert cold.prompt_tokens == warm.prompt_tokens > 0
    assert cold.output_tokens == 5
    assert cold.body is not None
    assert cold.body["messages"] == MESSAGES
    assert (blind.prompt_tokens, blind.cached_tokens) == (0, None)


def test_more_clients_than_the_usual_limit_of_open_files(fake: Fake, tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 512:
        pytest.skip(f"this machine allows only {hard} open files")
    limited = [
        sys.executable,
        "-c",
        "import resource, runpy, sys; resource.setrlimit(7, (64, resource.getrlimit(7)[1])); ",
    ]
    limited[-1] += "sys.argv[0] = 'anaphora'; runpy.run_module('anaphora', run_name='__main__')"
    process, url = start("--upstream", fake.url, "--out", str(tmp_path / "log"), command=limited)
    host, port = url.removeprefix("http://").split(":")
    clients = [socket.create_connection((host, int(port)), timeout=20) for _ in range(100)]
    try:
        for client in clients:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert all(client.recv(20).startswith(b"HTTP/1.1 200") for client in clients)
    finally:
        for client in clients:
            client.close()
        process.terminate()
        process.communicate(timeout=20)


def test_ask_usage_sees_what_clients_do_not_ask_for(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl"
    process, url = start("--upstream", fake.url, "--out", str(out), "--ask-usage")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, max_tokens=5))
    process.terminate()
    process.communicate(timeout=20)
    (record,) = read(out)
    assert fake.seen[-1]["stream_options"] == {"include_usage": True}
    assert record.prompt_tokens > 0
    assert record.body is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name the server with --upstream"),
        (["--upstream", "http://a"], "name the log with --out"),
        (["--upstream", "ftp://a", "--out", "x"], "not a server address"),
        (["--upstream", "http://me:pw@a", "--out", "x"], "names a user"),
        (["--upstream", "http://a", "--out", "/nowhere/x"], "--out cannot write /nowhere/x"),
        (["--upstream", "http://a", "--out", "x", "--port", "70000"], "--port must be"),
        (["--upstream", "http://a", "--out", "x", "--rotate-size", "0"], "--rotate-size must be"),
    ],
)
def test_flags_that_cannot_work(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_and_itself_as_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "log")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["record", "--upstream", "http://a:1", "--out", out, "--host", "127.0.0.1", "--port", port]
        assert cli.main(flags) == 2
    assert f"cannot listen on --host 127.0.0.1 --port {port}" in capsys.readouterr().err
    flags[2] = f"http://localhost:{port}"
    assert cli.main(flags) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_the_address_may_have_the_apis_path() -> None:
    assert RecordOptions(upstream="localhost:8000/v1", out="x").upstream == "localhost:8000/v1"

"""The whole server over real sockets: HTTP clients, the engine process, signals. A fake runner replaces the model."""

from __future__ import annotations

import concurrent.futures
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from anaphora.config import CacheConfig, EngineConfig, ModelConfig, ServerConfig
from anaphora.errors import ConfigError
from anaphora.observe.record import read
from anaphora.server.app import _flag_warnings, load_text, serve
from tests.support.runners import ENDLESS
from tests.support.servers import CHATML, FakeSource, RunningServer, environment, fake_command, fake_server, tiny_info
from tests.support.tokenizers import write_tokenizer

pytestmark = pytest.mark.slow

ENDLESS_RUNNER = "tests.support.runners:load_endless"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    record = str(folder / "log.jsonl")
    with fake_server(folder / "model", api_key=["key"], record=record, max_body_bytes=100_000) as running:
        yield running


@pytest.fixture(scope="module")
def endless_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with fake_server(tmp_path_factory.mktemp("slow"), ENDLESS_RUNNER) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
        yield client


def metric(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics").text
    families = text_string_to_metric_families(page)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def finished(url: str, reason: str) -> float:
    """Returns the number of requests that finished for ``reason``."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == "vllm:request_success_total" and sample.labels["finished_reason"] == reason
    )


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(30)
    return connection


def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds; the test's time limit is the only deadline."""
    while not condition():
        time.sleep(0.02)


def test_the_start_logs_the_size_of_the_cache(server: RunningServer) -> None:
    start = "".join(server.log)
    assert re.search(r"INFO loading tiny from \S+model: the weights, then the cache and a first step\n", start)
    assert "num_gpu_blocks=256, block_size=16, 4,080 tokens fit" in start
    assert "1.00 requests of the full 4,080 tokens fit at once" in start


def test_chat_with_the_openai_client(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, seed=1)
    again = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, seed=1)
    assert whole.choices[0].message.content == again.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=12, seed=1, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == again.usage
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_the_snippet_of_the_readme_runs_as_it_stands(
    endless_server: RunningServer, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(), flags=re.DOTALL)
    (snippet,) = (code for code in snippets if "from openai" in code)
    assert snippet.count("http://localhost:8000") == 1
    names: dict[str, object] = {}
    exec(snippet.replace("http://localhost:8000", endless_server.url), names)
    names["client"].close()  # type: ignore[attr-defined]
    assert re.fullmatch(r"(?s).+ 0\n", capsys.readouterr().out)


def test_choices_and_echo_with_the_openai_client(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="tiny", messages=HI, n=3, max_tokens=4)
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    assert chat.usage.completion_tokens == 12
    text = client.completions.create(model="tiny", prompt=["one", "two"], echo=True, logprobs=1, max_tokens=3)
    for choice, prompt in zip(text.choices, ("one", "two"), strict=True):
        assert choice.text.startswith(prompt)
        assert len(choice.logprobs.tokens) == 6
        assert choice.logprobs.token_logprobs[0] is None


def test_errors_with_the_openai_client(server: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=HI, temperature=9e9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4080"):
        client.completions.create(model="tiny", prompt=[1] * 5000)
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    stranger.close()
    assert client.models.list().data[0].id == "tiny"


def test_a_large_body_gets_413_not_a_broken_pipe(server: RunningServer) -> None:
    headers = {"authorization": "Bearer key"}
    big = {"prompt": "x" * 10_000_000}
    response = httpx.post(f"{server.url}/v1/completions", json=big, headers=headers)
    assert response.status_code == 413
    chunked = (b"x" * 65_536 for _ in range(100))
    response = httpx.post(f"{server.url}/v1/completions", content=chunked, headers=headers)
    assert response.status_code == 413


def test_an_endless_request_head_is_cut_off(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        answer = b""
        try:
            for _ in range(200):
                connection.sendall(b"a" * 10_000)
            answer = connection.recv(1000)
        except ConnectionError:
            pass
        assert not answer or answer.startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    "rest", [b"0\r\n" + b"x: y\r\n" * 20_000, b"1;" + b"x" * 200_000], ids=["trailers", "extension"]
)
def test_endless_trailers_and_chunk_extensions_are_cut_off(endless_server: RunningServer, rest: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
    with connect(endless_server) as connection:
        try:
            connection.sendall(head)
            for start in range(0, len(rest), 10_000):
                connection.sendall(rest[start : start + 10_000])
                time.sleep(0.001)
            answer = connection.recv(1000)
        except ConnectionError:
            answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("rest", [b"", b"no request\r\n\r\n"], ids=["leaves", "garbage"])
def test_pipelined_requests_end_with_their_connection(endless_server: RunningServer, rest: bytes) -> None:
    body = json.dumps({"prompt": "a long novel", "max_tokens": ENDLESS, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    aborted, ended = finished(endless_server.url, "abort"), finished(endless_server.url, "length")
    with connect(endless_server) as connection:
        connection.sendall((head + body) * 2)
        until(lambda: metric(endless_server.url, "vllm:num_requests_running") == 1)
        connection.sendall(rest)
    until(lambda: httpx.get(f"{endless_server.url}/load").json() == {"server_load": 0})
    until(lambda: metric(endless_server.url, "vllm:num_requests_running") == 0)
    # The second one may have been dropped before the engine had it.
    assert finished(endless_server.url, "abort") > aborted
    assert finished(endless_server.url, "length") == ended
    assert not any("Traceback" in line for line in endless_server.log)


def test_usage_metrics_and_request_log_agree(server: RunningServer, client: openai.OpenAI) -> None:
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:generation_tokens_total")
    until(lambda: metric(server.url, "vllm:num_requests_running") == 0)
    before = [metric(server.url, name) for name in names]
    already = metric(server.url, "vllm:request_success_total")
    # The same cold prompt many times at once: whoever waits for the first one's computation has it from the cache.
    body = {"model": "tiny", "prompt": "the same beginning for everybody " * 20, "max_tokens": 3}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: client.completions.create(**body), range(16)))
    usages = [answer.usage for answer in answers]
    until(lambda: metric(server.url, "vllm:request_success_total") == already + 16)
    until(lambda: metric(server.url, "vllm:num_requests_running") == 0)
    prompts, cached, generated = (metric(server.url, name) - b for name, b in zip(names, before, strict=True))
    assert prompts == sum(usage.prompt_tokens for usage in usages)
    assert cached == sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert generated == sum(usage.completion_tokens for usage in usages)
    computed = prompts - cached
    assert computed < 2 * usages[0].prompt_tokens
    log = Path(json.loads(server.process.args[-1])["record"])  # type: ignore[arg-type,index,misc]
    until(lambda: len(list(read(log))) == metric(server.url, "vllm:request_success_total"))
    last = list(read(log))[-16:]
    assert sum(record.cached_tokens for record in last) == cached
    assert {record.finish for record in last} == {"length"}
    assert all(record.body is None for record in last)
    assert len({tuple(record.block_hashes) for record in last}) == 1
    assert len(last[0].block_hashes) == usages[0].prompt_tokens // 16


@pytest.mark.parametrize("streamed", [False, True])
def test_disconnected_clients_free_their_blocks(endless_server: RunningServer, streamed: bool) -> None:
    url = endless_server.url
    body = {"prompt": "a long novel", "max_tokens": ENDLESS, "ignore_eos": True, "stream": streamed}
    for _ in range(5):
        if streamed:
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                for _ in range(5):
                    next(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=body, timeout=0.2)
    until(lambda: metric(url, "vllm:num_requests_running") == 0)
    until(lambda: httpx.get(f"{url}/load").json() == {"server_load": 0})
    assert httpx.post(f"{url}/reset_prefix_cache").json() == {"reset": True}
    assert metric(url, "anaphora:kv_blocks_free") == metric(url, "anaphora:kv_blocks")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_server_and_engine_under_load(tmp_path: Path, number: signal.Signals) -> None:
    with fake_server(tmp_path / "model", ENDLESS_RUNNER) as running:
        engines = psutil.Process(running.process.pid).children(recursive=True)
        body = {"prompt": "x", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=30) as response:
            next(response.iter_lines())
            running.process.send_signal(number)
            running.process.send_signal(number)  # the second one does not wait for the request
            assert running.process.wait(20) == 0
        gone, alive = psutil.wait_procs(engines, 10)
        assert gone
        assert not alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_requests_that_outlast_the_shutdown_timeout_get_an_error(tmp_path: Path, number: signal.Signals) -> None:
    body = {"prompt": "x", "max_tokens": ENDLESS, "ignore_eos": True}
    log = tmp_path / "log.jsonl"
    with (
        fake_server(tmp_path / "model", ENDLESS_RUNNER, shutdown_timeout=0.3, record=str(log)) as running,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", f"{running.url}/v1/completions", json=body | {"stream": True}, timeout=30) as response,
    ):
        waiting = pool.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=30)
        lines = response.iter_lines()
        next(lines)
        until(lambda: metric(running.url, "vllm:num_requests_running") == 2)
        running.process.send_signal(number)
        rest = [line for line in lines if line]
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert rest[-1] == "data: [DONE]"
        assert waiting.result().status_code == 503
        for reported in (error, waiting.result().json()["error"]):
            assert reported["type"] == "engine_dead"
            assert f"shut down ({number.name})" in reported["message"]
        assert running.process.wait(20) == 0
    said = "".join(running.log)
    assert f"{number.name}: shutting down; running requests: 2, with 0.3 s to finish" in said
    assert "aborted incomplete requests: 2" in said
    assert " ERROR " not in said
    assert "Traceback" not in said
    assert running.log[-1].endswith(" shut down\n")
    assert [record.finish for record in read(log)] == ["error", "error"]


def test_two_signals_end_a_server_with_a_hung_engine(tmp_path: Path) -> None:
    with fake_server(tmp_path / "model", ENDLESS_RUNNER, shutdown_timeout=1000) as running:
        engine = next(
            child
            for child in psutil.Process(running.process.pid).children()
            if "remote.process" in " ".join(child.cmdline())
        )
        engine.suspend()
        body = {"prompt": "x", "max_tokens": 40, "stream": True}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=30)
            until(lambda: httpx.get(f"{running.url}/load").json() == {"server_load": 1})
            running.process.send_signal(signal.SIGINT)
            until(lambda: any("shutting down; running requests: 1," in line for line in running.log))
            running.process.send_signal(signal.SIGINT)
            assert waiting.result().status_code == 503
        assert running.process.wait(20) == 0
        assert not psutil.wait_procs([engine], 10)[1]


def test_a_short_request_is_completed_after_the_signal(tmp_path: Path) -> None:
    with fake_server(tmp_path / "model", ENDLESS_RUNNER) as running:
        body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            first = next(lines)
            running.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in (first, *rest[:-1])]
        assert sum(len(c.get("token_ids", [])) for chunk in chunks for c in chunk["choices"]) == 50
        assert running.process.wait(20) == 0


def test_a_signal_while_the_model_loads_ends_server_and_engine(tmp_path: Path) -> None:
    command = fake_command(tmp_path / "model", "tests.support.runners:load_for_ever")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        assert "loading\n" in iter(process.stderr.readline, "")
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert not psutil.wait_procs(children, 10)[1]


def test_a_killed_engine_is_reported_to_all_clients(tmp_path: Path) -> None:
    with fake_server(tmp_path / "model", ENDLESS_RUNNER) as running:
        body = {"prompt": "x", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            for child in psutil.Process(running.process.pid).children():
                if "remote.process" in " ".join(child.cmdline()):
                    child.kill()
            rest = [line for line in lines if line]
        assert "SIGKILL" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
        assert rest[-1] == "data: [DONE]"
        health = httpx.get(f"{running.url}/health")
        assert health.status_code == 503
        assert "SIGKILL" in health.json()["error"]["message"]
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert running.stop() == 0


def test_a_port_in_use_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}"):
            serve(EngineConfig(), ServerConfig(host="127.0.0.1", port=port), FakeSource(tmp_path))


def test_an_unwritable_log_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    config = ServerConfig(host="127.0.0.1", port=0, record=str(tmp_path / "absent" / "log.jsonl"))
    with pytest.raises(ConfigError, match="--record"):
        serve(EngineConfig(), config, FakeSource(tmp_path))


def test_an_unknown_log_level_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANAPHORA_LOGGING_LEVEL", "chatty")
    with pytest.raises(ConfigError, match=r"ANAPHORA_LOGGING_LEVEL must be one of .*DEBUG.*CHATTY"):
        serve(EngineConfig(), ServerConfig(host="127.0.0.1", port=0), FakeSource(tmp_path))


@pytest.mark.parametrize("as_file", [False, True])
def test_the_chat_template_flag_replaces_the_models_template(tmp_path: Path, as_file: bool) -> None:
    write_tokenizer(tmp_path, 300)
    template = "{{ messages[0].content }}!"
    (tmp_path / "own.jinja").write_text(template)
    given = str(tmp_path / "own.jinja") if as_file else template
    text = load_text(tmp_path, EngineConfig(ModelConfig(chat_template=given)))
    assert text.template is not None
    assert text.template.render(HI) == "hi!"
    with pytest.raises(ConfigError, match="--chat-template"):
        load_text(tmp_path, EngineConfig(ModelConfig(chat_template=str(tmp_path / "absent"))))


def test_a_refused_model_ends_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="sundial"),
        fake_server(tmp_path / "m", "tests.support.runners:load_refused"),
    ):
        pass


def test_the_start_warns_of_what_breaks_reuse_and_how_to_fix_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300, "{{ strftime_now('%d %B') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    good, bad = EngineConfig(), EngineConfig(cache=CacheConfig(enable_prefix_caching=False, kv_cache_dtype="fp8"))
    (dated,) = _flag_warnings(good, tiny_info(), load_text(tmp_path, good))
    assert "prints today's date" in str(dated)
    assert "--chat-template" in dated.mend
    found = {warning.setting for warning in _flag_warnings(bad, tiny_info(), load_text(tmp_path, bad))}
    assert found == {"--no-enable-prefix-caching", "--kv-cache-dtype fp8", "the chat template"}
    write_tokenizer(tmp_path, 300, CHATML)
    assert _flag_warnings(good, tiny_info(), load_text(tmp_path, good)) == []


def test_metrics_report_the_actual_data_type_of_the_cache(server: RunningServer) -> None:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    (settings,) = (f.samples[0].labels for f in families if f.name == "vllm:cache_config_info")
    assert settings["cache_dtype"] == "none"  # the fake runner's, whatever --kv-cache-dtype asks for

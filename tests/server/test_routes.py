from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from anaphora.observe.record import read
from tests.support.servers import ScriptedServer, scripted

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]


async def test_models(server: ScriptedServer) -> None:
    listed = (await server.client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
    assert {card["root"] for card in listed["data"]} == {"org/tiny"}
    assert (await server.client.get("/v1/models/alias")).json() == listed["data"][1]
    assert (await server.client.get("/v1/models/other")).status_code == 404


@pytest.mark.parametrize("trouble", ["dead", "hung", "cache_fault"])
async def test_health_reports_what_is_wrong_with_the_engine(server: ScriptedServer, trouble: str) -> None:
    assert (await server.client.get("/health")).json() == {"status": "ok"}
    setattr(server.engine, trouble, "it has gone for a walk")
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = await server.client.request(method, path)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "it has gone for a walk"
    setattr(server.engine, trouble, None)
    assert (await server.client.get("/health")).status_code == 200


async def test_tokenize_and_back(server: ScriptedServer) -> None:
    answer = (await server.client.post("/tokenize", json={"prompt": "né", "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == 3
    assert answer["max_model_len"] == 512
    assert answer["token_strs"] == ["n", "\ufffd", "\ufffd"]
    back = await server.client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "né"}


async def test_tokenizing_long_texts_does_not_delay_other_requests(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, release = server.service.text.tokenizer, threading.Event()
    encode = tokenizer.encode

    def slowly(text: str, **more: bool) -> list[int]:
        if text == "long":
            release.wait()
        return encode(text, **more)

    monkeypatch.setattr(tokenizer, "encode", slowly)
    long = [asyncio.create_task(server.client.post("/tokenize", json={"prompt": "long"})) for _ in range(10)]
    try:
        answer = await server.client.post("/v1/completions", json={"prompt": "short"})
        assert answer.status_code == 200
        assert not any(task.done() for task in long)
    finally:
        release.set()
    assert {answer.json()["count"] for answer in await asyncio.gather(*long)} == {4}


async def test_tokenized_messages_equal_the_prompt_of_a_chat(server: ScriptedServer) -> None:
    tokens = (await server.client.post("/tokenize", json={"messages": HI})).json()["tokens"]
    await server.client.post("/v1/chat/completions", json={"messages": HI})
    assert tuple(tokens) == server.engine.seen[-1].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HI}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
    ],
)
async def test_wrong_bodies(server: ScriptedServer, path: str, body: dict[str, object]) -> None:
    response = await server.client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def test_small_routes(server: ScriptedServer) -> None:
    assert (await server.client.get("/ping")).status_code == 200
    assert (await server.client.post("/ping")).status_code == 200
    assert (await server.client.get("/version")).json()["version"]
    assert (await server.client.get("/load")).json() == {"server_load": 0}


async def test_reset_reports_whether_it_emptied_the_cache(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="anaphora.server")
    assert (await server.client.post("/reset_prefix_cache")).json() == {"reset": True}
    server.engine.hold = asyncio.Event()
    running = asyncio.create_task(server.client.post("/v1/completions", json={"prompt": "x"}))
    while not server.engine.running:
        await asyncio.sleep(0)
    assert (await server.client.get("/load")).json() == {"server_load": 1}
    refused = await server.client.post("/reset_prefix_cache")
    assert refused.status_code == 409
    assert refused.json()["reset"] is False
    assert "running" in refused.json()["error"]["message"]
    server.engine.hold.set()
    assert (await running).status_code == 200
    assert (await server.client.post("/reset_prefix_cache")).json() == {"reset": True}
    said = [record.getMessage() for record in caplog.records if "/reset_prefix_cache" in record.getMessage()]
    assert ["not emptied" in line for line in said] == [False, True, False]


async def test_log_and_record_have_the_clients_id_and_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="anaphora.server")
    log = tmp_path / "log.jsonl"
    async with scripted(tmp_path / "model", record=str(log)) as server:
        await server.client.post("/v1/completions", json={"prompt": "x", "request_id": "in the body"})
        await server.client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "in-the-head"})
        server.engine.fail_after = 1
        await server.client.post("/v1/completions", json={"prompt": "x"})
        server.engine.fail_after, server.engine.dead = None, "the engine is gone"
        await server.client.post("/v1/completions", json={"prompt": "x"})
    records = list(read(log))
    assert [record.client_id for record in records] == ["in the body", "in-the-head", "", ""]
    assert [record.status for record in records] == [200, 200, 500, 503]
    assert [record.error for record in records] == ["", "", "out of memory", "the engine is gone"]
    assert "('in the body'): prompt 1 token," in caplog.text
    assert "('in-the-head'): prompt" in caplog.text


async def test_finished_requests_are_in_the_metrics_once(server: ScriptedServer) -> None:
    await server.client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    await server.client.post("/v1/completions", json={"prompt": "a", "stop": ["lo"]})
    page = await server.client.get("/metrics")
    samples = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert samples["vllm:request_success_total", "length"] == 2
    assert samples["vllm:request_success_total", "stop"] == 1
    assert samples["vllm:request_generation_tokens_sum", None] == 12 + 5
    assert samples["vllm:request_prompt_tokens_count", None] == 3
    open_metrics = await server.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


async def test_bodies_are_recorded_only_on_request_and_never_the_salt(tmp_path: Path) -> None:
    body = {"prompt": "secret plan", "cache_salt": "salt of tenant", "max_tokens": 2}
    for record_prompts in (False, True):
        log = tmp_path / f"{record_prompts}.jsonl"
        async with scripted(tmp_path / "model", record=str(log), record_prompts=record_prompts) as server:
            await server.client.post("/v1/completions", json=body)
        (record,) = read(log)
        assert (record.prompt_tokens, record.output_tokens, record.finish) == (11, 2, "length")
        assert (record.route, record.block_size, record.reason) == ("/v1/completions", 16, "cold")
        assert record.salt
        assert "salt of tenant" not in log.read_text()
        assert (record.body is not None) is record_prompts
        assert ("secret plan" in log.read_text()) is record_prompts


async def test_one_log_line_per_request(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="anaphora.server")
    server.engine.cached = 1
    await server.client.post("/v1/completions", json={"prompt": "Say", "max_tokens": 2})
    lines = [record.getMessage() for record in caplog.records if "prompt 3 tokens" in record.getMessage()]
    assert len(lines) == 1
    assert "1 cached" in lines[0]
    assert "queue 0.250 s, prefill 0.500 s" in lines[0]
    assert "output 2 tokens" in lines[0]


async def test_api_keys_guard_all_routes_except_probes(tmp_path: Path) -> None:
    async with scripted(tmp_path, api_key=("first", "sécond")) as server:
        for path in ("/health", "/ping", "/version", "/metrics", "/load"):
            assert (await server.client.get(path)).status_code == 200
        body = {"prompt": "x"}
        wrong = [None, "Bearer other", "Bearer ", "first", "Basic first", "Bearer \u00ff".encode("latin-1")]
        for header in wrong:
            headers = {} if header is None else {"authorization": header}
            response = await server.client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "invalid_api_key"
        assert not server.engine.seen
        assert (await server.client.get("/v1/models")).status_code == 401
        assert (await server.client.get("/v1/completions")).status_code == 401
        assert (await server.client.get("/v1/completion")).status_code == 404
        good = await server.client.post("/v1/completions", json=body, headers={"authorization": "bearer first"})
        assert good.status_code == 200


async def test_requests_that_bypass_the_cache_are_warned_about_once(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        body = {"prompt": "hi", "max_tokens": 1, "prompt_logprobs": 1}
        assert (await server.client.post("/v1/completions", json=body)).status_code == 200
    warned = [record for record in caplog.records if "prompt_logprobs" in record.message]
    assert [record.levelname for record in warned] == ["WARNING"]

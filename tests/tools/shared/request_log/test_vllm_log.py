"""What vLLM's versions log of requests."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from anaphora.errors import ConfigError
from anaphora.tools.doctor.read.load_log import load_log
from anaphora.tools.shared.request_log.bodies import LoggedRequest
from anaphora.tools.shared.request_log.log_files import read_requests
from anaphora.tools.shared.tokenizer_and_template import load_tokenizer_and_template

PARAMS = "SamplingParams(n=1, temperature=0.3, stop=[], seed=None, extra_args=None)"
PROMPT = "<|im_start|>system\nBe \"brief\" and say 'yes', prompt: 'x', params: \\n é\t<|im_end|>\n"
REST = "prompt_token_ids: None, lora_request: None, prompt_adapter_request: None."


def requests(tmp_path: Path, *lines: str) -> tuple[list[LoggedRequest], list[tuple[int, str]]]:
    path = tmp_path / "vllm.log"
    path.write_text("\n".join(lines) + "\n")
    bad: list[tuple[int, str]] = []
    return list(read_requests(str(path), lambda line, why: bad.append((line, why)))), bad


@pytest.mark.parametrize(
    "line",
    [
        f"INFO 02-19 16:05:43 logger.py:37] Received request cmpl-1-0: prompt: {PROMPT!r}, params: {PARAMS}, {REST}",
        f"INFO 07-25 02:41:21 [logger.py:43] Received request chatcmpl-5: prompt: {PROMPT!r}, params: {PARAMS}, "
        "prompt_token_ids: None, prompt_embeds shape: None, lora_request: None.",
        f"INFO 04-01 00:00:00 async_llm_engine.py:1] Received request a: prompt: {PROMPT!r}, sampling_params: {PARAMS},"
        " prompt_token_ids: [1, 2], lora_request: None.",
        f"vllm-1  | (APIServer pid=1) INFO 11-05 12:39:35 [logger.py:40] Received request chatcmpl-b8: "
        f"prompt: {PROMPT!r}, params: {PARAMS}, prompt_token_ids: None, prompt_embeds shape: None, lora_request: None.",
        f"(APIServer pid=9) DEBUG 03-01 09:00:00 [logger.py:33] Request chatcmpl-1 details: prompt: {PROMPT!r}, "
        "prompt_token_ids: [151644, 8948], prompt_embeds shape: None.",
        f"Received request x: prompt: {PROMPT!r}, params_list: [{PARAMS}], prompt_token_ids: None",
        f"DEBUG 03-01 09:00:00 [request_logger.py:33] Request r details: prompt: {PROMPT!r}",
    ],
)
def test_the_forms_of_its_versions(line: str, tmp_path: Path) -> None:
    (found,), bad = requests(tmp_path, line)
    assert bad == []
    assert found.prompt == PROMPT


def test_a_collectors_json_around_it(tmp_path: Path) -> None:
    line = f"INFO 02-19 16:05:43 [logger.py:37] Received request a: prompt: {PROMPT!r}, params: {PARAMS}, {REST}"
    wrapped = [json.dumps({"log": line + "\n", "stream": "stderr"}), json.dumps({"level": "info", "message": line})]
    other = json.dumps({"log": "INFO 02-19 16:05:43 [launcher.py:27] Route: /rerank"})
    found, bad = requests(tmp_path, *wrapped, other)
    assert [logged.prompt for logged in found] == [PROMPT, PROMPT]
    assert bad == []


def test_other_lines_of_the_server_are_no_bad_lines(tmp_path: Path) -> None:
    lines = [
        "INFO 02-19 16:05:34 [launcher.py:27] Route: /rerank, Methods: POST",
        "INFO:     Application startup complete.",
        "(EngineCore_DP0 pid=7) WARNING 02-19 16:05:35 [x.py:1] careful",
        f"INFO 02-19 16:05:43 [logger.py:37] Received request a: prompt: 'p', params: {PARAMS}, {REST}",
        "Traceback (most recent call last):",
        'INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        "{broken",
        json.dumps({"prompt": "q"}),
    ]
    found, bad = requests(tmp_path, *lines)
    assert [logged.prompt for logged in found] == ["p", "q"]
    assert [line for line, _ in bad] == [7]


def test_a_log_without_prompts_says_how_to_get_them(tmp_path: Path) -> None:
    line = f"INFO 03-01 09:00:00 [logger.py:44] Received request a: params: {PARAMS}, lora_request: None."
    found, bad = requests(tmp_path, line)
    assert found == []
    assert "VLLM_LOGGING_LEVEL" in bad[0][1]
    with pytest.raises(ConfigError, match="VLLM_LOGGING_LEVEL"):
        load_log(str(tmp_path / "vllm.log"), load_tokenizer_and_template(None, None))
    details = "DEBUG 03-01 09:00:00 [logger.py:33] Request a details: prompt: 'p', prompt_token_ids: [1]"
    found, bad = requests(tmp_path, details, line)
    assert (len(found), bad) == (1, [])


@pytest.mark.parametrize("damaged", [r"'\x'", r"'\u12'", r"'\N{no such}'"])
def test_a_damaged_prompt_is_a_bad_line(damaged: str, tmp_path: Path) -> None:
    line = f"INFO 02-19 16:05:43 [logger.py:37] Received request a: prompt: {damaged}, params: {PARAMS}, {REST}"
    found, bad = requests(tmp_path, line, line.replace(damaged, "'whole'"))
    assert [logged.prompt for logged in found] == ["whole"]
    assert "damaged" in bad[0][1]


def test_token_ids_cannot_be_shown(tmp_path: Path) -> None:
    line = f"INFO 02-19 16:05:43 [logger.py:37] Received request a: prompt: None, params: {PARAMS}, {REST}"
    found, bad = requests(tmp_path, line)
    assert found == []
    assert "token ids" in bad[0][1]


def test_time_and_adapter(tmp_path: Path) -> None:
    now = datetime.now().replace(microsecond=0)
    rest = "prompt_token_ids: None, lora_request: LoRARequest(lora_name='sql-lora', lora_int_id=1)."
    lines = [
        f"INFO {time:%m-%d %H:%M:%S} [logger.py:37] Received request a: prompt: 'p', params: {PARAMS}, {rest}"
        for time in (now, now - timedelta(days=40), now + timedelta(days=3))
    ]
    found, _ = requests(tmp_path, *lines)
    assert [logged.model for logged in found] == ["sql-lora"] * 3
    times = [logged.time for logged in found]
    assert times[0] == now.timestamp()
    assert times[1] == (now - timedelta(days=40)).timestamp()
    assert times[2] is not None
    assert times[2] < now.timestamp()

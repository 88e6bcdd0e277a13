"""A command line is parsed as typed, unknown flags are named, and what breaks reuse or memory is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anaphora.errors import ConfigError
from anaphora.tools.lint import LintOptions, run
from anaphora.tools.lint.command_line import parse_command_line
from tests.support.tokenizers import write_tokenizer


@pytest.mark.parametrize(
    ("command", "engine", "model", "flags"),
    [
        ("vllm serve org/m --block-size 32", "vllm", "org/m", {"--block-size": "32"}),
        ("anaphora serve --block_size=8 m", "anaphora", "m", {"--block-size": "8"}),
        ("--model m -tp 2", "vllm", "m", {"--model": "m", "--tensor-parallel-size": "2"}),
        ("HF_HOME=/x python -m vllm.entrypoints.openai.api_server --model m", "vllm", "m", {"--model": "m"}),
        ("docker run -p 8000:8000 vllm/vllm-openai:latest --model m", "vllm", "m", {"--model": "m"}),
        ("/opt/bin/vllm serve m \\\n  --no-enable-prefix-caching", "vllm", "m", {"--enable-prefix-caching": False}),
        ("vllm serve --enable-prefix-caching m | tee log", "vllm", "m", {"--enable-prefix-caching": True}),
        ("vllm serve m --served-model-name a b --port 1", "vllm", "m", {"--served-model-name": "a b", "--port": "1"}),
        ("vllm serve m --lora-modules a=x b=y", "vllm", "m", {"--lora-modules": "a=x b=y"}),
        ("vllm serve m --compilation-config.mode 3", "vllm", "m", {"--compilation-config.mode": "3"}),
        ("vllm serve 'my model' # in production", "vllm", "my model", {}),
        (
            "python3 -m sglang.launch_server --model-path m --tp=2 --disable-radix-cache | tee log",
            *("sglang", "m", {"--model-path": "m", "--tp": "2", "--disable-radix-cache": True}),
        ),
        ("/opt/llama-server -m x.gguf -c 4096", "llama.cpp", "x.gguf", {"-m": "x.gguf", "-c": "4096"}),
        ("docker run ghcr.io/ggml-org/llama.cpp:server -m x.gguf", "llama.cpp", "x.gguf", {"-m": "x.gguf"}),
        ("-m x.gguf", "llama.cpp", "x.gguf", {"-m": "x.gguf"}),
        ("--disable-radix-cache", "sglang", None, {"--disable-radix-cache": True}),
        ("docker run vllm/vllm-openai:v0.6.0 vllm serve m", "vllm", "m", {}),
        ("vllm serve \\\r\n m \\\r\n --port 1", "vllm", "m", {"--port": "1"}),
        ("vllm serve --port 1 -- m", "vllm", "m", {"--port": "1"}),
        ("vllm", "vllm", None, {}),
        ("", "vllm", None, {}),
    ],
)
def test_command_lines(command: str, engine: str, model: str | None, flags: dict[str, Any]) -> None:
    parsed = parse_command_line(command)
    assert (parsed.engine, parsed.model, parsed.flags, parsed.unknown) == (engine, model, flags, [])


def test_unknown_flags_are_named_with_the_closest() -> None:
    parsed = parse_command_line("vllm serve m --enable-prefix-cachin --nothing-like-it 3 --block-size 16")
    assert "--enable-prefix-cachin (did you mean --enable-prefix-caching?)" in parsed.unknown[0]
    assert "--nothing-like-it" in parsed.unknown[1]
    assert parsed.flags["--block-size"] == "16"


def examined(tmp_path: Path, command: str, **options: Any) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "found.json"
    code = run(LintOptions(command, json=str(path), **options))
    return code, json.loads(path.read_text())


def settings(found: dict[str, Any]) -> set[str]:
    return {warning["setting"].partition(" ")[0] for warning in found["warnings"]}


def test_everything_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ strftime_now('%d %B') }}{% for m in messages %}[{{ m.content }}]{% endfor %}")
    command = (
        f"vllm serve org/m --block-size 128 --kv-cache-dtype fp8 --num-gpu-blocks-override 100 --max-model-len 32k "
        f"--max-num-seqs 256 --chat-template {template} --prefix-caching-hash-algo xxhash --gpu-memory-utilization 0.5 "
        "--data-parallel-size 2 --enable-prompt-tokens-details --calculate-kv-scales"
    )
    code, found = examined(tmp_path, command)
    assert code == 1
    flags = (
        "--block-size --kv-cache-dtype --max-model-len --max-num-seqs --prefix-caching-hash-algo --data-parallel-size"
    )
    assert settings(found) == {"the", *flags.split(), "--gpu-memory-utilization", "--calculate-kv-scales"}
    assert all(warning["mend"] for warning in found["warnings"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "0.40 requests of the full 32,000" in shown
    assert "today's date" in shown


def test_a_good_command_line_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examined(tmp_path, "anaphora serve --block-size 32 --max-num-seqs 8")[0] == 0
    assert "good" in capsys.readouterr().out
    code, found = examined(tmp_path, "vllm serve org/m")
    assert code == 0  # what usage leaves out breaks nothing
    assert settings(found) == {"--enable-prompt-tokens-details"}
    assert "org/m is not on this machine" in found["notes"][0]
    _, found = examined(tmp_path, "vllm serve org/m --config serve.yaml")
    assert "--config serve.yaml was not read" in found["notes"][0]


def test_a_model_folder_gives_template_context_length_and_kv_size(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder, 300, "{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%Y-%m-%d') }}")
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    # 2 layers x 2 heads x 16 wide x keys and values x 2 bytes: 256 bytes a token
    _, found = examined(tmp_path, f"vllm serve {folder} --kv-cache-memory-bytes {256 * 4096}")
    assert settings(found) == {"the", "--enable-prompt-tokens-details"}
    _, found = examined(tmp_path, f"vllm serve {folder} --kv-cache-memory-bytes {256 * 2048}")
    assert settings(found) == {"the", "--max-model-len", "--enable-prompt-tokens-details"}
    _, found = examined(tmp_path, f"vllm serve {folder} --kv-cache-memory-bytes {256 * 2048} --kv-cache-dtype fp8")
    assert "--max-model-len" not in settings(found)


def test_a_log_gives_the_length_of_system_texts_and_the_use_of_prompt_logprobs(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    bodies = [
        {"messages": [{"role": "system", "content": "Be kind. " * 20}, {"role": "user", "content": f"{i}?"}]}
        for i in range(4)
    ]
    bodies[0]["prompt_logprobs"] = 1  # type: ignore[assignment]
    log.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    code, found = examined(tmp_path, "vllm serve m --block-size 128 --enable-prompt-tokens-details", log=str(log))
    assert code == 1
    problems = " ".join(warning["problem"] for warning in found["warnings"])
    assert "a block of 128 tokens is larger than the" in problems
    assert "25% of the requests" in problems
    assert (
        examined(tmp_path, "vllm serve m --block-size 16", log=str(log))[1]["warnings"][0]["setting"]
        == "prompt_logprobs"
    )


@pytest.mark.parametrize("text", ["", "{}\n", "\0\1 not a log\n", "{bad"])
def test_a_log_without_a_request_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="holds no usable request" + (": line 1: " if text else "$")):
        run(LintOptions("vllm serve m", log=str(tmp_path / "log.jsonl")))


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve 'm",
        "vllm serve m --block-size x",
        "vllm serve m --max-model-len -1x",
        "--gpu-memory-utilization 0,9",
        "vllm serve m --block-size",
        "vllm serve m --max-num-seqs --port 1",
    ],
)
def test_invalid_command_lines_are_refused(command: str) -> None:
    with pytest.raises(ConfigError, match="the command line"):
        run(LintOptions(command))


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("docker run -p 80:80 vllm/vllm-openai:v0.6.0 --model m", "version"),
        ("docker run docker.io/vllm/vllm-openai:v0.7.3@sha256:ab --model m", "version"),
        ("docker run vllm/vllm-openai:v0.6.0 --model m --enable-prefix-caching", None),
        ("docker run vllm/vllm-openai:v0.8.0 --model m", None),
        ("docker run vllm/vllm-openai:latest --model m", None),
        ("python -m sglang.launch_server --model-path m --disable-radix-cache", "--disable-radix-cache"),
        ("python -m sglang.launch_server --model-path m --page-size 1", None),
        ("llama-server -m x.gguf --no-cache-prompt", "--no-cache-prompt"),
        ("llama-server -m x.gguf -fa on", None),
    ],
)
def test_caching_turned_off_by_another_server_or_an_old_version(
    tmp_path: Path, command: str, setting: str | None
) -> None:
    code, found = examined(tmp_path, command)
    assert settings(found) - {"--enable-prompt-tokens-details"} == ({setting} if setting else set())
    assert code == (1 if setting else 0)
    assert not found["unknown"]
    assert any("no other flag" in note for note in found["notes"]) == ("vllm" not in command)

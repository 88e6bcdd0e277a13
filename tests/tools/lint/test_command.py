"""``anaphora lint``: template or command line, the report, the exit code; and the doctor's flags that moved here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anaphora import cli
from anaphora.errors import ConfigError
from anaphora.tools.lint import LintOptions, run
from anaphora.tools.lint.target import Target, kind_of_target
from tests.support.tokenizers import write_tokenizer

BODY = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
DATED = "{{ strftime_now('%Y-%m-%d') }}" + BODY


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    path = tmp_path / "bad.jinja"
    path.write_text(DATED)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m",
        "vllm serve 'm",
        "vllm",
        "  anaphora serve",
        "CUDA_VISIBLE_DEVICES=0 vllm serve m \\\n --block-size 32",
        "vllm serve m --chat-template '{{ messages }}'",
        "python -m sglang.launch_server --model-path m",
        "python3 -m vllm.entrypoints.openai.api_server --model m",
        "docker run --gpus all vllm/vllm-openai:v0.8.0 --model m",
        "/opt/llama-server -m x.gguf",
        "./start.sh --block-size 128",
        "--block-size 128",
        "--chat-template '{{ messages }}'",
        "--disable-radix-cache",
    ],
)
def test_command_lines_are_recognized(text: str) -> None:
    assert kind_of_target(text) is Target.COMMAND_LINE


@pytest.mark.parametrize("text", [BODY, "{#- vllm serve -#}" + BODY, "<s>{%- for m in messages -%}{%- endfor -%}"])
def test_texts_of_templates_are_recognized(text: str) -> None:
    assert kind_of_target(text) is Target.TEMPLATE


def test_files_and_folders_are_templates(tmp_path: Path, dated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of_target(str(dated)) is Target.TEMPLATE
    spaced = tmp_path / "vllm serve --x.jinja"
    spaced.write_text(BODY)
    monkeypatch.chdir(tmp_path)
    assert kind_of_target(spaced.name) is Target.TEMPLATE
    assert kind_of_target(str(tmp_path)) is Target.TEMPLATE


@pytest.mark.parametrize(
    "text", ["nowhere.jinja", "org/model", "my template.jinja", "hello there", " ", "x" * 5000, "\0"]
)
def test_anything_else_is_one_error_with_exit_code_2(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", text]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "is neither a chat template nor a server's command line" in shown.err
    assert shown.err.count("\n") == 1


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a readable file"):
        run(LintOptions(str(tmp_path / "binary.jinja")))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        run(LintOptions(str(tmp_path)))
    write_tokenizer(tmp_path, 300, None)
    with pytest.raises(ConfigError, match="has no chat template"):
        run(LintOptions(str(tmp_path)))
    (tmp_path / "open.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="does not compile"):
        run(LintOptions(str(tmp_path / "open.jinja")))


def test_options_that_do_not_fit_are_refused(tmp_path: Path, dated: Path) -> None:
    for options in ({"model": str(tmp_path)}, {"chat_template": str(dated)}, {"log": "log.jsonl"}):
        with pytest.raises(ConfigError, match="needs a command line"):
            run(LintOptions(str(dated), **options))
    with pytest.raises(ConfigError, match="name a chat template"):
        run(LintOptions())
    with pytest.raises(ConfigError, match="name one instead of -"):
        LintOptions(str(dated), json="-")
    with pytest.raises(ConfigError, match="is a server"):
        LintOptions("vllm serve m", log="http://localhost:8000")
    with pytest.raises(ConfigError, match="is a folder: name a file"):
        run(LintOptions(str(dated), json=str(tmp_path)))
    with pytest.raises(ConfigError, match="--model needs a model folder"):
        run(LintOptions("vllm serve m", model=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"the chat template .* is not a readable file"):
        run(LintOptions("vllm serve m", chat_template=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_template_that_prints_the_date(
    tmp_path: Path, dated: Path, as_folder: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder, 300, DATED)
    assert cli.main(["lint", str(folder if as_folder else dated), "--json", str(tmp_path / "t.json")]) == 1
    assert "today's date" in " ".join(capsys.readouterr().out.split())
    checks = {check["check"]: check for check in json.loads((tmp_path / "t.json").read_text())}
    assert not checks["the date"]["ok"]
    assert checks["two turns"]["ok"]


def test_a_good_template_given_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", BODY]) == 0
    shown = capsys.readouterr()
    assert "breaks" not in shown.out
    assert shown.err == ""


def test_a_command_line(tmp_path: Path, dated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", "vllm serve m --block-size 128"]) == 1
    assert "--block-size: only whole blocks of 128 tokens" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["lint", "--max-num-seqs 8", "--chat-template", str(dated)]) == 1
    assert "the chat template: the template prints today's date" in " ".join(capsys.readouterr().out.split())


def test_the_doctors_flag_for_templates_still_works(
    tmp_path: Path, dated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    assert cli.main(["doctor", "--template", str(dated), "--json", str(files[0])]) == 1
    old = capsys.readouterr()
    assert cli.main(["lint", str(dated), "--json", str(files[1])]) == 1
    assert old.err == "note: doctor --template has moved to anaphora lint and will be removed in 0.3\n"
    assert old.out == capsys.readouterr().out
    assert files[0].read_text() == files[1].read_text()
    assert cli.main(["doctor", "http://localhost:1", "--template", str(dated)]) == 2


def test_the_doctors_flag_for_command_lines_still_works(
    tmp_path: Path, dated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    body = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]}
    log.write_text(json.dumps(body | {"prompt_logprobs": 1}) + "\n")
    command = "vllm serve m --block-size 128"
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    old = [str(log), "--serve-flags", command, "--template", str(dated), "--json", str(files[0])]
    assert cli.main(["doctor", *old]) == 1
    assert capsys.readouterr().err == (
        "note: doctor --serve-flags has moved to anaphora lint and will be removed in 0.3\n"
    )
    new = [command, "--log", str(log), "--chat-template", str(dated), "--json", str(files[1])]
    assert cli.main(["lint", *new]) == 1
    assert files[0].read_text() == files[1].read_text()
    found = {warning["setting"] for warning in json.loads(files[0].read_text())["warnings"]}
    assert {"prompt_logprobs", "--block-size", "the chat template"} <= found

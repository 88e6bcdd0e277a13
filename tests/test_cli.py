"""The command line: options from fields, vLLM's spellings, errors in one line with the exit code of their class."""

from __future__ import annotations

import argparse
import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from anaphora import cli
from anaphora.advice import vllm_flags
from anaphora.checkpoint.resolve import ModelSource
from anaphora.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from anaphora.errors import ConfigError, ModelError

ARTICLE = "--gpu-memory-utilization 0.9 --max-model-len 32768 --trust-remote-code --enable-prefix-caching"


def given(*arguments: str) -> dict[str, Any]:
    return {name: value for name, value in vars(cli.parse("serve", arguments)).items() if name != "notes"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects what reaches the server: (engine config, server config, model source). No model is loaded."""
    calls: list[Any] = []
    app = types.ModuleType("anaphora.server.app")
    app.serve = lambda *arguments: calls.append(arguments) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "anaphora.server.app", app)
    monkeypatch.setattr(
        "anaphora.checkpoint.resolve.resolve",
        lambda model, **_: ModelSource(Path("/models/found"), model or "embedded", "identity"),
    )
    return calls


# --- Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"), [("32768", 32768), ("32k", 32000), ("32K", 32768), ("25.6k", 25600), ("1m", 10**6)]
)
def test_token_counts_take_suffixes(text: str, tokens: int) -> None:
    assert given("--max-model-len", text) == {"max_model_len": tokens}


@pytest.mark.parametrize("text", ["", "x", "-5", "1.5", "1.5K", "32 k x", "1e3", "nan"])
def test_other_token_counts_are_refused_by_flag_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len"):
        cli.parse("serve", [f"--max-model-len={text}"])


@pytest.mark.parametrize("flags", ["--max-model-len 0", "--max-model-len 1", f"--seed {2**63}"])
def test_numbers_that_no_engine_can_work_with_are_refused_by_flag(
    served: list[Any], capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    assert cli.main(["serve", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flags.split()[0]} must ")
    assert not served


def test_sizes_take_suffixes() -> None:
    assert given("--kv-cache-memory-bytes", "512M") == {"kv_cache_memory_bytes": 512 * 2**20}
    assert given("--max-body-size", "4g") == {"max_body_bytes": 4 * 10**9}


def test_underscores_are_dashes_and_values_stay_as_they_are() -> None:
    assert given("--max_model_len=4_096".replace("4_096", "4096"), "--chat_template", "a_b") == {
        "max_model_len": 4096,
        "chat_template": "a_b",
    }
    assert given("--served_model_name=my_model") == {"served_model_name": ["my_model"]}


def test_switches_have_a_negative() -> None:
    assert given("--enable-prefix-caching") == {"enable_prefix_caching": True}
    assert given("--no-enable-prefix-caching") == {"enable_prefix_caching": False}
    assert given("--disable-prefix-caching") == {"enable_prefix_caching": False}
    assert given("--trust-remote-code") == {"trust_remote_code": True}


def test_lists_take_several_values_and_repetition() -> None:
    assert given("--api-key", "a", "b", "--api-key", "c") == {"api_key": ["a", "b", "c"]}


def test_the_model_is_positional_or_a_flag_before_or_after_others() -> None:
    for arguments in (["M", "--port", "1"], ["--port", "1", "M"], ["--model", "M", "--port", "1"]):
        assert given(*arguments) == {"model": "M", "port": 1}
    assert given("M", "--model", "M") == {"model": "M"}
    with pytest.raises(ConfigError, match="MODEL is given twice: A and --model B"):
        cli.parse("serve", ["A", "--model", "B"])


def test_every_field_of_the_settings_is_an_option() -> None:
    parser = cli.build_parser("serve")
    reached = {action.dest for action in parser._actions}
    for cls in (ModelConfig, CacheConfig, SchedulerConfig, ServerConfig):
        assert set(cls.__dataclass_fields__) <= reached
    assert "--log-interval" not in parser.format_help()


def test_choices_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"--dtype: invalid choice: 'int3'"):
        cli.parse("serve", ["--dtype", "int3"])


def test_arguments_after_two_dashes_go_to_the_servers_of_the_benchmark() -> None:
    options = cli.parse("bench", ["--requests", "3", "--", "--max-num-seqs", "4"])
    assert options.server_args == ("--max-num-seqs", "4")
    assert options.requests == 3


# --- vLLM's other flags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tensor_parallel_size", "-tp"])
@pytest.mark.parametrize("form", ["{} 2", "{}=2", "M {} 2", "{} 2 M"])
def test_a_flag_that_only_vllm_has_is_named(flag: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *form.format(flag).split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --tensor-parallel-size is a flag of vllm serve that Anaphora does not have")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "argument",
    ["--enable-lora", "--no-enable-lora", "--hf-overrides.rope_scaling.factor", "--no-enable-chunked-prefill"],
)
def test_negated_and_dotted_forms_are_named_too(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"is a flag of vllm serve that Anaphora does not have"):
        cli.parse("serve", [argument, "2"])


def test_all_refused_flags_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = "serve M --enable-lora -tp 2 --hf-token t --kv-cache-metrics --zzz -1 --enable-lora"
    assert cli.main(line.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("error: ").removeprefix("there is no flag ").split()[0] for line in lines] == [
        *("--tensor-parallel-size", "--enable-lora", "--hf-token", "--kv-cache-metrics", "--zzz"),
    ]
    assert "HF_TOKEN" in lines[2]
    assert "lifetimes" in lines[3]
    assert cli.main(["plan", "--zzz", "--yyy=3"]) == 2
    assert capsys.readouterr().err == "error: there is no flag --zzz\nthere is no flag --yyy=3\n"


def test_flags_that_restate_the_behaviour_are_accepted(served: list[Any], capsys: Any) -> None:
    restating = (
        "--enable-server-load-tracking --enable-request-id-headers --disable-log-stats --max-log-len 100 "
        "--disable-frontend-multiprocessing --response-role assistant"
    )
    assert cli.main(["serve", "M", *restating.split()]) == 0
    assert capsys.readouterr().err.count("changes nothing: ") == 6
    assert cli.main(["serve", "M", "--response-role", "model"]) == 2


def test_flags_that_change_nothing_are_accepted_with_a_note(served: list[Any], capsys: Any) -> None:
    assert cli.main(["serve", "-tp", "1", "--swap_space=3", "--enable-prompt-tokens-details", "M"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [note.split()[1] for note in notes] == [
        "--tensor-parallel-size",
        "--swap-space",
        "--enable-prompt-tokens-details",
    ]
    assert served[0][2].name == "M"


def test_gpu_flags_get_a_note_only_where_there_is_no_gpu(
    served: list[Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpu, notes in ((None, 1), ("/usr/bin/nvidia-smi", 0)):
        monkeypatch.setattr("shutil.which", lambda name, found=gpu: found)
        assert cli.main(["serve", "--gpu-memory-utilization", "0.5"]) == 0
        assert capsys.readouterr().err.count("note: --gpu-memory-utilization") == notes
    assert [call[0].cache.gpu_memory_utilization for call in served] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--prot", "there is no flag --prot (did you mean --port?)"),
        (
            "--enable-prefix-cacheing",
            "there is no flag --enable-prefix-cacheing (did you mean --enable-prefix-caching?)",
        ),
        ("--zzz", "there is no flag --zzz"),
    ],
)
def test_an_unknown_flag_gets_the_closest(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", argument]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_abbreviations_are_not_flags() -> None:
    with pytest.raises(ConfigError, match="there is no flag --max-model"):
        cli.parse("serve", ["--max-model", "5"])


def test_vllms_list_and_our_own_do_not_overlap() -> None:
    data = vllm_flags._data()
    accepted = [flag for group in data["accepted"] for flag in group["flags"]]
    absent = [flag for group in data["absent"] for flag in group["flags"]]
    assert len(set(accepted + absent)) == len(accepted + absent) > 300
    visible = argparse.SUPPRESS
    actions = cli.build_parser("serve")._actions
    own = {flag for action in actions if action.help != visible for flag in action.option_strings}
    assert own & {*accepted, *absent, *data["aliases"]} == set()


# --- Commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["", "org/name"])
def test_the_articles_command_works_as_typed(model: str, served: list[Any]) -> None:
    assert cli.main(["serve", *ARTICLE.split(), *model.split()]) == 0
    engine, server, source = served[0]
    assert engine == EngineConfig(ModelConfig(model or None, max_model_len=32768, trust_remote_code=True))
    assert server == ServerConfig()
    assert source.name == (model or "embedded")


def test_lists_reach_the_settings_as_tuples(served: list[Any]) -> None:
    assert cli.main(["serve", "--served-model-name", "a", "b", "--api-key", "k", "--port", "0"]) == 0
    assert served[0][0].model.served_model_name == ("a", "b")
    assert served[0][1] == ServerConfig(api_key=("k",), port=0)


def test_a_setting_that_cannot_work_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--gpu-memory-utilization", "3"]) == 2
    assert capsys.readouterr().err == ("error: --gpu-memory-utilization must be above 0 and at most 1, got 3.0\n")


def test_errors_of_the_model_are_one_line(
    served: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(model: str | None, **_: Any) -> ModelSource:
        raise ModelError(f"there is no model {model}")

    monkeypatch.setattr("anaphora.checkpoint.resolve.resolve", refuse)
    assert cli.main(["serve", "nowhere"]) == ModelError.exit_code
    assert capsys.readouterr().err == "error: there is no model nowhere\n"


def test_ctrl_c_is_130_without_a_traceback(
    served: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["anaphora.server.app"], "serve", interrupt)
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_without_the_extra_serve_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "pip install '.[serve]'" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["srve"],
            "there is no command 'srve' (did you mean serve?); the commands are " + ", ".join(cli.COMMANDS),
        ),
        (["--sevre"], "there is no flag --sevre (see anaphora --help)"),
        (["serve", "a", "b"], "unexpected argument 'b' (see anaphora serve --help)"),
    ],
)
def test_mistakes_before_the_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    from anaphora import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"anaphora {__version__}\n"
    assert cli.main([]) == 0
    listed = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"  {name} " in listed
        with pytest.raises(SystemExit) as exit_info:
            cli.main([name, "--help"])
        assert exit_info.value.code == 0
        assert f"usage: anaphora {name}" in capsys.readouterr().out


@pytest.mark.parametrize(("load_format", "weights"), [("dummy", False), ("auto", True)])
def test_dummy_weights_are_not_searched(
    load_format: str, weights: bool, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def resolve(model: str, *, weights: bool, **_: Any) -> ModelSource:
        asked.append(weights)
        return ModelSource(Path("/models/found"), model, "identity")

    monkeypatch.setattr("anaphora.checkpoint.resolve.resolve", resolve)
    assert cli.main(["serve", "m", "--load-format", load_format]) == 0
    assert asked == [weights]


def test_text_that_the_locale_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert cli.main(["lint", "vllm serve m --zé\udcff 1"]) == 1
    assert cli.main(["lint", "é"]) == 2
    assert rb"--z\xe9\udcff" in out.buffer.getvalue()  # type: ignore[attr-defined]
    assert rb"'\xe9' is neither" in err.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "command", ["plan --json", "bench --json", "bench --html", "doctor log --fix", "doctor log --html"]
)
def test_a_file_that_is_asked_for_is_not_standard_output(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), "-"]) == 2
    assert "needs the name of a file: standard output has the report" in capsys.readouterr().err

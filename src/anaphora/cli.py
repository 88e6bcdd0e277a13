"""The command line ``anaphora``: one function per command, options generated from dataclass fields.

Heavy imports are inside the functions: a command imports what it needs when it runs, and the options of a command are
built only when it is used.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
import shutil
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, NoReturn, TypeVar

from anaphora.advice import vllm_flags
from anaphora.config import (
    SERVE_SETTINGS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    flag_name,
    parse_bytes,
)
from anaphora.errors import AnaphoraError, ConfigError

T = TypeVar("T")

_SERVE_PACKAGES = ("torch", "transformers", "zmq", "starlette", "uvicorn")


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError for invalid arguments, so that all errors of the program look the same."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True)
class Command:
    """A command. ``settings`` returns the dataclasses whose fields are its options; ``run`` returns the exit code.

    ``vllm``: the command accepts or explains all flags of ``vllm serve``.
    """

    help: str
    settings: Callable[[], tuple[type, ...]]
    run: Callable[[argparse.Namespace], int]
    vllm: bool = False
    epilog: str = ""


# --- Options from fields ---------------------------------------------------------------------------------------------


def _converter(name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wraps ``parse`` for argparse, so that the error message names the flag and keeps the reason."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message) from None

    convert.__name__ = name
    return convert


def default_text(field: Field[Any]) -> str:
    """Returns a field's default as help and docs show it; empty for None, False and empty values."""
    default = field.default
    if default is None or default is False or default in ((), "", MISSING):
        return ""
    if field.metadata.get("parse") is parse_bytes:
        return f"{int(default) // 2**20}M"
    return "on" if default is True else str(default)


def _help(field: Field[Any]) -> str:
    if field.metadata.get("hidden"):
        return argparse.SUPPRESS
    text = str(field.metadata["help"]).replace("%", "%%")
    shown = default_text(field)
    return f"{text} (default: {shown})" if shown else text


def _add_option(parser: argparse.ArgumentParser, field: Field[Any], hint: Any) -> None:
    """Adds the option of one field. Options that the user leaves out are not set: the dataclass has the defaults."""
    meta = field.metadata
    kinds = [kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None)]
    more: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
    if hint is bool:
        parser.add_argument(flag_name(field), action=argparse.BooleanOptionalAction, **more)
        return
    more |= {"choices": meta.get("choices"), "metavar": meta.get("metavar")}
    if parse := meta.get("parse"):
        more["type"] = _converter(meta.get("metavar") or field.name, parse)
    elif typing.get_origin(hint) is tuple:
        more |= {"type": kinds[0], "nargs": "+", "action": "extend"}
    else:
        more["type"] = kinds[0]
    if meta.get("positional"):
        name = field.name.upper()
        if meta.get("also_flag"):
            parser.add_argument(
                f"--{field.name}", dest=f"{field.name}_flag", metavar=name, **_only(more, "type", "default")
            )
        more.pop("dest")
        parser.add_argument(field.name, **more | {"nargs": "?", "metavar": name})
        return
    parser.add_argument(flag_name(field), **more)


def _split_remainder(classes: tuple[type, ...], arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the arguments before ``--``, and those after it as the value of the field that takes the remainder."""
    names = [field.name for cls in classes for field in fields(cls) if field.metadata.get("remainder")]
    if not names or "--" not in arguments:
        return list(arguments), {}
    at = list(arguments).index("--")
    return list(arguments[:at]), {names[0]: tuple(arguments[at + 1 :])}


def _only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names} | {"help": argparse.SUPPRESS}


def _make(cls: type[T], options: argparse.Namespace) -> T:
    """Returns an instance of ``cls`` with the values that the user set."""
    given = vars(options)
    values = {f.name: given[f.name] for f in fields(cls) if f.name in given}  # type: ignore[arg-type]
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def build_parser(name: str) -> argparse.ArgumentParser:
    """Builds the parser of one command."""
    command = COMMANDS[name]
    parser = _Parser(prog=f"anaphora {name}", description=command.help, epilog=command.epilog, allow_abbrev=False)
    for cls in command.settings():
        hints = typing.get_type_hints(cls)
        for field in fields(cls):
            if "help" in field.metadata and not field.metadata.get("remainder"):
                _add_option(parser, field, hints[field.name])
    if command.vllm:
        vllm_flags.add_accepted(parser)
    return parser


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of a command. Raises ConfigError that explains each unknown flag."""
    parser = build_parser(name)
    vllm = COMMANDS[name].vllm
    own_part, rest = _split_remainder(COMMANDS[name].settings(), arguments)
    options, unknown = parser.parse_known_args([vllm_flags.normalize(a) if vllm else a for a in own_part])
    given = vars(options)
    flags = [argument for argument in unknown if re.match(r"-[^\d.]", argument)]
    own = [s for action in parser._actions if action.help != argparse.SUPPRESS for s in action.option_strings]
    refused: list[str] = given.pop("refused", [])
    refused += [
        vllm_flags.explain(flag, own) if vllm else f"there is no flag {flag}{vllm_flags.closest(flag, own)}"
        for flag in flags
    ]
    if refused:
        raise ConfigError("\n".join(dict.fromkeys(refused)))
    if unknown:
        raise ConfigError(f"unexpected argument {unknown[0]!r} (see {parser.prog} --help)")
    given.update(rest)
    if "model_flag" in given:
        named = given.pop("model_flag")
        if given.setdefault("model", named) != named:
            raise ConfigError(f"MODEL is given twice: {given['model']} and --model {named}; give it once")
    return options


# --- Commands --------------------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _need_serve_extra(command: str) -> None:
    if missing := [name for name in _SERVE_PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{command} needs {missing[0]}, which is not installed: run pip install '.[serve]' in Anaphora's folder"
        )


def _print_notes(options: argparse.Namespace, classes: tuple[type, ...]) -> None:
    """Prints a line for each flag that has no effect here, such as GPU flags on a machine without a GPU."""
    for note in getattr(options, "notes", []):
        _say(f"note: {note}")
    if shutil.which("nvidia-smi"):
        return
    for field in (field for cls in classes for field in fields(cls)):
        if "cpu_note" in field.metadata and field.name in vars(options):
            _say(f"note: {flag_name(field)}: {field.metadata['cpu_note']}")


def _serve(options: argparse.Namespace) -> int:
    model, server = _make(ModelConfig, options), _make(ServerConfig, options)
    cache, scheduler = _make(CacheConfig, options), _make(SchedulerConfig, options)
    _need_serve_extra("anaphora serve")
    _print_notes(options, SERVE_SETTINGS)
    from anaphora.checkpoint.resolve import resolve
    from anaphora.server.app import serve

    weights = model.load_format != "dummy"
    source = resolve(model.model, trust_remote_code=model.trust_remote_code, weights=weights, progress=_say)
    return serve(EngineConfig(model, cache, scheduler), server, source)


def _bench_settings() -> tuple[type, ...]:
    from anaphora.tools.bench import BenchOptions

    return (BenchOptions,)


def _bench(options: argparse.Namespace) -> int:
    from anaphora.tools.bench import BenchOptions, run

    return run(_make(BenchOptions, options))


def _doctor_settings() -> tuple[type, ...]:
    from anaphora.tools.doctor import DoctorOptions
    from anaphora.tools.lint import MovedDoctorFlags

    return (DoctorOptions, MovedDoctorFlags)


def _doctor(options: argparse.Namespace) -> int:
    from anaphora.tools.doctor import DoctorOptions, run
    from anaphora.tools.lint import LintOptions, MovedDoctorFlags, run_doctor_flags

    moved = _make(MovedDoctorFlags, options)
    if moved == MovedDoctorFlags():
        return run(_make(DoctorOptions, options))
    flag = "--template" if moved.serve_flags is None else "--serve-flags"
    _say(f"note: doctor {flag} has moved to anaphora lint and will be removed in 0.3")
    return run_doctor_flags(moved, _make(LintOptions, options))


def _lint_settings() -> tuple[type, ...]:
    from anaphora.tools.lint import LintOptions

    return (LintOptions,)


def _lint(options: argparse.Namespace) -> int:
    from anaphora.tools.lint import LintOptions, run

    return run(_make(LintOptions, options))


def _plan_settings() -> tuple[type, ...]:
    from anaphora.tools.plan import PlanOptions

    return (PlanOptions,)


def _plan(options: argparse.Namespace) -> int:
    from anaphora.tools.plan import PlanOptions, run

    return run(_make(PlanOptions, options))


def _explain_settings() -> tuple[type, ...]:
    from anaphora.tools.doctor import ExplainOptions

    return (ExplainOptions,)


def _explain(options: argparse.Namespace) -> int:
    from anaphora.tools.doctor import ExplainOptions, explain

    return explain(_make(ExplainOptions, options))


def _record_settings() -> tuple[type, ...]:
    from anaphora.tools.record import RecordOptions

    return (RecordOptions,)


def _record(options: argparse.Namespace) -> int:
    from anaphora.tools.record import RecordOptions, run

    return run(_make(RecordOptions, options))


COMMANDS = {
    "serve": Command(
        "OpenAI-compatible HTTP server with automatic prefix caching",
        lambda: SERVE_SETTINGS,
        _serve,
        vllm=True,
        epilog="Flags have the same names and meanings as in vllm serve. Its other flags are accepted if they would "
        "change nothing here, and are refused with a reason otherwise.",
    ),
    "bench": Command(
        "send the same requests with the prefix cache off and on, and compare",
        _bench_settings,
        _bench,
        epilog="Arguments after -- are flags of anaphora serve for the servers that the benchmark starts.",
    ),
    "doctor": Command(
        "why prompts miss: where their prefixes differ, what it costs, what would be reused",
        _doctor_settings,
        _doctor,
    ),
    "lint": Command(
        "check a chat template or a server's command line for what breaks prefix reuse",
        _lint_settings,
        _lint,
    ),
    "record": Command(
        "run a proxy in front of any server that writes the log that doctor reads",
        _record_settings,
        _record,
    ),
    "plan": Command(
        "estimate what prefix caching would save on a measured GPU; needs no GPU",
        _plan_settings,
        _plan,
    ),
    "explain": Command(
        "where and why the second of two request bodies stops reusing the first",
        _explain_settings,
        _explain,
    ),
}


def _main_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="anaphora",
        description="An OpenAI-compatible engine and server for language models, built around automatic prefix caching",
        epilog="\n".join(["commands:", *(f"  {name:10}{command.help}" for name, command in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help="one of the commands below; each has its own --help"
    )
    return parser


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]].run(parse(arguments[0], arguments[1:]))
    parser = _main_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and options.command is None:
        raise ConfigError(f"there is no flag {unknown[0]} (see anaphora --help)")
    if options.version:
        from anaphora import __version__

        print(f"anaphora {__version__}")
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    raise ConfigError(
        f"there is no command {options.command!r}"
        + vllm_flags.closest(options.command, COMMANDS)
        + f"; the commands are {', '.join(COMMANDS)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code. ``argv`` defaults to the process's arguments."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without UTF-8 cannot encode every text of a log
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except AnaphoraError as error:
        _say(f"error: {error.message}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130

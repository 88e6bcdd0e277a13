"""Runs ``anaphora lint``: checks the target, prints the findings and writes the JSON file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.text import Text

from anaphora.advice.template_checks import check_template
from anaphora.errors import ConfigError
from anaphora.tools.lint.command_line import parse_command_line
from anaphora.tools.lint.command_line_checks import check_command_line
from anaphora.tools.lint.options import LintOptions, MovedDoctorFlags
from anaphora.tools.lint.target import Target, kind_of_target
from anaphora.tools.lint.template import as_json, load_template
from anaphora.tools.shared.console import LogConsole
from anaphora.tools.shared.output_file import write_json

_STYLES = {"good": "green", "breaks": "bold red", "note": "yellow"}


def main(options: LintOptions) -> int:
    """Checks a template or a command line. Returns 1 if something breaks reuse or memory, else 0."""
    if not options.target:
        raise ConfigError('name a chat template (a file or a model folder) or a command line ("vllm serve MODEL ...")')
    kind = kind_of_target(options.target)
    if kind is Target.TEMPLATE:
        for name in ("model", "chat_template", "log"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs a command line, and {options.target!r:.200} is a "
                                  "template")  # fmt: skip
    return _check(kind, options.target, options)


def run_doctor_flags(moved: MovedDoctorFlags, options: LintOptions) -> int:
    """Runs what the doctor's flags ask for: a template given with a command line is that command's template."""
    if moved.serve_flags is not None:
        options = replace(options, chat_template=moved.template or options.chat_template)
        return _check(Target.COMMAND_LINE, moved.serve_flags, options)
    assert moved.template is not None
    return _check(Target.TEMPLATE, moved.template, options)


def _check(kind: Target, target: str, options: LintOptions) -> int:
    if options.json and Path(options.json).is_dir():
        raise ConfigError(f"{options.json} is a folder: name a file")
    if kind is Target.TEMPLATE:
        return _check_template(target, options.json)
    return _check_command_line(target, options)


def _check_command_line(text: str, options: LintOptions) -> int:
    console = LogConsole()
    command = parse_command_line(text)
    found, notes = check_command_line(command, options)
    lines = [("breaks" if warning.breaks else "note", str(warning)) for warning in found]
    lines += [("breaks", said) for said in command.unknown]
    lines += [("note", said) for said in notes]
    console.print(f"{command.engine}, flags: {len(command.flags)}", highlight=False, markup=False)
    for word, said in lines or [("good", "nothing that breaks reuse or memory")]:
        console.print(Text(f"{word:8}", style=_STYLES[word]) + Text(said))
    if options.json:
        data = {
            "engine": command.engine,
            "model": command.model,
            "flags": command.flags,
            "warnings": found,
            "unknown": command.unknown,
            "notes": notes,
        }
        write_json(options.json, data)
    return 1 if any(word == "breaks" for word, _ in lines) else 0


def _check_template(name: str, json: str | None) -> int:
    console = LogConsole()
    checks = check_template(load_template(name))
    for check in checks:
        word = "good" if not check.problem else "breaks" if check.breaks else "note"
        said = f"{check.name}: {check.problem.rstrip('.')}. Fix: {check.mend}" if check.problem else check.name
        console.print(Text(f"{word:8}", style=_STYLES[word]) + Text(said))
        for title, text in (("before", check.before), ("after", check.after)):
            if text:
                console.print(Text(f"          {title}: {text!r}", style="dim"))
    if json:
        write_json(json, list(as_json(checks)))
    return 1 if any(check.problem and check.breaks for check in checks) else 0

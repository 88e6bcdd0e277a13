"""The process that renders chat templates: ``python -m anaphora.text.render_process SECONDS``.

Reads one JSON object ``{source, variables, now}`` per line and writes ``{text}`` or ``{error, syntax, refused}`` for
each. Jinja is configured as in transformers. ``now`` is the ISO time that ``strftime_now`` uses; null means the real
time. SECONDS is the CPU time that one rendering may take.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 2**30
"""Limit of the process's address space."""
OUTPUT_CHARACTERS = 2**24
"""Limit of the rendered text."""


class _Refused(jinja2.TemplateError):
    """Raised by the template itself with ``raise_exception``."""


class _GenerationTag(jinja2.ext.Extension):
    """Renders the content of ``{% generation %}``, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace()`` that refuses names with a leading underscore: they would expose Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold {name!r}")


def _raise_exception(message: str) -> None:
    raise _Refused(message)


class _Clock:
    """The current time as seen by the template that is being rendered."""

    now: datetime | None = None

    @classmethod
    def strftime(cls, format: str) -> str:
        return (cls.now or datetime.now()).strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's ``tojson``, which escapes ``<``, ``>``, ``&`` and ``'`` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _Clock.strftime,
        "namespace": _Namespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return environment


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _answer(source: str, variables: dict[str, Any], now: str | None) -> dict[str, Any]:
    _Clock.now = None if now is None else datetime.fromisoformat(now)
    try:
        chunks: list[str] = []
        length = 0
        for chunk in _compiled(source).generate(variables):
            chunks.append(chunk)
            length += len(chunk)
            if length > OUTPUT_CHARACTERS:
                return {"error": f"it writes more than {OUTPUT_CHARACTERS} characters"}
        return {"text": "".join(chunks)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}", "syntax": True}
    except _Refused as error:
        return {"error": str(error.message)[:1000], "refused": True}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # the template's expressions may raise anything
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def _limit_resources() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(seconds: float) -> None:
    _limit_resources()
    # The default action of the signal ends the process, even during a long call of C code.
    timer = functools.partial(signal.setitimer, signal.ITIMER_PROF) if hasattr(signal, "setitimer") else lambda _: None
    for line in sys.stdin.buffer:
        timer(seconds)
        answer = json.dumps(_answer(**json.loads(line)))
        timer(0)
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(float(sys.argv[1]))

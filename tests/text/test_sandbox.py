"""Templates cannot leave the sandbox, loop forever, or grow without limit; a process that hangs is replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import pytest

from anaphora.text.sandbox import RenderError, Sandbox, TemplateSyntaxError


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """A sandbox whose CPU limit no test reaches, however slow the machine is."""
    sandbox = Sandbox(cpu_seconds=120.0)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def short() -> Iterator[Sandbox]:
    """A sandbox for what runs until the CPU limit."""
    sandbox = Sandbox(cpu_seconds=0.5)
    yield sandbox
    sandbox.close()


DOUBLED = "{% set ns = namespace(x=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
ENDLESS = {
    "loops in loops": (
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "more than 0.5 s",
    ),
    "a loop without a call": (
        "{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
        "more than 0.5 s",
    ),
    "a string doubled": (
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "more than",
    ),
    "a power": ("{{ 7 ** (10**9) }}", "more than|ended with|nested|exit"),
    "a format width": ("{{ '%99999999999d' % 1 }}", "more than|ended with|nested|exit"),
    "a format method": ("{{ '{:>99999999999}'.format(1) }}", "more than|ended with|nested|exit"),
    "a padding": ("{{ 'x'.ljust(10**12) }}", "more than|ended with|nested|exit"),
    "a filter": ("{{ 'x' | center(10**12) }}", "more than|ended with|nested|exit"),
    "slices": ("{{ [1] | slice(10**10) | list }}", "more than|ended with|nested|exit"),
    "a nest as JSON": (DOUBLED + "{{ ns.x | tojson }}", "more than|ended with|nested|exit"),
    "a nest as text": (DOUBLED + "{{ ns.x }}", "more than|ended with|nested|exit"),
    "deep source": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "more than|ended with|nested|exit"),
}
"""Templates that run until a limit; which limit comes first may depend on the machine."""

TOO_LARGE = {
    "a huge range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "a string multiplied": ("{{ 'x' * 10**11 }}", "MiB of memory"),
    "a list multiplied": ("{% set y = x * 10**9 %}{{ y | length }}", "MiB of memory"),
    "a replacement": ("{% set s = 'a' * 10**5 %}{{ s.replace('a', s).replace('a', s) }}", "MiB of memory"),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    "much output": ("{% set s = 'x' * 10**6 %}{% for i in range(99999) %}{{ s }}{% endfor %}", "characters"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_ends_in_an_error_and_the_next_rendering_works(name: str, short: Sandbox) -> None:
    source, reason = ENDLESS[name]
    with pytest.raises(RenderError, match=reason):
        short.render(source, {"x": list(range(5000))})
    assert short.render("{{ x }}", {"x": 1}) == "1"


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_template_that_grows_too_large_is_refused_with_the_reason(name: str, sandbox: Sandbox) -> None:
    source, reason = TOO_LARGE[name]
    with pytest.raises(RenderError, match=reason):
        sandbox.render(source, {"x": list(range(5000))})
    assert sandbox.render("{{ x }}", {"x": 1}) == "1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ x.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['sys'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(x) }}",
        "{{ (x | map(attribute='__class__') | list)[0].mro() }}",
        "{{ x.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_templates_cannot_reach_python_or_files(source: str, sandbox: Sandbox) -> None:
    try:
        text = sandbox.render(source, {"x": ["y"]})
    except RenderError:
        return
    assert text == "", "a forbidden attribute renders as undefined"


def test_syntax_errors_refusals_and_failures_differ(sandbox: Sandbox) -> None:
    with pytest.raises(TemplateSyntaxError, match="line 2"):
        sandbox.render("a\n{% for %}", {})
    with pytest.raises(RenderError, match=r"^no tools here$") as refusal:
        sandbox.render("{{ raise_exception('no tools here') }}", {})
    assert refusal.value.refused
    with pytest.raises(RenderError, match="undefined") as failure:
        sandbox.render("{{ x.y.z }}", {})
    assert not failure.value.refused


def test_variables_that_are_not_json_are_an_error(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError):
        sandbox.render("", {"x": object()})


def test_renderings_from_many_threads_do_not_mix(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda n: sandbox.render("{{ n }}:{{ s }}", {"n": n, "s": "x" * (n * 997)}), range(64))
    assert list(texts) == [f"{n}:{'x' * (n * 997)}" for n in range(64)]


def test_an_interrupted_rendering_does_not_answer_the_next(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.render("", {})
    process = sandbox._process
    assert process is not None
    assert process.stdout is not None

    class Interrupted:
        def readline(self) -> bytes:
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(process, "stdout", Interrupted())
        patch.setattr(process, "communicate", process.wait)
        with pytest.raises(KeyboardInterrupt):
            sandbox.render("old", {})
    process.stdin.close()  # type: ignore[union-attr]
    process.stdout.close()
    assert sandbox.render("new", {}) == "new"


class Written:
    """Stands for the pipe to the rendering process; sets ``event`` when a request has been written."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self.event = threading.Event()

    def write(self, data: bytes) -> int:
        return self._pipe.write(data)

    def flush(self) -> None:
        self._pipe.flush()
        self.event.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


def stopped(sandbox: Sandbox) -> Written:
    """Stops the rendering process, so that it never answers. The result's ``event`` is set once it has a request."""
    sandbox.render("", {})
    process = sandbox._process
    assert process is not None
    assert process.stdin is not None
    process.send_signal(signal.SIGSTOP)
    written = Written(process.stdin)
    process.stdin = written  # type: ignore[assignment]
    return written


def test_a_process_that_hangs_is_replaced_by_the_next_caller() -> None:
    sandbox = Sandbox(stuck_seconds=0.0)
    written = stopped(sandbox)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sandbox.render, "{{ n }}", {"n": 1})
        written.event.wait()
        assert sandbox.render("{{ n }}", {"n": 2}) == "2"
        error = first.exception()
    assert isinstance(error, RenderError)
    assert f"exit code -{int(signal.SIGKILL)}" in str(error)
    sandbox.close()


def test_killing_the_process_releases_the_thread_that_waits_for_it(sandbox: Sandbox) -> None:
    written = stopped(sandbox)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(sandbox.render, "", {})
        written.event.wait()
        sandbox.kill()
        error = answer.exception()
    assert isinstance(error, RenderError)
    assert sandbox.render("{{ x }}", {"x": 1}) == "1"


def test_the_process_ends_with_its_parent() -> None:
    """The rendering process inherits stderr, so reading it to the end waits until both processes have ended."""
    script = (
        "import os, signal\n"
        "from anaphora.text.sandbox import shared\n"
        "shared().render('', {})\n"
        "print(shared()._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert int(done.stdout) > 0
    assert done.stderr == ""

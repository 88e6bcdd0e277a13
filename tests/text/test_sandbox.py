from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from anaphora.text.sandbox import RenderError, Sandbox, TemplateSyntaxError


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(cpu_seconds=0.5)
    yield sandbox
    sandbox.close()


DOUBLED = "{% set ns = namespace(x=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
ENDLESS = {
    "a huge range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "loops in loops": (
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "more than 0.5 s",
    ),
    "a loop without a call": (
        "{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
        "more than 0.5 s",
    ),
    "a string multiplied": ("{{ 'x' * 10**11 }}", "MiB of memory"),
    "a list multiplied": ("{% set y = x * 10**9 %}{{ y | length }}", "MiB of memory"),
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
    "a replacement": ("{% set s = 'a' * 10**5 %}{{ s.replace('a', s).replace('a', s) }}", "MiB of memory"),
    "a nest as JSON": (DOUBLED + "{{ ns.x | tojson }}", "more than|ended with|nested|exit"),
    "a nest as text": (DOUBLED + "{{ ns.x }}", "more than|ended with|nested|exit"),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    "deep source": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "more than|ended with|nested|exit"),
    "much output": ("{% set s = 'x' * 10**6 %}{% for i in range(99999) %}{{ s }}{% endfor %}", "characters"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_not_end_ends_in_an_error_and_the_next_rendering_works(name: str, sandbox: Sandbox) -> None:
    source, reason = ENDLESS[name]
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
def test_no_way_out(source: str, sandbox: Sandbox) -> None:
    try:
        text = sandbox.render(source, {"x": ["y"]})
    except RenderError:
        return
    assert text == "", "what must not be seen is undefined"


def test_syntax_and_refusal_are_told_apart(sandbox: Sandbox) -> None:
    with pytest.raises(TemplateSyntaxError, match="line 2"):
        sandbox.render("a\n{% for %}", {})
    with pytest.raises(RenderError, match=r"^no tools here$") as refusal:
        sandbox.render("{{ raise_exception('no tools here') }}", {})
    assert refusal.value.refused
    with pytest.raises(RenderError, match="undefined") as failure:
        sandbox.render("{{ x.y.z }}", {})
    assert not failure.value.refused


def test_variables_that_are_no_json_are_an_error(sandbox: Sandbox) -> None:
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


def test_a_process_that_was_stopped_holds_up_nobody_for_long() -> None:
    sandbox = Sandbox(stuck_seconds=0.5)
    sandbox.render("", {})
    assert sandbox._process is not None
    stopped = sandbox._process
    stopped.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(sandbox.render, "{{ n }}", {"n": n}) for n in range(2)]
        errors = [answer.exception() for answer in answers]
    (error,) = filter(None, errors)
    assert isinstance(error, RenderError)
    assert f"exit code -{int(signal.SIGKILL)}" in str(error)
    (n,) = (n for n in range(2) if errors[n] is None)
    assert answers[n].result() == str(n)
    sandbox.close()


def test_to_kill_the_process_frees_who_waits_for_it(sandbox: Sandbox) -> None:
    sandbox.render("", {})
    assert sandbox._process is not None
    sandbox._process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(sandbox.render, "", {})
        while not sandbox._lock.locked():
            time.sleep(0.01)
        sandbox.kill()
        error = answer.exception()
    assert error is None or isinstance(error, RenderError)  # it may be that it had not begun
    assert sandbox.render("{{ x }}", {"x": 1}) == "1"


def test_the_process_ends_with_its_parent() -> None:
    script = (
        "import os, signal\n"
        "from anaphora.text.sandbox import shared\n"
        "shared().render('', {})\n"
        "print(shared()._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid = int(done.stdout)
    for _ in range(100):
        if not _running(pid):
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is still there")


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False

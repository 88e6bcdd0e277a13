"""EngineHost over a scripted engine, in this process. test_client.py tests the engine process itself."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import zmq

from anaphora.config import EngineConfig
from anaphora.errors import CacheInvariantError, ConfigError, InvalidRequest
from anaphora.remote import messages, process
from anaphora.remote.process import EngineHost, load_runner
from anaphora.types.batch import ModelInfo
from anaphora.types.outputs import EngineInfo, EngineStats, SequenceUpdate, StepResult
from anaphora.types.request import Request
from anaphora.types.sampling import SamplingParams

INFO = EngineInfo(ModelInfo("m", "sha", 100, 64, 32, 16, 4096, "float32", "float32", "cpu"), 64)


@dataclass
class ScriptedEngine:
    """Gives each request one token in each of two steps; logs the calls that it gets."""

    info: EngineInfo = INFO
    running: dict[str, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    cache_is_sound: bool = True

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request) -> None:
        if request.id == "bad":
            raise InvalidRequest("the prompt is too long", param="prompt")
        if request.id == "fault":
            raise KeyError("slot 3")
        self.running[request.id] = 2

    def abort(self, request_id: str) -> bool:
        self.log.append(f"abort {request_id}")
        del self.running[request_id]
        return True

    def finish_choice(self, request_id: str, choice: int) -> None:
        self.log.append(f"finish {request_id} {choice}")

    def step(self) -> StepResult:
        self.log.append("step")
        updates = tuple(SequenceUpdate(request_id, 0, (1,), 0.0) for request_id in self.running)
        self.running = {request_id: left - 1 for request_id, left in self.running.items() if left > 1}
        return StepResult(updates, self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running))

    def reset_prefix_cache(self) -> bool:
        return not self.running

    def check(self) -> None:
        self.log.append("check")
        if not self.cache_is_sound:
            raise CacheInvariantError("3 + 4 is not 8")


class RecordingSocket:
    """A socket that notes the time-out of each poll; None is a poll that ends only with a message."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.polls: list[int | None] = []

    def poll(self, timeout: int | None = None) -> int:
        self.polls.append(timeout)
        return self._socket.poll(timeout)

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)


class Line:
    """The client's end of the socket pair, and an engine at the other end that runs until it is told to stop."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.ours, self.theirs = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        for socket in (self.ours, self.theirs):
            socket.linger = 0
            socket.hwm = 0
        self.ours.bind("inproc://engine")
        self.theirs.connect("inproc://engine")
        self.engine = ScriptedEngine()

    def run(self, *sent: bytes | messages.Command) -> list[messages.Event]:
        """Send these and Shutdown, let the host work on them, and return what it sent after Ready."""
        for message in (*sent, messages.Shutdown()):
            self.ours.send(message if isinstance(message, bytes) else messages.encode(message))
        EngineHost(self.engine, self.theirs).run()  # type: ignore[arg-type]
        events = []
        while self.ours.poll(0):
            events.append(self.receive())
        assert events[0] == messages.Ready(INFO, EngineStats())
        return events[1:]

    def receive(self) -> messages.Event:
        return messages.decode_event(self.ours.recv())

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def add(request_id: str) -> messages.Add:
    return messages.Add(Request(request_id, (1, 2), SamplingParams(), 0.0))


def failures(events: list[messages.Event]) -> list[tuple[int, str, str | None]]:
    return [(e.number, e.failure.code, e.failure.param) for e in events if isinstance(e, messages.Reply) and e.failure]


def test_commands_reach_the_engine_in_order(line: Line) -> None:
    events = line.run(add("a"), messages.Reset(), messages.FinishChoice("a", 0), messages.Abort("a"), messages.Reset())
    assert line.engine.log == ["finish a 0", "abort a"]
    assert [(e.number, e.value) for e in events if isinstance(e, messages.Reply)] == [(2, False), (5, True)]


def test_the_gauges_are_fresh_before_a_reset_is_answered(line: Line) -> None:
    events = line.run(add("a"), messages.Reset())
    assert events == [messages.Step(2, StepResult((), EngineStats(running=1))), messages.Reply(2, False)]


def test_a_refusal_names_the_message_and_the_field(line: Line) -> None:
    events = line.run(add("good"), add("bad"), add("also good"))
    assert failures(events) == [(2, "invalid_request_error", "prompt")]
    assert list(line.engine.running) == ["good", "also good"]


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"cposix\nsystem\n(S'true'\ntR.", b"\x93\x01\x02\x03"])
def test_an_unreadable_message_is_answered_and_changes_nothing(line: Line, garbage: bytes) -> None:
    events = line.run(garbage, messages.Check())
    assert failures(events) == [(1, "invalid_request_error", None)]
    assert line.engine.log == ["check"]
    assert events[-1] == messages.Reply(2)


def test_a_fault_in_one_message_hurts_no_other(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    events = line.run(add("fault"), messages.Abort("nobody"), messages.Check())
    assert failures(events) == [(1, "internal_error", None), (2, "internal_error", None)]
    assert "slot 3" in caplog.text
    assert events[-1] == messages.Reply(3)


def test_a_failed_check_is_the_answer_to_check(line: Line) -> None:
    line.engine.cache_is_sound = False
    assert failures(line.run(messages.Check())) == [(1, "cache_invariant", None)]


def test_an_idle_engine_reports_its_gauges_checks_once_and_sleeps(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_BEFORE_CHECK_MS", 1)
    line.engine.cache_is_sound = False
    socket = RecordingSocket(line.theirs)
    thread = threading.Thread(target=EngineHost(line.engine, socket).run)  # type: ignore[arg-type]
    thread.start()
    events = [line.receive()]
    line.ours.send(messages.encode(add("a")))
    while not isinstance(events[-1], messages.CheckFailed):
        events.append(line.receive())
    line.ours.send(messages.encode(messages.Abort("nobody")))  # refused: no work, so nothing new to check
    events.append(line.receive())
    line.ours.send(messages.encode(messages.Ping()))  # nor does this start a check
    assert line.receive() == messages.Reply(3)
    line.ours.send(messages.encode(messages.Shutdown()))
    thread.join()
    # Idle from the start, then the wait before the check, and once checked it sleeps until a message arrives.
    assert socket.polls[:3] == [None, 1, None]
    assert set(socket.polls[3:]) <= {None}
    assert line.engine.log == ["step", "step", "check", "abort nobody"]
    steps = [(len(e.result.updates), e.result.stats.running) for e in events if isinstance(e, messages.Step)]
    assert steps == [(1, 1), (1, 0), (0, 0)]
    assert failures(events) == [(2, "internal_error", None)]


def test_an_error_from_a_step_is_raised(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "step", lambda self: 1 / 0)
    line.ours.send(messages.encode(add("a")))
    with pytest.raises(ZeroDivisionError):
        EngineHost(line.engine, line.theirs).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_such_package.runner:load", "needs the module 'no_such_package'"),
        ("anaphora.config:no_such_function", "not a function"),
        ("anaphora.config", "not a function"),
        ("", "not a function"),
    ],
)
def test_an_unknown_runner_is_refused_by_name(path: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_runner(EngineConfig(runner=path))


@pytest.mark.parametrize("first_line", [b"", b"\n", b"[]\n", b'{"endpoint": "ipc://x"}\n', b"\x80\x04.\n"])
def test_without_a_start_line_the_process_says_what_it_needs(first_line: bytes) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "anaphora.remote.process"], input=first_line, capture_output=True, check=False
    )
    assert ended.returncode == ConfigError.exit_code
    assert b"first input line" in ended.stderr
    assert b"Traceback" not in ended.stderr

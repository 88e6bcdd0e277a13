"""Messages are the same after encoding and decoding, and invalid ones are refused."""

import pytest
from msgspec import DecodeError, msgpack

from anaphora import errors
from anaphora.errors import InvalidRequest
from anaphora.remote import messages
from anaphora.types.batch import ModelInfo, TokenLogprobs
from anaphora.types.outputs import EngineInfo, EngineStats, FinishReason, PromptDone, SequenceUpdate, StepResult
from anaphora.types.reports import CacheReport, Eviction, Neighbour
from anaphora.types.request import Request
from anaphora.types.sampling import SamplingParams

SAMPLING = SamplingParams(
    n=3,
    temperature=0.5,
    logit_bias={0: -100.0, 7: 1.5},
    allowed_token_ids=(1, 2, 3),
    seed=-(2**63),
    stop=("\n\n", "é"),
    stop_token_ids=(2,),
    logprobs=2,
)
REQUEST = Request("r", (1, 2, 3), SAMPLING, 1.25, (0, 5), "tenant")
LOGPROBS = (TokenLogprobs(4, -0.5, 1, ((4, -0.5), (9, -float("inf")))),)
REPORT = CacheReport(9, 8, "hit", "all", 8, True, Neighbour("a", 1.5, (7, 8)), Eviction(2.0, "b", 16, 32), "x")
PROMPT = PromptDone(REPORT, 0.1, 0.0, 0.5, (None, *LOGPROBS))
UPDATES = (
    SequenceUpdate("r", 0, (4,), 2.0, LOGPROBS, PROMPT),
    SequenceUpdate("r", 2, (5, 2), 2.0, finish_reason=FinishReason.STOP, stop_reason=2),
    SequenceUpdate("q", 0, (), 2.0, finish_reason=FinishReason.ERROR, error="the step failed"),
)
STATS = EngineStats(running=2, reasons={"cold": 3, "hit": 1}, prefill_seconds=0.25)
INFO = EngineInfo(ModelInfo("m", "sha", 100, 64, 32, 16, 4096, "bfloat16", "bfloat16", "cpu"), 64, ("capped",))


@pytest.mark.parametrize(
    "command",
    [
        messages.Add(REQUEST),
        messages.Abort("r"),
        messages.FinishChoice("r", 1),
        messages.Reset(),
        messages.Explain(REQUEST),
        messages.Check(),
        messages.Ping(),
        messages.Shutdown(),
    ],
)
def test_commands_arrive_unchanged(command: messages.Command) -> None:
    assert messages.decode_command(messages.encode(command)) == command


@pytest.mark.parametrize(
    "event",
    [
        messages.Ready(INFO, STATS),
        messages.Step(3, StepResult(UPDATES, STATS)),
        messages.Reply(4, False, messages.Failure("conflict", "busy", "x")),
        messages.CheckFailed(messages.Failure("cache_invariant", "3 + 4 != 8")),
        messages.StartFailed(messages.Failure("model_error", "no attention")),
        messages.Dead("out of memory"),
    ],
)
def test_events_arrive_unchanged(event: messages.Event) -> None:
    assert messages.decode_event(messages.encode(event)) == event


def test_enums_come_back_as_enums() -> None:
    event = messages.decode_event(messages.encode(messages.Step(0, StepResult(UPDATES, STATS))))
    assert isinstance(event, messages.Step)
    assert event.result.updates[1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "cls", [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AnaphoraError)]
)
def test_every_error_keeps_its_class(cls: type[errors.AnaphoraError]) -> None:
    error = messages.Failure.of(cls("what was wrong", param="n")).error()
    assert (type(error), error.message, error.param) == (cls, "what was wrong", "n")


def add_with(**changes: object) -> bytes:
    raw = msgpack.decode(messages.encode(messages.Add(REQUEST)))
    raw["request"].update(changes)
    return msgpack.encode(raw)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "truncated"),
        (b"\x80\x04\x95\x10cposix\nsystem\n", "refuses"),
        (b"\xc1", "refuses"),
        (msgpack.encode({"type": "Run", "code": "1"}), "Run"),
        (msgpack.encode({"type": "Abort"}), "request_id"),
        (msgpack.encode({"type": "Abort", "request_id": "r", "also": 1}), "also"),
        (msgpack.encode({"type": "Ready"}), "Ready"),
        (messages.encode(messages.Abort("r"))[:-1], "truncated"),
        (add_with(prompt_token_ids=[1, "2"]), r"prompt_token_ids\[1\]"),
        (add_with(sampling=None), "sampling"),
        (add_with(prompt_token_ids=[1.5]), "int"),
    ],
)
def test_bytes_that_are_not_a_command_are_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        messages.decode_command(data)


def test_values_out_of_range_are_refused_by_name() -> None:
    sampling = msgpack.decode(msgpack.encode(SAMPLING)) | {"temperature": float("nan")}
    with pytest.raises(InvalidRequest) as caught:
        messages.decode_command(add_with(sampling=sampling))
    assert caught.value.param == "temperature"


def test_bytes_that_are_not_an_event_are_refused() -> None:
    with pytest.raises(DecodeError):
        messages.decode_event(messages.encode(messages.Reset()))


@pytest.mark.parametrize("bad", [{"cache_salt": "\ud800"}, {"prompt_token_ids": (2**70,)}])
def test_values_that_cannot_be_sent_are_refused(bad: dict[str, object]) -> None:
    request = Request(**{"id": "r", "prompt_token_ids": (1,), "sampling": SAMPLING, "arrival": 0.0} | bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        messages.encode(messages.Add(request))

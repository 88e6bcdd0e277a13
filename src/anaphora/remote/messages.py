"""What passes between a client and the engine process: tagged MessagePack, checked against these types when read.

Nothing here can name code to run. The client's messages carry no number on the wire: both sides count them (the
channel keeps their order), so that even an answer to an unreadable message says which one it answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from anaphora.errors import AnaphoraError, InvalidRequest
from anaphora.types.outputs import EngineInfo, EngineStats, StepResult
from anaphora.types.reports import Prefix
from anaphora.types.request import Request


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


# --- Client to engine ---------------------------------------------------------------------------------------------


class Add(_Message, frozen=True):
    """Answered by updates in Step, or by a Reply with an error where the engine refuses the request."""

    request: Request


class Abort(_Message, frozen=True):
    """Not answered; a request that is not there is ignored."""

    request_id: str


class FinishChoice(_Message, frozen=True):
    """Not answered; ends one choice whose text is complete."""

    request_id: str
    choice: int


class Reset(_Message, frozen=True):
    """Answered by a Reply whose value says whether the prefix cache was emptied."""


class Pin(_Message, frozen=True):
    """Answered by a Reply with a PinReport for each."""

    prefixes: tuple[Prefix, ...]


class Unpin(_Message, frozen=True):
    """Answered by a Reply with a PinReport for each prefix and each id."""

    prefixes: tuple[Prefix, ...] = ()
    ids: tuple[str, ...] = ()


class ListPrefixes(_Message, frozen=True):
    """Answered by a Reply with a PrefixList of at most ``limit`` shared prefixes."""

    cache_salt: str | None
    limit: int


class Explain(_Message, frozen=True):
    """Answered by a Reply with the CacheReport that the request would have now; nothing is computed."""

    request: Request


class Check(_Message, frozen=True):
    """Answered by a Reply, with an error where the cache's books do not balance."""


class Ping(_Message, frozen=True):
    """Answered by a Reply after the step that the engine is in."""


class Shutdown(_Message, frozen=True):
    """The process ends after the step that it is in."""


Command = Add | Abort | FinishChoice | Reset | Explain | Pin | Unpin | ListPrefixes | Check | Ping | Shutdown


# --- Engine to client ---------------------------------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as values; ``code`` is the code of its class in anaphora.errors."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: AnaphoraError) -> Failure:
        return cls(error.code, error.message, error.param)

    def error(self) -> AnaphoraError:
        return _BY_CODE.get(self.code, AnaphoraError)(self.message, param=self.param)


class Ready(_Message, frozen=True):
    """The model is loaded; commands are taken from now on."""

    info: EngineInfo
    stats: EngineStats


class Step(_Message, frozen=True):
    """What one step did. ``handled`` is how many of the client's messages had been taken before it."""

    handled: int
    result: StepResult


class Reply(_Message, frozen=True):
    """The answer to the client's message ``number`` (from 1). The type of ``value`` follows from that message."""

    number: int
    value: Any = None
    failure: Failure | None = None


class CheckFailed(_Message, frozen=True):
    """The check of the resting engine failed; it goes on."""

    failure: Failure


class StartFailed(_Message, frozen=True):
    """The engine could not be made; the process is ending."""

    failure: Failure


class Dead(_Message, frozen=True):
    """The process is ending for a reason other than Shutdown."""

    reason: str


Event = Ready | Step | Reply | CheckFailed | StartFailed | Dead


# --- Bytes --------------------------------------------------------------------------------------------------------


def _tree(cls: type[AnaphoraError]) -> Iterator[type[AnaphoraError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


_BY_CODE = {cls.code: cls for cls in _tree(AnaphoraError)}
_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """Raises InvalidRequest for what has no place in a message: integers beyond 64 bits, text with lone surrogates."""
    try:
        return _ENCODER.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the request holds a value that cannot be sent to the engine: {error}") from error


def decode_command(data: bytes) -> Command:
    """Raises InvalidRequest for bytes that are no command, naming the place."""
    try:
        return _COMMANDS.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the engine refuses a message that it cannot read: {error}") from error


def decode_event(data: bytes) -> Event:
    """Raises msgspec.DecodeError for bytes that are no event."""
    return _EVENTS.decode(data)

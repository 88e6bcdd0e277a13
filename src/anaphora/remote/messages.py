"""Messages between EngineClient and the engine process: tagged MessagePack, validated against these types.

No message can name code to run. The client's messages are numbered from 1, but not on the wire: both sides count them
(the socket keeps their order), so that even the Reply to an unreadable message has its number.
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
    """Answered by updates in Step, or by a Reply with an error if the engine refuses the request."""

    request: Request


class Abort(_Message, frozen=True):
    """Not answered. An unknown request is ignored."""

    request_id: str


class FinishChoice(_Message, frozen=True):
    """Ends one choice whose text is complete. Not answered."""

    request_id: str
    choice: int


class Reset(_Message, frozen=True):
    """Answered by a Reply whose value says whether the prefix cache was emptied."""


class Pin(_Message, frozen=True):
    """Answered by a Reply with a PinReport for each prefix."""

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
    """Answered by a Reply with the CacheReport that the request would get now. Nothing is computed."""

    request: Request


class Check(_Message, frozen=True):
    """Checks the cache's invariants. Answered by a Reply, with an error if one is violated."""


class Ping(_Message, frozen=True):
    """Answered by a Reply after the current step."""


class Shutdown(_Message, frozen=True):
    """Ends the process after the current step."""


Command = Add | Abort | FinishChoice | Reset | Explain | Pin | Unpin | ListPrefixes | Check | Ping | Shutdown


# --- Engine to client ---------------------------------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An AnaphoraError in a message; ``code`` is the code of its class."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: AnaphoraError) -> Failure:
        """Return the message form of an error."""
        return cls(error.code, error.message, error.param)

    def error(self) -> AnaphoraError:
        """Return the error, of its own class."""
        return _BY_CODE.get(self.code, AnaphoraError)(self.message, param=self.param)


class Ready(_Message, frozen=True):
    """The model is loaded. Sent once, before all other events."""

    info: EngineInfo
    stats: EngineStats


class Step(_Message, frozen=True):
    """The results of one step. ``handled`` is the number of the last message that the engine took before it."""

    handled: int
    result: StepResult


class Reply(_Message, frozen=True):
    """The answer to the client's message ``number``. The type of ``value`` depends on that message."""

    number: int
    value: Any = None
    failure: Failure | None = None


class CheckFailed(_Message, frozen=True):
    """The check of the idle engine's cache failed. The engine continues."""

    failure: Failure


class StartFailed(_Message, frozen=True):
    """The engine could not be loaded. The process is ending."""

    failure: Failure


class Dead(_Message, frozen=True):
    """The process is ending for a reason other than Shutdown."""

    reason: str


Event = Ready | Step | Reply | CheckFailed | StartFailed | Dead


# --- Bytes --------------------------------------------------------------------------------------------------------


def _with_subclasses(cls: type[AnaphoraError]) -> Iterator[type[AnaphoraError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _with_subclasses(child)


_BY_CODE = {cls.code: cls for cls in _with_subclasses(AnaphoraError)}
_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """Return a message as bytes. Raises InvalidRequest for integers beyond 64 bits and text with lone surrogates."""
    try:
        return _ENCODER.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the request holds a value that cannot be sent to the engine: {error}") from error


def decode_command(data: bytes) -> Command:
    """Return the command in these bytes. Raises InvalidRequest, naming the field, if there is none."""
    try:
        return _COMMANDS.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the engine refuses a message that it cannot decode: {error}") from error


def decode_event(data: bytes) -> Event:
    """Return the event in these bytes. Raises msgspec.DecodeError if there is none."""
    return _EVENTS.decode(data)

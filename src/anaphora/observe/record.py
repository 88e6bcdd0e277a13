"""The request log: one JSON line per request, in the schema that the server writes and every tool reads."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from anaphora.cache.hashing import BlockHash, extend_chain, pack, root_hash
from anaphora.errors import ConfigError
from anaphora.types.request import Request

logger = logging.getLogger("anaphora.record")

QUEUE_LINES = 8192
QUEUE_BYTES = 256 * 2**20
ROTATE_BYTES = 256 * 2**20
KEEP_FILES = 4


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt and its answer. Times in seconds, lengths in tokens; a field that is absent in the log is unknown.

    - ``time``: Unix time of arrival. ``client_id``: the id that the client gave the request.
    - ``output_tokens``: sum over the ``n`` choices.
    - ``cached_tokens``, ``reason``, ``detail``, ``position``, ``waited``: the engine's CacheReport; absent if the
      prompt was never scheduled. Other servers report only ``cached_tokens``; 0 is written, unknown is absent.
    - ``ttft_s``: arrival to first token. ``prefill_s``: first scheduled chunk to first token.
    - ``salt``: a digest of the cache salt.
    - ``block_hashes``: the chained hashes of the prompt's full blocks, the first 8 bytes of each in hex. Two prompts
      share a prefix as long as the common prefix of these lists.
    - ``status``: of the HTTP response. ``error``: its message.

    docs/record.md describes every field.
    """

    time: float
    id: str
    client_id: str = ""
    model: str
    prompt_tokens: int = 0
    block_size: int = 0
    output_tokens: int = 0
    n: int = 1
    route: str = ""
    stream: bool = False
    cached_tokens: int | None = None
    reason: str = ""
    detail: str = ""
    position: int = 0
    place: dict[str, Any] | None = None
    waited: bool = False
    queue_s: float = 0.0
    waited_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    finish: str = ""
    status: int = 200
    error: str = ""
    salt: str = ""
    block_hashes: list[str] = []
    body: dict[str, Any] | None = None


def salt_digest(salt: str | None) -> str:
    """Returns a digest of a cache salt for the log: equal for equal salts, and not invertible; "" for no salt."""
    return hashlib.sha256(b"anaphora cache salt\0" + salt.encode()).hexdigest()[:16] if salt else ""


def read(path: str | Path) -> Iterator[RequestRecord]:
    """Yields the records of a log in order. Raises ConfigError, with file, line and reason, for an invalid line."""
    decoder = msgspec.json.Decoder(RequestRecord)
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise ConfigError(f"{path}, line {number} is not a request record: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the log {path}: {error.strerror}") from None


def open_log(path: Path, flag: str = "--record") -> io.FileIO:
    """Opens a log for appending. Raises ConfigError, naming the flag, if it cannot be written."""
    try:
        return open(path, "ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"{flag} cannot write {path}: {error.strerror}") from None


def add_block_hashes(identity: str, request: Request, record: RequestRecord) -> None:
    """Sets ``record.block_hashes``. ``identity`` is the model's, the root of the hash chain."""
    hashes: list[BlockHash] = []
    root = root_hash(identity, request.cache_salt)
    extend_chain(hashes, root, pack(request.prompt_token_ids), record.block_size)
    record.block_hashes = [block_hash[:8].hex() for block_hash in hashes]


Complete = Callable[[RequestRecord], None]
"""Fills in the fields of a record that take long to compute; runs in the writer's thread."""


class RecordWriter:
    """Appends records to a file in a thread of its own; never blocks the caller.

    A full queue or a failed write (a full disk) drops records and counts them in ``dropped``; the first of a series of
    drops is logged.

    Args:
        path: the log.
        flag: the option that named it, for error messages.
        rotate_bytes: at this size FILE is renamed to FILE.1, FILE.1 to FILE.2 and so on, up to KEEP_FILES.
        queue_lines: records that may be queued.
        queue_bytes: memory that queued records may hold.

    Raises:
        ConfigError: the log cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        flag: str = "--record",
        rotate_bytes: int = ROTATE_BYTES,
        queue_lines: int = QUEUE_LINES,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.path = Path(path)
        self.written = 0
        self.dropped = 0
        self._rotate_bytes = rotate_bytes
        self._queue: queue.Queue[tuple[RequestRecord, Complete | None, int] | None] = queue.Queue(queue_lines)
        self._free_bytes = queue_bytes
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._failing = False
        self._file = open_log(self.path, flag)
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord, complete: Complete | None = None, size: int = 0) -> None:
        """Queues a record. ``size`` is the approximate memory in bytes that it and ``complete`` hold while queued."""
        with self._lock:
            fits = size <= self._free_bytes
            self._free_bytes -= size if fits else 0
        try:
            if not fits:
                raise queue.Full
            self._queue.put_nowait((record, complete, size))
        except queue.Full:
            self._release(size if fits else 0)
            self._drop("the writer is too slow")

    def close(self, timeout: float = 5.0) -> None:
        """Writes what is queued, for at most ``timeout`` seconds, and closes the file."""
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            self._drop("the writer is stuck")
        self._thread.join(timeout)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            record, complete, size = item
            try:
                if complete is not None:
                    complete(record)
                self._append(self._encoder.encode(record) + b"\n")
            except Exception as error:  # the thread must go on: it writes all later records
                self._drop(f"{type(error).__name__}: {error}")
            else:
                self.written += 1
                self._failing = False
            self._release(size)
        self._file.close()

    def _release(self, size: int) -> None:
        with self._lock:
            self._free_bytes += size

    def _append(self, line: bytes) -> None:
        """Writes a whole line or nothing: a line that a full disk cut off is removed, so that the log stays valid."""
        self._reopen_if_moved()
        size = os.fstat(self._file.fileno()).st_size
        if size and size + len(line) > self._rotate_bytes:
            self._rotate()
            size = 0
        written = self._file.write(line)
        if written != len(line):
            self._file.truncate(size)
            raise OSError(f"only {written} of {len(line)} bytes could be written")

    def _reopen_if_moved(self) -> None:
        """Opens a new file if another program has moved or deleted it, as logrotate does."""
        try:
            same = os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            same = False
        if not same:
            moved, self._file = self._file, open_log(self.path)
            moved.close()

    def _rotate(self) -> None:
        for number in range(KEEP_FILES - 1, 0, -1):
            older = Path(f"{self.path}.{number}")
            if older.exists():
                older.replace(f"{self.path}.{number + 1}")
        self.path.replace(f"{self.path}.1")
        rotated, self._file = self._file, open_log(self.path)
        rotated.close()

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self._failing:
            self._failing = True
            logger.warning("records are being dropped from %s: %s", self.path, why)

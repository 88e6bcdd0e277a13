"""The log of requests: one JSON line a request, the one schema that every tool reads and writes."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from anaphora.cache.hashing import BlockHash, extend_chain, pack, root_hash
from anaphora.errors import ConfigError
from anaphora.types import Request

logger = logging.getLogger("anaphora.record")

QUEUE_LINES = 8192
ROTATE_BYTES = 256 * 2**20
KEEP_FILES = 4


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt and its answer. Times in seconds, lengths in tokens.

    ``time`` is the Unix time of arrival. ``output_tokens`` sums the ``n`` choices. ``cached_tokens``, ``reason``,
    ``detail``, ``position`` and ``waited`` are the engine's CacheReport, absent where the prompt was never scheduled.
    ``ttft_s`` runs from arrival to the first token, ``prefill_s`` from the first scheduled chunk to it. ``salt`` is a
    digest of the cache salt. ``block_hashes`` are the engine's chained hashes of the prompt's full blocks, of each the
    first 8 bytes in hex: two prompts share as much as their lists do.
    """

    time: float
    id: str
    model: str
    prompt_tokens: int
    block_size: int
    output_tokens: int = 0
    n: int = 1
    route: str = ""
    cached_tokens: int = 0
    reason: str = ""
    detail: str = ""
    position: int = 0
    waited: bool = False
    queue_s: float = 0.0
    waited_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    finish: str = ""
    salt: str = ""
    block_hashes: list[str] = []
    body: dict[str, Any] | None = None


def salt_digest(salt: str | None) -> str:
    """What the log says of a cache salt: equal salts have equal digests, and the salt cannot be read from it."""
    return hashlib.sha256(b"anaphora cache salt\0" + salt.encode()).hexdigest()[:16] if salt else ""


def read(path: str | Path) -> Iterator[RequestRecord]:
    """The records of a log, in order. A line that is none raises ConfigError with the file, its number and why."""
    decoder = msgspec.json.Decoder(RequestRecord)
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise ConfigError(f"{path}, line {number} is no request record: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the log {path}: {error.strerror}") from None


def open_log(path: Path) -> io.FileIO:
    """Open a log to append to it. ConfigError where that cannot be."""
    try:
        return open(path, "ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"--record cannot write {path}: {error.strerror}") from None


class RecordWriter:
    """Appends records to a file in a thread of its own and never makes the caller wait.

    A full queue or a failed write (a full disk) drops records and counts them in ``dropped``; the first drop in a row
    is logged. Beyond ``rotate_bytes`` the file becomes ``FILE.1``, the former ``FILE.1`` ``FILE.2`` and so on, up to
    ``KEEP_FILES``. ``identity`` is the model's, the root of its block hashes.
    """

    def __init__(
        self, path: str | Path, identity: str, *, rotate_bytes: int = ROTATE_BYTES, queue_lines: int = QUEUE_LINES
    ) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._identity = identity
        self._rotate_bytes = rotate_bytes
        self._queue: queue.Queue[tuple[RequestRecord, Request] | None] = queue.Queue(queue_lines)
        self._encoder = msgspec.json.Encoder()
        self._failing = False
        self._file = open_log(self.path)
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord, request: Request) -> None:
        """Queue a record; the block hashes of ``request`` are added by the writer's thread."""
        try:
            self._queue.put_nowait((record, request))
        except queue.Full:
            self._drop("the writer is too slow")

    def close(self, timeout: float = 5.0) -> None:
        """Write what is queued, for at most ``timeout`` seconds, and close the file."""
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            self._drop("the writer is stuck")
        self._thread.join(timeout)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            record, request = item
            try:
                record.block_hashes = self._block_hashes(request, record.block_size)
                self._append(self._encoder.encode(record) + b"\n")
            except (ConfigError, OSError, TypeError, ValueError) as error:
                self._drop(str(error))
            else:
                self._failing = False
        self._file.close()

    def _block_hashes(self, request: Request, block_size: int) -> list[str]:
        hashes: list[BlockHash] = []
        root = root_hash(self._identity, request.cache_salt)
        extend_chain(hashes, root, pack(request.prompt_token_ids), block_size)
        return [block_hash[:8].hex() for block_hash in hashes]

    def _append(self, line: bytes) -> None:
        """One whole line or nothing: what a full disk cut off is taken back, so that the log stays readable."""
        size = os.fstat(self._file.fileno()).st_size
        if size and size + len(line) > self._rotate_bytes:
            self._rotate()
            size = 0
        written = self._file.write(line)
        if written != len(line):
            self._file.truncate(size)
            raise OSError(f"only {written} of {len(line)} bytes could be written")

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

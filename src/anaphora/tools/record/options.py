"""The flags of ``anaphora record``: one field each, as in ``anaphora.config``."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.config import option, parse_bytes, parse_server_url
from anaphora.errors import ConfigError
from anaphora.observe.record import ROTATE_BYTES


@dataclass(frozen=True)
class RecordOptions:
    upstream: str | None = option(None, "address of the server, such as http://HOST:8000", metavar="URL")
    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(8001, "port to listen on")
    out: str | None = option(None, "write a JSON line a request to this file (rotated)", metavar="FILE")
    record_prompts: bool = option(False, "write the request bodies too")
    ask_usage: bool = option(False, "add stream_options.include_usage to streamed requests that do not have it")
    rotate_bytes: int = option(
        ROTATE_BYTES, "size beyond which the file is rotated", parse=parse_bytes, metavar="SIZE", flag="--rotate-size"
    )

    def __post_init__(self) -> None:
        if self.upstream is None:
            raise ConfigError("name the server with --upstream http://HOST:8000")
        if self.out is None:
            raise ConfigError("name the log with --out FILE")
        if "@" in parse_server_url(self.upstream):
            raise ConfigError(f"--upstream {self.upstream} names a user: clients send their own keys, leave it out")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be 0 to 65535, got {self.port}")
        if self.rotate_bytes < 1:
            raise ConfigError(f"--rotate-size must be at least 1 byte, got {self.rotate_bytes}")

"""A running server as the doctor meets it: who it is, and its /metrics page read again and again for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from anaphora.config import parse_server_url
from anaphora.errors import ConfigError
from anaphora.tools.shared.metrics_page import Page, parse

TIMEOUT_S = 10
SCRAPES = 15
"""How often the page is read in a sample, for the figures that are of one moment; at most once a second."""

_HOW = (
    "vLLM and Anaphora have it unless logging of statistics is off (--disable-log-stats), SGLang with "
    "--enable-metrics, llama.cpp with --metrics"
)


@dataclass(slots=True)
class ScrapedServer:
    """What a server showed. ``details`` is SGLang's /server_info or llama.cpp's /props.

    ``pages`` are in the order in which they were read, over ``seconds``; ``broken`` says why the reading ended early.
    """

    url: str
    engine: str
    version: str | None
    details: dict[str, Any]
    pages: list[Page] = field(default_factory=list)
    seconds: float = 0.0
    broken: str = ""
    unreachable: bool = False


def observe(url: str, api_key: str | None, seconds: float, advance: Callable[[float], None]) -> ScrapedServer:
    """Read a server's pages for ``seconds``; ``advance`` gets the seconds done.

    Raises ConfigError where nothing answers or what answers is no server whose metrics are known. An interrupt
    (Ctrl-C) ends the sample early, and what was seen until then counts.
    """
    address = parse_server_url(url).removesuffix("/metrics")
    local = httpx.URL(address).host in ("127.0.0.1", "localhost", "::1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(
        base_url=address, timeout=TIMEOUT_S, headers=headers, follow_redirects=True, trust_env=not local
    ) as client:
        seen = _meet(client, address)
        _sample(client, seen, seconds, advance)
    return seen


def _meet(client: httpx.Client, url: str) -> ScrapedServer:
    page = _first_page(client, url)
    engine = page.engine()
    if engine is None:
        raise ConfigError(
            f"{url} has a /metrics page, but none of the names of vLLM, SGLang, llama.cpp or Anaphora on it: {_HOW}"
        )
    details: dict[str, Any] = {}
    if engine == "sglang":
        details = _json(client, "/server_info") or _json(client, "/get_server_info")
        version = details.get("version")
    elif engine == "llamacpp":
        details = _json(client, "/props")
        version = details.get("build_info")
    else:
        version = _json(client, "/version").get("version")
    return ScrapedServer(url, engine, version if isinstance(version, str) else None, details, [page])


def _first_page(client: httpx.Client, url: str) -> Page:
    try:
        response = client.get("/metrics")
    except httpx.HTTPError as error:
        raise ConfigError(f"no server answers at {url} ({_describe(error)}): start it, or check the URL") from None
    if response.status_code in (401, 403):
        raise ConfigError(f"{url} refuses the key (HTTP {response.status_code}): give the right --api-key")
    if not response.is_success:
        raise ConfigError(f"{url} serves no /metrics (HTTP {response.status_code}): {_HOW}")
    try:
        return parse(response.text)
    except ValueError as error:
        raise ConfigError(f"{url}/metrics is no page in Prometheus' text format ({error!s:.200}): {_HOW}") from None


def _sample(client: httpx.Client, seen: ScrapedServer, seconds: float, advance: Callable[[float], None]) -> None:
    begun = time.monotonic()
    pause = max(1.0, seconds / SCRAPES)
    try:
        while (left := begun + seconds - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            response = client.get("/metrics")
            if not response.is_success:
                seen.broken = f"it answered HTTP {response.status_code} to /metrics"
                return
            seen.pages.append(parse(response.text))
            seen.seconds = time.monotonic() - begun
            advance(seen.seconds)
    except httpx.HTTPError as error:
        seen.broken = f"it stopped answering ({_describe(error)})"
        seen.unreachable = True
    except ValueError as error:
        seen.broken = f"its page could not be read any more ({error!s:.200})"
    except KeyboardInterrupt:
        seen.broken = "you ended it"


def _json(client: httpx.Client, path: str) -> dict[str, Any]:
    """A JSON object that the server may or may not have."""
    try:
        response = client.get(path)
        value = msgspec.json.decode(response.content) if response.is_success else None
    except (httpx.HTTPError, msgspec.DecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

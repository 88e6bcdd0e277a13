"""Reads a running server's version and settings, and scrapes its /metrics page for a while."""

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
"""How often the page is read in a sample, for gauges; at most once a second."""

_HOW = (
    "vLLM and Anaphora have it unless logging of statistics is off (--disable-log-stats), SGLang with "
    "--enable-metrics, llama.cpp with --metrics"
)


@dataclass(slots=True)
class ScrapedServer:
    """What a server answered. ``details`` is SGLang's /server_info or llama.cpp's /props.

    ``pages`` are in the order in which they were read, over ``seconds``. ``broken`` says why the sample ended early.
    """

    url: str
    engine: str
    version: str | None
    details: dict[str, Any]
    pages: list[Page] = field(default_factory=list)
    seconds: float = 0.0
    broken: str = ""
    unreachable: bool = False


def scrape(url: str, api_key: str | None, seconds: float, progress: Callable[[float], None]) -> ScrapedServer:
    """Reads a server's pages for ``seconds``; ``progress`` is called with the seconds done.

    Raises ConfigError if nothing answers or the server's metrics are unknown. An interrupt (Ctrl-C) ends the sample
    early and keeps what was read.
    """
    address = parse_server_url(url).removesuffix("/metrics")
    local = httpx.URL(address).host in ("127.0.0.1", "localhost", "::1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(
        base_url=address, timeout=TIMEOUT_S, headers=headers, follow_redirects=True, trust_env=not local
    ) as client:
        server = _identify(client, address)
        _sample(client, server, seconds, progress)
    return server


def _identify(client: httpx.Client, url: str) -> ScrapedServer:
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
        raise ConfigError(f"{url}/metrics is not in Prometheus' text format ({error!s:.200}): {_HOW}") from None


def _sample(client: httpx.Client, server: ScrapedServer, seconds: float, progress: Callable[[float], None]) -> None:
    begun = time.monotonic()
    pause = max(1.0, seconds / SCRAPES)
    try:
        while (left := begun + seconds - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            response = client.get("/metrics")
            if not response.is_success:
                server.broken = f"it answered HTTP {response.status_code} to /metrics"
                return
            server.pages.append(parse(response.text))
            server.seconds = time.monotonic() - begun
            progress(server.seconds)
    except httpx.HTTPError as error:
        server.broken = f"it stopped answering ({_describe(error)})"
        server.unreachable = True
    except ValueError as error:
        server.broken = f"its page could not be read any more ({error!s:.200})"
    except KeyboardInterrupt:
        server.broken = "you ended it"


def _json(client: httpx.Client, path: str) -> dict[str, Any]:
    """Returns a JSON object of the server; an empty one if it does not serve it."""
    try:
        response = client.get(path)
        value = msgspec.json.decode(response.content) if response.is_success else None
    except (httpx.HTTPError, msgspec.DecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""Fails, and says what to check, when uvicorn is not a version that server/http was tested with.

server/http subclasses uvicorn.Server and HttpToolsProtocol, whose methods and attributes uvicorn does not document.
"""

from __future__ import annotations

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import uvicorn
from packaging.specifiers import SpecifierSet
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

OLDEST, NEWEST = "0.30.0", "0.54.0"
"""tests/server/http passed with these two, 0.34.0, 0.38.0, 0.42.0, 0.46.0 and 0.50.0."""

WHAT_TO_DO = (
    "server/http overrides private methods of uvicorn. Compare uvicorn/server.py (serve, main_loop, shutdown) and "
    "uvicorn/protocols/http/httptools_impl.py (HttpToolsProtocol, RequestResponseCycle) with those of "
    f"{NEWEST}, run tests/server/http with the new version (pip install --target FOLDER uvicorn==X; "
    "PYTHONPATH=FOLDER), then widen the bounds here and in pyproject.toml"
)


def test_the_bounds_are_what_was_tested(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    (bounds,) = (line for line in project["optional-dependencies"]["serve"] if line.startswith("uvicorn"))
    minor = int(NEWEST.split(".")[1])
    assert bounds == f"uvicorn>=0.{OLDEST.split('.')[1]},<0.{minor + 1}"


def test_the_installed_version_was_tested() -> None:
    minor = int(NEWEST.split(".")[1])
    assert version("uvicorn") in SpecifierSet(f">={OLDEST},<0.{minor + 1}"), WHAT_TO_DO


PARAMETERS = {
    uvicorn.Server.serve: ["self", "sockets"],
    uvicorn.Server.main_loop: ["self"],
    uvicorn.Server.shutdown: ["self", "sockets"],
    uvicorn.Server.capture_signals: ["self"],
    httptools_impl.HttpToolsProtocol.__init__: ["self", "config", "server_state", "app_state", "_loop"],
    httptools_impl.HttpToolsProtocol.connection_made: ["self", "transport"],
    httptools_impl.HttpToolsProtocol.connection_lost: ["self", "exc"],
    httptools_impl.HttpToolsProtocol.data_received: ["self", "data"],
    httptools_impl.HttpToolsProtocol.on_message_begin: ["self"],
    httptools_impl.HttpToolsProtocol.on_headers_complete: ["self"],
    httptools_impl.HttpToolsProtocol.on_body: ["self", "body"],
    httptools_impl.HttpToolsProtocol.on_message_complete: ["self"],
    httptools_impl.HttpToolsProtocol.send_400_response: ["self", "msg"],
    httptools_impl.HttpToolsProtocol.shutdown: ["self"],
    httptools_impl.HttpToolsProtocol._unset_keepalive_if_required: ["self"],
}


@pytest.mark.parametrize("method", PARAMETERS, ids=lambda method: method.__qualname__)
def test_a_method_that_is_overridden_or_called_is_as_it_was(method: object) -> None:
    assert callable(method)
    assert list(inspect.signature(method).parameters) == PARAMETERS[method], WHAT_TO_DO


ATTRIBUTES = {
    httptools_impl.HttpToolsProtocol: ("loop", "parser", "transport", "flow", "url", "headers", "cycle"),
    httptools_impl.RequestResponseCycle: (
        *("disconnected", "message_event", "more_body", "response_started", "response_complete"),
    ),
    FlowControl: ("read_paused",),
    ServerState: ("connections", "tasks"),
    uvicorn.Server: ("server_state", "servers"),
}


@pytest.mark.parametrize("cls", ATTRIBUTES, ids=lambda cls: cls.__name__)
def test_the_attributes_that_are_read_or_set_are_there(cls: type) -> None:
    """They are set on instances, so the source is searched."""
    source = inspect.getsource(cls)
    missing = [name for name in ATTRIBUTES[cls] if f"self.{name}" not in source]
    assert not missing, WHAT_TO_DO


def test_the_status_lines_are_as_they_were() -> None:
    assert httptools_impl.STATUS_LINE[408] == b"HTTP/1.1 408 Request Timeout\r\n", WHAT_TO_DO

"""Who may import whom: the architecture, checked in the source itself and in what really gets loaded.

The rules are a table of our own because import-linter (tried with 2.17) has no contract that closes a list: "imports
these packages and third-party modules, and no others". Its layers and forbidden contracts let through whatever nobody
thought of, and would need three times the lines.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
BASE = {"anaphora.errors", "anaphora.types", "anaphora.config"}

# What a module may import in addition to the standard library and its own package: the longest prefix of its name
# decides. A name stands for itself and everything below it.
MAY_IMPORT: dict[str, set[str]] = {
    "anaphora": {"anaphora.llm", "anaphora.types"},
    "anaphora.__main__": {"anaphora.cli"},
    "anaphora.errors": set(),
    "anaphora.types": {"anaphora.errors"},
    "anaphora.config": {"anaphora.errors"},
    "anaphora.text": BASE | {"tokenizers", "jinja2"},
    "anaphora.advice": BASE | {"anaphora.text"},
    "anaphora.cache": BASE,
    "anaphora.core": BASE | {"anaphora.cache"},
    "anaphora.remote": BASE | {"anaphora.core.engine", "msgspec", "zmq", "psutil"},
    "anaphora.kernels": {"anaphora.errors", "numpy", "numba", "llvmlite"},
    # It runs the kernels on torch's own threads.
    "anaphora.kernels.cpu.launch": {"numpy", "torch"},
    "anaphora.kernels.triton": {"anaphora.errors", "triton"},
    "anaphora.attention": BASE | {"anaphora.kernels", "torch", "transformers", "numpy"},
    "anaphora.checkpoint": BASE
    | {"anaphora.text"}
    | {"torch", "transformers", "safetensors", "gguf", "filelock", "huggingface_hub"},
    "anaphora.model": BASE
    | {"anaphora.attention", "anaphora.kernels", "anaphora.checkpoint", "anaphora.text"}
    | {"torch", "transformers", "safetensors", "accelerate", "numpy", "psutil"},
    "anaphora.observe": BASE | {"anaphora.cache.hashing", "msgspec", "prometheus_client"},
    "anaphora.llm": BASE | {"anaphora.core.engine", "anaphora.checkpoint", "anaphora.model", "anaphora.text", "rich"},
    "anaphora.server": BASE
    | {"anaphora.remote.client", "anaphora.text", "anaphora.observe", "anaphora.advice"}
    | {"starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client"},
    "anaphora.tools": BASE,
    "anaphora.tools.shared": BASE
    | {"anaphora.cache", "anaphora.core", "anaphora.text"}
    | {"httpx", "msgspec", "prometheus_client", "rich"},
    "anaphora.tools.bench": BASE
    | {"anaphora.llm", "anaphora.text", "anaphora.observe", "anaphora.tools.shared"}
    | {"httpx", "rich", "jinja2", "msgspec", "uvloop"},
    "anaphora.tools.demo": BASE | {"anaphora.tools.bench", "httpx", "rich"},
    "anaphora.tools.doctor": BASE
    | {"anaphora.cache", "anaphora.text", "anaphora.tools.shared"}
    | {"httpx", "rich", "jinja2", "msgspec"},
    "anaphora.tools.lint": BASE | {"anaphora.advice", "anaphora.text", "anaphora.tools.shared", "rich"},
    "anaphora.tools.record": BASE | {"anaphora.observe.record", "anaphora.tools.shared", "msgspec"},
    "anaphora.tools.plan": BASE | {"anaphora.cache", "anaphora.core", "anaphora.tools.shared", "rich"},
    "anaphora.cli": BASE | {"anaphora"},
}


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    for path in sorted((SOURCE / "anaphora").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, source: str) -> Iterator[str]:
    """Every module that ``source`` imports, wherever in it: in functions and for type checking too."""
    package = name if MODULES.get(name, Path()).name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                yield full if full in MODULES else origin


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def rule_for(name: str) -> set[str]:
    """The rule with the longest prefix of ``name``; a new part of the package needs one of its own."""
    prefixes = [prefix for prefix in MAY_IMPORT if within(name, prefix) and (prefix != "anaphora" or prefix == name)]
    assert prefixes, f"no rule in MAY_IMPORT says what {name} may import"
    return MAY_IMPORT[max(prefixes, key=len)]


def forbidden(name: str, source: str) -> list[str]:
    """The imports of ``source`` that the module called ``name`` may not have."""
    own = ".".join(name.split(".")[: 3 if within(name, "anaphora.tools") else 2])
    wrong = []
    for target in set(imports(name, source)):
        if target.partition(".")[0] in sys.stdlib_module_names or (own != "anaphora" and within(target, own)):
            continue
        if not any(within(target, allowed) for allowed in rule_for(name)):
            wrong.append(target)
    return sorted(wrong)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_only_what_its_place_allows(name: str) -> None:
    assert forbidden(name, MODULES[name].read_text("utf-8")) == []


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules that import each other in a circle, or that import one of these; empty if there is no circle."""
    left = dict(graph)
    while leaves := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in leaves:
            del left[name]
    return sorted(left)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports in functions and under TYPE_CHECKING count too."""
    graph = {name: set(imports(name, path.read_text("utf-8"))) - {name} for name, path in MODULES.items()}
    assert cycle(graph) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]


def siblings(importer: str, imported: str) -> tuple[str, str] | None:
    """The two modules or folders side by side where the names part; None where one name contains the other."""
    one, other = importer.split("."), imported.split(".")
    for depth, (left, right) in enumerate(zip(one, other, strict=False), 1):
        if left != right:
            return ".".join(one[:depth]), ".".join(other[:depth])
    return None


def test_no_folder_imports_itself_by_way_of_others() -> None:
    """At every level, the folders and modules side by side have an order."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        for target in set(imports(name, path.read_text("utf-8"))) & MODULES.keys():
            if pair := siblings(name, target):
                graph.setdefault(pair[0], set()).add(pair[1])
                graph.setdefault(pair[1], set())
    assert cycle(graph) == []
    assert siblings("anaphora.server.api.chat", "anaphora.server.http.asgi") == (
        "anaphora.server.api",
        "anaphora.server.http",
    )
    assert siblings("anaphora.server.app", "anaphora.server") is None


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("anaphora.cache.manager", "import torch", "torch"),
        ("anaphora.cache.manager", "def f():\n    from anaphora.core import scheduler", "anaphora.core.scheduler"),
        ("anaphora.core.scheduler", "import msgspec", "msgspec"),
        ("anaphora.core.scheduler", "from ..model import runner", "anaphora.model.runner"),
        ("anaphora.checkpoint.resolve", "from anaphora.core.scheduler import Scheduler", "anaphora.core.scheduler"),
        ("anaphora.observe.metrics", "from anaphora.cache.manager import CacheManager", "anaphora.cache.manager"),
        ("anaphora.server.api.protocol", "import torch.nn", "torch.nn"),
        ("anaphora.server.api.protocol", "from anaphora.tools import bench", "anaphora.tools.bench"),
        (
            "anaphora.tools.bench.load",
            "from anaphora.tools.doctor.read import token_store",
            "anaphora.tools.doctor.read.token_store",
        ),
        ("anaphora.tools.lint.command", "import anaphora.tools.doctor.options", "anaphora.tools.doctor.options"),
        ("anaphora.tools.doctor.command", "from anaphora.tools.lint import run", "anaphora.tools.lint"),
        ("anaphora.tools.bench.load", "from anaphora.cli import main", "anaphora.cli"),
        ("anaphora.types", "import anaphora.config", "anaphora.config"),
        ("anaphora.errors", "import anaphora", "anaphora"),
        ("anaphora", "import anaphora.cli", "anaphora.cli"),
    ],
)
def test_the_rules_catch(name: str, source: str, wrong: str) -> None:
    assert forbidden(name, source) == [wrong]


DOCTOR = "anaphora.tools.doctor"
DOCTOR_ROOMS = ("read", "find", "price", "show", "live")
"""The packages of the doctor, in the order in which a log passes through them."""


def later_rooms(name: str, source: str) -> list[str]:
    """Returns the imports with which a module of one of the doctor's packages reaches into a later one."""
    own = next((at for at, room in enumerate(DOCTOR_ROOMS) if within(name, f"{DOCTOR}.{room}")), len(DOCTOR_ROOMS))
    later = [f"{DOCTOR}.{room}" for room in DOCTOR_ROOMS[own + 1 :]]
    return sorted({target for target in imports(name, source) if any(within(target, room) for room in later)})


@pytest.mark.parametrize("name", [name for name in sorted(MODULES) if within(name, DOCTOR)])
def test_no_package_of_the_doctor_imports_a_later_one(name: str) -> None:
    assert later_rooms(name, MODULES[name].read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("find.patterns", "from anaphora.tools.doctor.price.rerun_log import Outcome", ["price.rerun_log"]),
        ("read.load_log", "from ..find import value_classes", ["find.value_classes"]),
        ("price.diagnose", "def f():\n    import anaphora.tools.doctor.live", ["live"]),
        ("show.fixed_log", "from anaphora.tools.doctor.read import load_log", []),
        ("command", "from anaphora.tools.doctor.live import next_steps", []),
    ],
)
def test_the_order_of_the_doctors_packages_catches(name: str, source: str, wrong: list[str]) -> None:
    assert later_rooms(f"{DOCTOR}.{name}", source) == [f"{DOCTOR}.{target}" for target in wrong]


SERVER_ORDER = ("http", "service", "api", "cache_api", "json_route")
"""Parts of the server; each imports only parts before it. The other files at the top of server/ import all of them."""


def later_in_server(name: str, source: str) -> list[str]:
    """Returns the imports with which a part of the server reaches into a later one."""
    server = "anaphora.server"
    own = next((at for at, part in enumerate(SERVER_ORDER) if within(name, f"{server}.{part}")), None)
    if own is None:
        return []
    earlier = [f"{server}.{part}" for part in SERVER_ORDER[: own + 1]]
    inside = {target for target in imports(name, source) if within(target, server)}
    return sorted(target for target in inside if not any(within(target, part) for part in earlier))


@pytest.mark.parametrize("name", [name for name in sorted(MODULES) if within(name, "anaphora.server")])
def test_the_parts_of_the_server_import_in_one_direction(name: str) -> None:
    assert later_in_server(name, MODULES[name].read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("http.asgi", "from anaphora.server.service import Service", ["service"]),
        ("service", "from anaphora.server.api import prompts", ["api.prompts"]),
        ("api.chat", "def f():\n    from anaphora.server.cache_api import warm_file", ["cache_api.warm_file"]),
        ("api.chat", "import anaphora.server.app", ["app"]),
        ("cache_api.explain_route", "from anaphora.server.api.prompt_run import PromptRun", []),
    ],
)
def test_the_order_of_the_servers_parts_catches(name: str, source: str, wrong: list[str]) -> None:
    assert later_in_server(f"anaphora.server.{name}", source) == [f"anaphora.server.{target}" for target in wrong]


def distributions(requirements: list[str]) -> set[str]:
    """Import names of the packages in a list of requirements."""
    names = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower().replace("-", "_") for line in requirements}
    return {"zmq" if name == "pyzmq" else name for name in names}


def third_party(prefix: str) -> set[str]:
    roots: set[str] = set()
    for name in MODULES:
        if within(name, prefix):
            roots |= {target.partition(".")[0] for target in imports(name, MODULES[name].read_text("utf-8"))}
    return roots - set(sys.stdlib_module_names) - {"anaphora"}


def test_the_base_install_is_enough_for_the_tools_and_what_they_stand_on() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    base = distributions(project["dependencies"]) | {"uvloop"}  # bench uses it where [serve] has installed it
    for package in ("tools", "advice", "cache", "core", "text", "observe", "cli", "errors", "types", "config"):
        assert third_party(f"anaphora.{package}") <= base, package


def test_every_third_party_import_is_declared() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    declared = distributions(project["dependencies"] + project["optional-dependencies"]["serve"])
    # Of torch and transformers, which do not work without them.
    declared |= {"numpy", "huggingface_hub", "triton"}
    assert third_party("anaphora") <= declared


def loaded_by(code: str) -> set[str]:
    """Top-level names of all modules that a fresh interpreter has loaded after ``code``."""
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return set(names)


HEAVY = {"torch", "transformers", "numpy", "starlette", "uvicorn"}


def test_cache_and_core_load_no_torch() -> None:
    names = [name for name in MODULES if within(name, "anaphora.cache") or within(name, "anaphora.core")]
    assert loaded_by("import " + ", ".join(names)) & HEAVY == set()


def test_the_tools_for_other_servers_load_nothing_of_our_own() -> None:
    commands = ("doctor.command", "lint.command", "record.command", "bench.client")
    code = "import " + ", ".join(f"anaphora.tools.{name}" for name in commands)
    assert loaded_by(code) & (HEAVY | {"zmq", "uvloop", "numba"}) == set()


def test_the_package_and_its_help_load_nothing_heavy() -> None:
    code = "import anaphora\nfrom anaphora.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    third = loaded_by(code) & (HEAVY | {"httpx", "rich", "jinja2", "msgspec", "tokenizers", "prometheus_client"})
    assert third == set()

"""docs/architecture.md names files, classes and functions: each exists, and what is "not yet" does not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
EXISTING, _, MISSING = PAGE.partition("## Not yet")
NAME = re.compile(r"`((?:[\w.-]+/)*[\w.-]+(?:\.(?:py|md)|/))(?::([\w.]+))?`")


def located(path: str) -> Path:
    """The file or folder that the page means: below the repository for tests, docs and benchmarks, else the package."""
    top = path.partition("/")[0]
    return ROOT / path if top in ("tests", "docs", "benchmarks") else ROOT / "src" / "anaphora" / path


def defines(path: Path, name: str) -> bool:
    """Whether the file defines ``name``: a class or function, or ``Class.method``."""
    body: list[ast.stmt] = ast.parse(path.read_text("utf-8")).body
    for part in name.split("."):
        found = [
            n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and n.name == part
        ]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.parametrize(("path", "name"), sorted(set(NAME.findall(EXISTING))))
def test_what_the_page_names_exists(path: str, name: str) -> None:
    if path in ("file.py", "options.py"):  # any file; each tool's file
        return
    assert located(path).exists(), f"docs/architecture.md names {path}, which does not exist"
    assert not name or defines(located(path), name), f"docs/architecture.md names {name}, which {path} does not define"


@pytest.mark.parametrize("path", sorted({path for path, _ in NAME.findall(MISSING)}))
def test_what_is_not_yet_does_not_exist(path: str) -> None:
    assert not located(path).exists(), f"{path} exists now: move it out of 'Not yet' in docs/architecture.md"


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 150


def test_a_missing_function_would_be_noticed() -> None:
    engine = ROOT / "src" / "anaphora" / "core" / "engine.py"
    assert defines(engine, "Engine.step")
    assert not defines(engine, "Engine.walk")

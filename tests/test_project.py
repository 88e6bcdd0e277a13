"""What installs the project: pins that fit the declared ranges, for everything that is declared."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_declared_package_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement


def test_the_pin_of_torch_names_no_build() -> None:
    # A local version such as +cpu or +cu130 would keep pip from the other builds; pip prefers +cpu where it finds it.
    assert pins()["torch"] == "2.13.0"


def test_no_install_file_names_a_registry() -> None:
    for name in ("constraints.txt", "pyproject.toml", "Makefile", ".ci/run", ".pre-commit-config.yaml"):
        text = (ROOT / name).read_text("utf-8")
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", text), name


def test_every_folder_of_the_package_is_installed() -> None:
    # setuptools leaves out a folder without __init__.py, and all that lies below it.
    package = ROOT / "src" / "anaphora"
    with_code = {folder for path in package.rglob("*.py") for folder in path.parents if folder.is_relative_to(package)}
    assert [folder for folder in sorted(with_code) if not (folder / "__init__.py").is_file()] == []

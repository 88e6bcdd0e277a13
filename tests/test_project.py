"""Files that install, build and describe the project agree with each other: pins, versions, workflow, pages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", ".github/PULL_REQUEST_TEMPLATE.md"]


def pins(name: str = "constraints.txt") -> dict[str, str]:
    """Version by package of a file of constraints."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pairs}


def declared(*extras: str) -> list[Requirement]:
    """The requirements of the base install and of these extras."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))


# --- Pins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-lowest.txt"])
def test_every_declared_package_is_pinned_within_its_range(name: str) -> None:
    for requirement in declared(*PROJECT["optional-dependencies"]):
        assert requirement.specifier.contains(pins(name)[canonicalize_name(requirement.name)]), requirement


def test_the_lowest_pins_are_the_lower_bounds() -> None:
    # [serve] may ask for a later version of a package than the base install, because transformers does.
    bounds: dict[str, Version] = {}
    for requirement in declared("serve"):
        lower = next(Version(clause.version) for clause in requirement.specifier if clause.operator == ">=")
        name = canonicalize_name(requirement.name)
        bounds[name] = max(lower, bounds.get(name, lower))
    lowest = {name: Version(version) for name, version in pins("constraints-lowest.txt").items()}
    assert {name: lowest[name] for name in bounds} == bounds


def test_the_pin_of_torch_names_no_build() -> None:
    # A local version such as +cpu or +cu130 would keep pip from the other builds; pip prefers +cpu where it finds it.
    assert pins()["torch"] == "2.13.0"


def test_no_install_file_names_a_registry() -> None:
    files = [
        *(ROOT / name for name in ("pyproject.toml", "Makefile", ".ci/run", ".pre-commit-config.yaml")),
        *ROOT.glob("constraints*.txt"),
        *(ROOT / ".github").rglob("*.yml"),
    ]
    for path in files:
        text = path.read_text("utf-8")
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", text), path.name


def test_every_folder_of_the_package_is_installed() -> None:
    # setuptools leaves out a folder without __init__.py, and all that lies below it.
    package = ROOT / "src" / "anaphora"
    with_code = {folder for path in package.rglob("*.py") for folder in path.parents if folder.is_relative_to(package)}
    assert [folder for folder in sorted(with_code) if not (folder / "__init__.py").is_file()] == []


# --- The workflow ----------------------------------------------------------------------------------------------------


def jobs() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]
    return found


def steps() -> Iterator[dict[str, Any]]:
    for job in jobs().values():
        yield from job["steps"]


def test_the_workflow_tests_the_python_versions_that_the_package_declares() -> None:
    prefix = "Programming Language :: Python :: "
    versions = [line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert jobs()["test"]["strategy"]["matrix"]["python"] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_the_workflow_runs_make_targets_that_exist() -> None:
    commands = [step["run"] for step in steps() if "run" in step]
    targets = [match[1] for command in commands if (match := re.match(r"make ([a-z]+)", command))]
    assert len(targets) == len(commands)
    assert set(targets) == {"lint", "types", "test", "coverage"}
    assert set(targets) <= make_targets()


def test_the_workflow_installs_the_lowest_and_the_newest_dependencies() -> None:
    rows = jobs()["dependencies"]["strategy"]["matrix"]["include"]
    found = {row["versions"]: row["constraints"] for row in rows}
    assert found == {"lowest": "constraints-lowest.txt", "newest": "/dev/null"}
    assert "CONSTRAINTS ?= constraints.txt" in (ROOT / "Makefile").read_text("utf-8")


def test_the_workflow_uses_only_githubs_own_actions_by_major_version() -> None:
    for step in steps():
        if "uses" in step:
            assert re.fullmatch(r"actions/(checkout|setup-python|cache)@v\d+", step["uses"])


# --- Pages and forms -------------------------------------------------------------------------------------------------


def test_the_changelog_describes_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, flags=re.MULTILINE)
    assert len(headings) == len(re.findall(r"^## ", text, flags=re.MULTILINE))
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == PROJECT["version"]
    assert [date for _, date in headings[1:]] == sorted((date for _, date in headings[1:]), reverse=True)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE)) <= kinds


def test_security_fixes_are_for_the_version() -> None:
    minor = PROJECT["version"].rpartition(".")[0]
    assert f"| {minor} | yes |" in (ROOT / "SECURITY.md").read_text("utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_pages_name_files_and_make_targets_that_exist(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (ROOT / target).is_file(), target
    for path in re.findall(r"\b(?:src|tests|benchmarks|docs)/[\w/.-]+\.(?:py|md|json)\b", text):
        assert (ROOT / path).is_file(), path
    assert set(re.findall(r"`make ([a-z]+)", text)) <= make_targets()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_issue_forms_have_what_github_requires(form: Path) -> None:
    found = yaml.safe_load(form.read_text("utf-8"))
    if form.name == "config.yml":
        assert found == {"blank_issues_enabled": True}
        return
    assert found.keys() >= {"name", "description", "body"}
    fields = [element for element in found["body"] if element["type"] != "markdown"]
    assert all(element["type"] in ("input", "textarea", "dropdown") for element in fields)
    assert all(element["attributes"]["label"] for element in fields)
    names = [element["id"] for element in fields]
    assert len(set(names)) == len(names)
    assert any(element.get("validations", {}).get("required") for element in fields)

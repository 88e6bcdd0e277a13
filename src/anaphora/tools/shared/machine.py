"""Machine, package versions and commit, to store with a figure."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("anaphora", "torch", "transformers", "httpx")


def machine() -> dict[str, Any]:
    """Returns processor, usable cores, memory and GPUs of this machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "gpus": gpus(),
    }


def gpus() -> list[str]:
    """Returns the names of the GPUs, from nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return []
    return _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()


def versions() -> dict[str, str]:
    """Returns the versions of Python and PACKAGES, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Returns the commit of this checkout, with "-dirty" if files were changed; None outside of a checkout."""
    here = str(Path(__file__).parent)
    found = _output(["git", "-C", here, "rev-parse", "HEAD"])
    return f"{found}-dirty" if found and _output(["git", "-C", here, "status", "--porcelain"]) else found or None


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

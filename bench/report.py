"""What every benchmark prints about where it ran, and how its numbers are formed."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def environment(**more: Any) -> dict[str, Any]:
    """Machine, versions and commit of this run."""
    return {
        "machine": f"{_cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        **more,
    }


def print_last_line(result: Mapping[str, Any]) -> None:
    """The one JSON line that ends a benchmark's output."""
    print(json.dumps(result), flush=True)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Short hash, with a plus if the tree has changes; "unknown" outside a checkout."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    described = subprocess.run(
        [git, "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"

"""Facts about a measurement, which are processor, versions and commit, and progress output."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.characterization.machine import read_processor_name

ROOT = Path(__file__).resolve().parent.parent


def machine(packages: tuple[str, ...]) -> dict[str, Any]:
    """Returns the facts to print with every figure. Skips packages that are not installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cpu": read_processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
    }


def describe_machine(facts: Mapping[str, Any]) -> str:
    """Formats the facts as one line."""
    versions = ", ".join(f"{package} {number}" for package, number in facts["versions"].items())
    return f"{facts['cpu']}, {facts['cores']} cores, load {facts['load']}; commit {facts['commit']}; {versions}"


def say(text: str) -> None:
    """Prints progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or ("unknown" if words[0] == "rev-parse" else "")

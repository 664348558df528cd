"""Facts about a measurement, which are processor, versions and commit, and progress output."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.study.measure.machine import read_processor_name

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


def as_table(
    kind: str, rows: Mapping[str, Mapping[str, Any]], figures: Mapping[str, Any], ending: str | None = None
) -> str:
    """Formats figures as a Markdown table, with a line of the summary figures, if any, and one of the machine.

    Args:
        kind: Heading of the first column.
        rows: Name of a row -> column -> number. All have the same columns.
        figures: All figures, `machine` among them.
        ending: How the names of summary figures end. None: there are none.
    """
    columns = list(next(iter(rows.values())))
    lines = [f"| {kind} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{one[key]:,}' for key in columns)} |" for name, one in rows.items()]
    if ending is not None:
        lines.append("\n" + ", ".join(f"{name} {value}" for name, value in figures.items() if name.endswith(ending)))
    lines.append("\n" + describe_machine(figures["machine"]))
    return "\n".join(lines)


def say(text: str) -> None:
    """Prints progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or ("unknown" if words[0] == "rev-parse" else "")

"""What all test processes of a session share. Each of pytest-xdist's processes has session fixtures of its own."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that all processes of this session share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """Lets the first process that needs something make it. Returns its folder, and what `make` returned, as JSON does.

    Args:
        make: Called with the new folder.
    """
    folder = session_folder(factory) / name
    done = folder.with_suffix(".json")
    with FileLock(folder.with_suffix(".lock")):
        if not done.exists():
            folder.mkdir()  # it exists if `make` failed in another process: then this one fails as well
            done.write_text(json.dumps(make(folder)))
        return folder, json.loads(done.read_text())

"""Code of loops on the disk is that of today's sources, those of the functions that a loop calls included."""

import subprocess
import sys
from pathlib import Path

import pytest

from storage.compiled import SOURCES, hash_loops

LOOP = """
from helper import add
from storage.compiled import compiled

@compiled
def run(value):
    return add(value)

print(run(5))
"""
HELPER = """
from storage.compiled import compiled

@compiled
def add(value):
    return value + {number}
"""


@pytest.mark.slow
def test_a_loop_is_compiled_anew_if_a_function_of_another_file_has_changed(tmp_path: Path) -> None:
    """Numba compares the file of the loop, which stays as it is."""
    (tmp_path / "loop.py").write_text(LOOP)
    root = Path(__file__).resolve().parents[2]
    start = "import sys, storage.compiled as c; sys.path.insert(0, {0!r}); c.SOURCES = sys.argv[1]; import loop"
    found = []
    for number in (1, 1, 2):
        (tmp_path / "helper.py").write_text(HELPER.format(number=number))
        command = [sys.executable, "-c", start.format(str(tmp_path)), f"{number}"]
        found.append(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip())
    assert found == ["6", "6", "7"]
    assert list(tmp_path.rglob("loop.run*.nbi"))


def test_the_version_of_loops_changes_with_any_file_that_has_some(tmp_path: Path) -> None:
    for name in ("pipeline/a/one.py", "storage/two.py", "pipeline/plain.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" if "plain" in name else "from storage.compiled import compiled\n")
    first = hash_loops(tmp_path)
    (tmp_path / "pipeline/plain.py").write_text("x = 2\n")
    assert hash_loops(tmp_path) == first
    (tmp_path / "pipeline/a/one.py").write_text("from storage.compiled import compiled, inlined\n")
    assert hash_loops(tmp_path) != first
    assert len(SOURCES) == 64

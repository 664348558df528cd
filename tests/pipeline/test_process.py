"""When a command of ours looks for garbage: once its modules are in, and not among them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAYS = "import atexit, gc; usual = gc.get_threshold(); atexit.register(lambda: print(gc.get_threshold() == usual, gc.get_freeze_count() > 0))"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (["-m", "pipeline.errors"], "False False"),
        (["-m", "pipeline.preprocessing.executors"], "True True"),
        (["-c", "from pipeline import lifetime; lifetime.modules_are_in()"], "True False"),
    ],
    ids=["as modules come", "in a worker", "in a program of others"],
)
def test_garbage_is_looked_for_when_the_modules_are_in(tmp_path: Path, how: list[str], said: str) -> None:
    """The worker ends at once, as nobody is at the other end."""
    (tmp_path / "sitecustomize.py").write_text(SAYS)
    ours, other = socket.socketpair()
    other.close()
    with ours:
        done = subprocess.run(
            [sys.executable, *how, str(ours.fileno()), str(os.getpid())], pass_fds=[ours.fileno()], cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr

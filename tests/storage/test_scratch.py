"""Temporary folders go with their process, however it ends, and never before."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

from storage.scratch import ScratchFolder

ROOT = Path(__file__).resolve().parents[2]
HOLDS = """
import os, pathlib, sys
from storage.scratch import ScratchFolder
folder = ScratchFolder("ingest-", pathlib.Path(sys.argv[1]))
pathlib.Path(folder.name, "spill").write_bytes(b"rows")
if sys.argv[2] == "fork" and os.fork():
    os.kill(os.getpid(), 9)
print(folder.name, flush=True)
sys.stdin.read()
"""


def start(place: Path, how: str = "") -> tuple["subprocess.Popen[str]", Path]:
    """Starts a process that makes a folder and holds it until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(place), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: "subprocess.Popen[str]") -> None:
    with process:
        process.communicate()


def test_a_folder_is_gone_after_use(tmp_path: Path) -> None:
    with ScratchFolder("ingest-", tmp_path / "tmp") as name:
        assert Path(name).parent == tmp_path / "tmp"
        Path(name, "spill").write_bytes(b"rows")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_folder_of_a_killed_process_goes_with_the_next_one(tmp_path: Path) -> None:
    killed, theirs = start(tmp_path)
    killed.send_signal(signal.SIGKILL)
    end(killed)
    assert (theirs / "spill").exists()
    with ScratchFolder("fit-", tmp_path):
        assert theirs.exists()  # another kind of folder
    with ScratchFolder("ingest-", tmp_path) as name:
        assert list(tmp_path.iterdir()) == [Path(name)]


def test_the_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    living, theirs = start(tmp_path)
    with ScratchFolder("ingest-", tmp_path) as name, ScratchFolder("ingest-", tmp_path) as other:
        assert {theirs, Path(name), Path(other)} == set(tmp_path.iterdir())
    assert (theirs / "spill").exists()
    end(living)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_forked_process_stays_while_that_lives(tmp_path: Path) -> None:
    killed, theirs = start(tmp_path, "fork")
    ScratchFolder("ingest-", tmp_path).cleanup()
    assert (theirs / "spill").exists()
    end(killed)
    ScratchFolder("ingest-", tmp_path).cleanup()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_the_place_holds_nobody_up(tmp_path: Path) -> None:
    """Any user of the machine may lock the system's temporary folder."""
    stranger = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(stranger, fcntl.LOCK_EX)
    process, theirs = start(tmp_path)
    assert theirs.parent == tmp_path
    os.close(stranger)
    end(process)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "ingest-notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ingest-link.own").symlink_to(tmp_path / "elsewhere")
    ScratchFolder("ingest-", tmp_path).cleanup()
    assert {path.name for path in tmp_path.iterdir()} == {"ingest-notes", "elsewhere", "ingest-link.own"}

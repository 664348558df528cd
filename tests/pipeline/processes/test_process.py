"""Our processes end with their parent, and importing the package changes nothing."""

import errno
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.processes.process import kill_process, process_start

ROOT = Path(__file__).resolve().parents[3]
CHILD = "import os, time; from pipeline.processes.process import die_with_parent; die_with_parent({parent}); print('alive', flush=True); time.sleep(60)"
PARENT = f"""
import os, subprocess, sys
child = {CHILD!r}.format(parent=os.getpid())
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
os._exit(0)
"""


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )


def test_a_child_dies_when_its_parent_ends() -> None:
    child = int(python(PARENT).stdout)
    limit = time.monotonic() + 20
    while _is_running(child):
        assert time.monotonic() < limit, "the child outlived its parent"
        time.sleep(0.05)


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not state.startswith("Z")


def test_a_child_that_starts_after_its_parent_ended_exits() -> None:
    done = python(CHILD.format(parent=2**22 + 1))
    assert (done.returncode, done.stdout) == (1, "")


def test_importing_the_package_leaves_the_garbage_collector_alone() -> None:
    program = "import gc; usual = gc.get_threshold(); import pipeline.processes.process; print(gc.get_threshold() == usual, gc.get_freeze_count())"
    assert python(program).stdout.split() == ["True", "0"]


def advises_huge_pages() -> bool:
    """Whether the kernel leaves the choice to programs, and glibc knows the setting."""
    path, (library, version) = Path("/sys/kernel/mm/transparent_hugepage/enabled"), platform.libc_ver()
    known = library == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
    return known and path.exists() and "[madvise]" in path.read_text()


@pytest.mark.skipif(not advises_huge_pages(), reason="the kernel or glibc does not take the advice")
@pytest.mark.parametrize("of_user", [None, "glibc.malloc.hugetlb=0"])
def test_processes_ask_for_huge_pages_unless_the_user_says_otherwise(of_user: str | None) -> None:
    program = (
        "import ctypes\n"
        "ctypes.CDLL(None).malloc(64 << 20)\n"
        "print(any(' hg' in line for line in open('/proc/self/smaps') if line.startswith('VmFlags')))"
    )
    settings = (
        "from pipeline.processes.process import LIBRARY_ENVIRONMENT; print(LIBRARY_ENVIRONMENT['GLIBC_TUNABLES'])"
    )
    given = {} if of_user is None else {"GLIBC_TUNABLES": of_user}
    tunables = python(settings, **given).stdout.strip()
    assert python(program, GLIBC_TUNABLES=tunables).stdout.strip() == str(of_user is None)


def test_memory_settings_of_the_user_stay() -> None:
    program = "from pipeline.processes.process import KEPT_MEMORY; print(*KEPT_MEMORY.values())"
    given = python(program, MALLOC_MMAP_THRESHOLD_="4096", MALLOC_TRIM_THRESHOLD_="8192").stdout
    assert given.split() == ["4096", "8192"]


@pytest.mark.parametrize("missing", [None, errno.ENOSYS, errno.EPERM])
def test_only_the_process_that_was_meant_is_killed(missing: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may have its id by now. Old kernels and sandboxes have no handles of processes."""

    def refuse(pid: int) -> int:
        assert missing is not None
        raise OSError(missing, os.strerror(missing))

    if missing is not None:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        began = process_start(child.pid)
        assert began is not None
        kill_process(child.pid, began - 1)
        child.stdin.write(b"it lives\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"it lives\n"  # one that was killed may take a while to end
        kill_process(child.pid, began)
        assert child.wait(20) == -9
    kill_process(child.pid, began)
    assert process_start(child.pid) is None

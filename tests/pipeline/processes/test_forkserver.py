"""Processes that a server forks: they run as programs do, and end with the process that asked for them."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.config import load
from pipeline.jobs.warm_up import start_fork_servers
from pipeline.processes import forkserver
from pipeline.processes.forkserver import ForkedProcess, prepare, start_process, stop_servers

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
Path("imported").open("a").write("x")
if __name__ == "__main__":
    what = sys.argv[1]
    print(what, flush=True)
    if "ANSWER" in os.environ:
        os.write(int(os.environ["ANSWER"]), json.dumps([dict(os.environ), os.getcwd(), __name__]).encode())
    if what == "raise":
        raise ValueError("no luck")
    elif what == "leave":
        sys.exit(3)
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "sleep":
        time.sleep(600)
    elif what == "fork":
        os.write(1, str(os.listdir("/proc/self/task")).encode())
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ForkedProcess]]:
    """(argument, more variables) -> a process of the program. Servers of other tests stay."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(argument: str, given: dict[str, int] | None = None, **more: str) -> ForkedProcess:
        with (tmp_path / "log").open("ab") as log:
            return start_process("program", "a program", [argument], os.environ | more, tmp_path, log, given)

    monkeypatch.setattr(forkserver, "_servers", [])
    yield start
    stop_servers()


def is_running(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE


def eventually(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come true in time"
        time.sleep(0.02)


@pytest.mark.parametrize(("what", "code"), [("end", 0), ("raise", 1), ("leave", 3), ("die", -signal.SIGKILL)])
def test_exit_codes_are_those_of_a_program(start: Callable[..., ForkedProcess], what: str, code: int) -> None:
    process = start(what)
    assert (process.wait(20), process.poll(), process.returncode) == (code, code, code)


def test_a_process_has_its_variables_descriptors_folder_and_log(
    start: Callable[..., ForkedProcess], tmp_path: Path
) -> None:
    for colour in ("red", "blue"):
        ours, theirs = os.pipe()
        process = start("raise", {"ANSWER": theirs}, COLOUR=colour)
        os.close(theirs)
        assert process.wait(20) == 1
        with os.fdopen(ours) as answer:
            text = answer.read()
        assert f'"COLOUR": "{colour}"' in text
        assert f'"{tmp_path}", "__main__"' in text
    assert (tmp_path / "log").read_text().splitlines()[-1] == "ValueError: no luck"


def test_the_module_is_imported_once_for_all_processes(start: Callable[..., ForkedProcess], tmp_path: Path) -> None:
    for number in range(3):
        assert start("end", NUMBER=str(number)).wait(20) == 0
    assert (tmp_path / "imported").read_text() == "x" + 3 * "x"  # by the server, and as the main module of each
    assert start("end", OMP_NUM_THREADS="7").wait(20) == 0  # read when libraries are loaded: another server
    assert (tmp_path / "imported").read_text() == "x" + 3 * "x" + "xx"


def test_signals_and_time_limits(start: Callable[..., ForkedProcess]) -> None:
    process = start("sleep")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert psutil.Process(process.pid).name() in ("a program", "python")  # the name comes a moment later
    process.terminate()
    assert process.wait(20) == -signal.SIGTERM
    process.kill()  # it has ended, and its number may belong to another process by now


def test_a_killed_server_takes_its_processes_along_and_is_replaced(start: Callable[..., ForkedProcess]) -> None:
    process = start("sleep")
    psutil.Process(process.pid).parent().kill()
    assert process.wait(20) == -signal.SIGKILL
    eventually(lambda: not is_running(process.pid))
    assert start("leave").wait(20) == 3


def test_an_interrupted_request_is_not_taken_for_the_next(
    start: Callable[..., ForkedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupt(BaseException):
        """What a scheduler raises in the middle of a call."""

    def send(*arguments: object) -> None:
        real(*arguments)
        raise Interrupt

    real = forkserver.socket.send_fds
    with monkeypatch.context() as patch:
        patch.setattr(forkserver.socket, "send_fds", send)
        with pytest.raises(Interrupt):
            start("sleep")
    assert start("leave").wait(20) == 3


def test_few_servers_are_kept(start: Callable[..., ForkedProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "MOST_SERVERS", 4)
    busy = start("sleep", OMP_NUM_THREADS="1")
    for threads in range(2, 9):
        assert start("end", OMP_NUM_THREADS=str(threads)).wait(20) == 0
    assert len(forkserver._servers) == 4
    assert busy.poll() is None


PARENT = """
import os, sys
from pathlib import Path
from pipeline.processes.forkserver import prepare, start_process
if sys.argv[1] == "prepare":
    prepare({"slow": dict(os.environ)}, Path.cwd())
else:
    start_process("slow", "slow", [], dict(os.environ), Path.cwd(), open("log", "wb"))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["prepare", "start"])
def test_nothing_outlives_the_parent(tmp_path: Path, when: str) -> None:
    """Also while the server imports the module."""
    sleep = "import time\n" + ("time.sleep(600)" if when == "prepare" else "if __name__ == '__main__': time.sleep(600)")
    (tmp_path / "slow.py").write_text(sleep)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, when], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == (1 if when == "prepare" else 2)
        parent.kill()
    assert psutil.wait_procs(family, timeout=20)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("module", ["pipeline.jobs.training.rank.main", "pipeline.preprocessing.executors"])
def test_imports_leave_no_thread_that_a_fork_would_lose(module: str) -> None:
    """But for two kinds that know forks: those of OpenBLAS, of which one core has none, and jemalloc's own."""
    program = f"""
import {module} as module
from pathlib import Path
module.preload()
print(*(thread.read_text().strip() for thread in Path("/proc/self/task").glob("*/comm")))
"""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | one, capture_output=True)
    assert {*done.stdout.split()} - {b"jemalloc_bg_thd"} == {b"python"}, done.stderr.decode()


def test_a_fork_runs_the_code_that_the_server_imported(tmp_path: Path, start: Callable[..., ForkedProcess]) -> None:
    assert start("first").wait(20) == 0
    (tmp_path / "program.py").write_text("raise ValueError('another program')")
    assert start("second").wait(20) == 0
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_preparing_twice_starts_one_server(tmp_path: Path, start: Callable[..., ForkedProcess]) -> None:
    for _ in range(2):
        prepare({"program": os.environ}, tmp_path)
    assert len(forkserver._servers) == 1


def test_modules_whose_libraries_load_alike_share_a_server(start: Callable[..., ForkedProcess], tmp_path: Path) -> None:
    (tmp_path / "another.py").write_text(PROGRAM.replace("imported", "another"))
    prepare({"program": os.environ, "another": os.environ, "third": os.environ | {"OMP_NUM_THREADS": "7"}}, tmp_path)
    assert [server.modules for server in forkserver._servers] == [{"program", "another"}, {"third"}]
    with (tmp_path / "log").open("ab") as log:
        assert start_process("another", "another", ["leave"], os.environ, tmp_path, log).wait(20) == 3
    assert ((tmp_path / "imported").read_text(), (tmp_path / "another").read_text()) == ("x", "xx")


def test_ranks_and_workers_of_one_thread_share_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(forkserver, "_servers", [])
    monkeypatch.setattr(forkserver, "_server", lambda modules, *rest: started.append(tuple(modules)))
    for threads in (1, 2):
        start_fork_servers(load(ROOT / "configs/smoke.yaml", {"training.threads_per_rank": threads}))
    config, rank, worker = "pipeline.config", "pipeline.jobs.training.rank.main", "pipeline.preprocessing.executors"
    assert started == [(config, rank, worker), (config, rank), (worker,)]


def test_what_a_process_leaves_to_do_at_its_end_is_done(start: Callable[..., ForkedProcess], tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import atexit, sys, threading, time\n"
        "if __name__ == '__main__':\n"
        "    atexit.register(print, 'at exit', end='')\n"
        "    threading.Thread(target=lambda: (time.sleep(0.1), print('thread, ', end=''))).start()\n"
        "    sys.exit('no luck')\n"
    )
    with (tmp_path / "log").open("wb") as log:
        assert start_process("late", "late", [], os.environ, tmp_path, log).wait(20) == 1
    assert (tmp_path / "log").read_text() == "no luck\nthread, at exit"


def test_a_process_is_waited_for_whatever_the_number_of_open_files():
    """`select` refuses descriptors above 1,023, which a command with many files or connections reaches."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2_000:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_000), hard))
    read_end, write_end = os.pipe()
    try:
        process = ForkedProcess(os.getpid(), fcntl.fcntl(read_end, fcntl.F_DUPFD_CLOEXEC, 1_500))
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.write(write_end, b"3")
        assert process.wait(60) == 3
    finally:
        os.close(read_end)
        os.close(write_end)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

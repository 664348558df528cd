"""How our processes start and end: with memory kept for reuse, and never outliving their parent."""

import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2]
"""Folder of the packages: a checkout of the project, or the folder that pip has installed them into."""
CHECKOUT = (PACKAGES / "pyproject.toml").exists()
ROOT = PACKAGES if CHECKOUT else Path.cwd()
"""Working directory of ranks and workers, where a relative `home` starts: the checkout. Without one, it is the folder
that the command was started in."""
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_MEMORY = {
    name: os.environ.get(name, str(size))
    for name, size in {"MALLOC_MMAP_THRESHOLD_": 256 << 20, "MALLOC_TRIM_THRESHOLD_": 1 << 30}.items()
}
"""Environment of processes that allocate and free the same memory repeatedly. Memory returned to the system must be
cleared when it is allocated again, which took a third of a transform and of a step with many rows. Pieces above
256 MiB, such as gradients of whole tables, are returned: small allocations in their place would make memory grow.
Values that the user has set stay."""

LIBRARY_ENVIRONMENT = {
    # Spins of a waiting OpenMP thread before it yields its core, some tenths of a millisecond. This is longer than the
    # gap between layers and shorter than the table kernel. With OpenMP's default of 300,000, that kernel's threads
    # would find no free core.
    "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "20000"),
    # malloc asks the kernel for huge pages, so that the processor finds the address of a random table row sooner. A
    # step of benchmarks/training.py took 13 % less. It needs glibc 2.35 and changes nothing elsewhere.
    "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
    **KEPT_MEMORY,
}
"""Variables that libraries read when a rank or a worker loads them."""
LOCAL_RAY = {"worker_niceness": 0, "prestart_worker_first_driver": False}
"""System settings of a Ray cluster that a training or a service starts for itself. At Ray's niceness, 15, a process
gets 3 % of a busy processor. The processes that Ray starts in advance lack our environment and are never used."""
PROMISED_BYTES = 1 << 30
"""What such a cluster may promise actors, of which ours ask for none. Without it Ray refuses to start where it finds
less free memory than its store may take."""
SEARCHES = (2_000, 20, 100)
"""Objects made until the collector searches the youngest, such searches until it takes those that outlived one, and
such searches until it takes all. Python's own are 700, 10 and 10."""


def limit_threads(threads: int) -> dict[str, str]:
    """Returns the variables of a rank or worker that has so many threads. One fork server starts all with the same."""
    count = dict.fromkeys(("OMP_NUM_THREADS", "ARROW_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return count | LIBRARY_ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}


@contextmanager
def loading() -> Iterator[None]:
    """Pauses the garbage collector while a process imports its modules, a quarter of whose time it would take.

    Modules never become garbage, so the collector does not search them afterwards either, and searches the rest less
    often: lists of files and notes of days stay, too, and a search of all of them takes a tenth of a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*SEARCHES)
        gc.enable()
        _keep_memory()


def _keep_memory() -> None:
    """Does to this process what KEPT_MEMORY does to those that it starts. glibc reads the variables at its start."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for parameter, name in zip((M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), KEPT_MEMORY, strict=True):
        if mallopt is not None and KEPT_MEMORY[name].isdecimal():
            mallopt(parameter, int(KEPT_MEMORY[name]))


class Importing:
    """Imports a module in a thread. `start` begins the import, and the end of the `with` block waits for it.

    Two threads that import PyTorch at the same time fail on parts of it, and a thread that still imports it while the
    process ends aborts the process.

    Args:
        module: Its name.

    Example:
        >>> with Importing("colorsys") as background:
        ...     background.start()
        >>> "colorsys" in sys.modules
        True
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.thread = threading.Thread(target=self._run, name="imports", daemon=True)

    def start(self) -> None:
        """Begins the import, if it has not begun."""
        if self.thread.ident is None:
            self.thread.start()

    def __enter__(self) -> "Importing":
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        with suppress(Exception):  # who needs the module imports it again, and gets the error
            importlib.import_module(self.module)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when the thread that started it ends, for whatever reason.

    Args:
        parent: Process id that the parent passed on.
        number: The signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # the parent ended before the request
        sys.exit(1)


def process_start(pid: int | str = "self") -> int | None:
    """Returns when a process began, in ticks since the machine started. With the id it names one process for ever.

    None: there is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return None


def kill_process(pid: int, began: int) -> None:
    """Kills a process. Does nothing if it is gone, also if another process has its id by now.

    Args:
        began: What `process_start` returned for it.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it is gone, or an old kernel or a sandbox has no handles
        handle = None
    try:
        if process_start(pid) != began:
            return
        if handle is None:
            os.kill(pid, signal.SIGKILL)
        else:  # it keeps naming that process
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        if handle is not None:
            os.close(handle)


def set_process_name(name: str) -> None:
    """Sets what `ps -o comm` and `top` show: the first 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)

"""How our processes start and end: with memory kept for reuse, and never outliving their parent."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
KEPT_MEMORY = {
    name: os.environ.get(name, str(size))
    for name, size in {"MALLOC_MMAP_THRESHOLD_": 256 << 20, "MALLOC_TRIM_THRESHOLD_": 1 << 30}.items()
}
"""Environment of processes that allocate and free the same memory repeatedly. Memory returned to the system must be
cleared when it is allocated again, which took a third of a transform and of a step with many rows. Pieces above
256 MiB, such as gradients of whole tables, are returned: small allocations in their place would make memory grow.
Values that the user has set stay."""

ONE_THREAD = {**dict.fromkeys(("OMP_NUM_THREADS", "ARROW_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"), **KEPT_MEMORY}
"""Environment of processes that share the cores by their number: one thread each."""


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

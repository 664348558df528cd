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


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends, for whatever reason.

    Args:
        parent: Process id that the parent passed on.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request
        sys.exit(1)


def set_process_name(name: str) -> None:
    """Sets what `ps -o comm` and `top` show: the first 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)

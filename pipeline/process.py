"""How processes of ours begin and end: soon, and not after the one that started them."""

import ctypes
import gc
import os
import signal
import sys

import pipeline

PR_SET_PDEATHSIG = 1
KEPT_MEMORY = {
    name: os.environ.get(name, str(size))
    for name, size in {"MALLOC_MMAP_THRESHOLD_": 256 << 20, "MALLOC_TRIM_THRESHOLD_": 1 << 30}.items()
}
"""Environment of processes that take and free the same memory again and again: what goes back to the system has to be
cleared when it is taken anew, a third of a transform and of a step of many rows. Larger pieces do go back, as gradients
of whole tables: small ones that lie in their place would make memory grow. A value of the user's own stays."""


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when the thread that started it ends, however that happens.

    Args:
        parent: Process id of the parent, as the parent wrote it down.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was made
        sys.exit(1)


def modules_are_in() -> None:
    """Begins to look for garbage, but never among the modules, if this process is a command of ours.

    None of them becomes garbage, and there are three thousand. Looking through them as they came and again at the end
    took a third of the start and end of a rank and of a flow's command.
    """
    if pipeline.IS_COMMAND:
        gc.freeze()
        gc.set_threshold(*pipeline.USUAL)

"""What a run consists of. A command imports its three thousand modules before it looks for garbage."""

import gc
import sys

IS_COMMAND = sys.argv[:1] == ["-m"]
"""Whether this process runs a module of ours as `python -m` does: so Python calls it while it looks for the module."""
USUAL = gc.get_threshold()

if IS_COMMAND:
    gc.set_threshold(100_000)

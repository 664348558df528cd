"""The command line and Prefect around the flows. Importing it makes Ctrl-C quiet, also during imports that follow."""

import os
import sys
from types import TracebackType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C or SIGTERM has ended."""


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ModuleNotFoundError) and "flows.runtime.cli" not in sys.modules:
        remedy = "Use .venv/bin/python, which `make setup` makes."
        print(
            f"error: {sys.executable}: expected the project's packages, got no '{error.name}'. {remedy}",
            file=sys.stderr,
        )
        return
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("error: interrupted; run the same command again to go on.", file=sys.stderr)
    print('{"status": "failed", "error": "interrupted; run the same command again to go on."}', flush=True)
    sys.stderr.flush()
    os._exit(INTERRUPTED)


sys.excepthook = _end_quietly

"""The first lines of a command. Prefect's server is on its way before configs, which need pydantic, are loaded.

This module imports only the standard library and modules of ours that do so, too.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from flows.runtime.dlrm import describe, say
from flows.runtime.environment import keep_private, set_environment
from flows.runtime.plain import probably_needs_server
from flows.runtime.server import start_loading


def command(
    name: str, read: Callable[..., Any] | None = None, without_config: Mapping[str, Any] | None = None
) -> NoReturn:
    """Runs `flows/NAME.py` with the words of the command line and ends the process.

    Args:
        name: The flow's file.
        read: Makes a config of a file and overrides. None: `pipeline.config.load`.
        without_config: What to read where no file is given; None: a file is required.
    """

    def main(words: Sequence[str]) -> int:
        process = None
        if probably_needs_server(name, words):
            process = start_loading()
            atexit.register(process.kill)
        from flows.runtime import cli

        return cli.main(name, words, read or cli.load, without_config, process)

    run_main(name, main)


def run_main(name: str, main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs the main function of `flows/NAME.py`, which returns the exit code, and ends the process."""
    set_environment()
    keep_private()
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        say(describe(name))
        sys.exit(0)
    codes: list[int] = []
    # Registered first, so it runs last. The teardown of the interpreter takes a second once PyTorch is loaded, and
    # DuckDB prints a page about leaks in it.
    atexit.register(lambda: os._exit(codes[0] if codes else 1))
    codes.append(main(words))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the servers takes a moment, and the result stands
    sys.exit(codes[0])

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
from flows.runtime.server import start_loading

PLAIN: dict[str, tuple[str, ...]] = {
    "checkpoint": ("list", "verify"),
    "features": ("list", "show", "propose", "history"),
    "layout": ("propose", "measure"),
    "promote": (),
    "report": (),
    "rollback": (),
}
"""Commands that run without Prefect unless a server is named, by their actions: they read, or move an alias."""


def command(
    name: str, read: Callable[..., Any] | None = None, without_config: Mapping[str, Any] | None = None
) -> NoReturn:
    """Runs `flows/NAME.py` with the words of the command line and ends the process.

    Args:
        name: The flow's file.
        read: Makes a config of a file and overrides. None: `pipeline.config.load`.
        without_config: What to read where no file is given; None: a file is required.
    """
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
    process = None
    if probably_needs_server(name, words):
        process = start_loading()
        atexit.register(process.kill)
    from flows.runtime import cli

    codes.append(cli.main(name, words, read or cli.load, without_config, process))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the servers takes a moment, and the result stands
    sys.exit(codes[0])


def probably_needs_server(name: str, words: Sequence[str]) -> bool:
    """Says whether a command will start a temporary server, as far as this is known before the config is read.

    Example:
        >>> probably_needs_server("rollback", ["a.yaml"]), probably_needs_server("train", [])
        (False, False)
    """
    return bool(words) and name not in PLAIN and not os.environ.get("PREFECT_API_URL")


def is_plain(name: str, parameters: Mapping[str, Any]) -> bool:
    """Says whether a command can do without Prefect.

    Example:
        >>> is_plain("features", {"action": "set"}), is_plain("features", {"name": "price"}), is_plain("train", {})
        (False, True, False)
    """
    actions = PLAIN.get(name)
    return actions is not None and (not actions or parameters.get("action", actions[0]) in actions)

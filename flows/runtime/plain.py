"""Which commands run without Prefect."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN: dict[str, tuple[str, ...]] = {
    "checkpoint": ("list", "verify"),
    "features": ("list", "show", "propose", "history"),
    "layout": ("propose", "measure"),
    "promote": (),
    "report": (),
    "rollback": (),
}
"""Commands that run without Prefect unless a server is named, by their actions: they read, or move an alias."""


def is_plain(name: str, parameters: Mapping[str, Any]) -> bool:
    """Says whether a command can do without Prefect.

    Example:
        >>> is_plain("features", {"action": "set"}), is_plain("features", {"name": "price"}), is_plain("train", {})
        (False, True, False)
    """
    actions = PLAIN.get(name)
    return actions is not None and (not actions or parameters.get("action", actions[0]) in actions)


def probably_needs_server(name: str, words: Sequence[str]) -> bool:
    """Says whether a command will start a temporary server, as far as this is known before the config is read.

    Example:
        >>> probably_needs_server("rollback", ["a.yaml"]), probably_needs_server("train", [])
        (False, False)
    """
    return bool(words) and name not in PLAIN and not os.environ.get("PREFECT_API_URL")

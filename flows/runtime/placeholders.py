"""Fills the placeholder CONFIG in the commands that errors, log lines and messages name: the path of the config.

`pipeline/` does not know the path and writes CONFIG. What a person reads has the path, so that it can be copied.
"""

import logging
import re
from pathlib import Path
from typing import Any

from pipeline.errors import ContractError

COMMAND = re.compile(r"\b(flows\.\w+|dlrm \w+) CONFIG\b(?!\.yaml)")
known: list[str] = []
"""The path of the config that this process was given last."""


def note_path(config: Any) -> None:
    """Notes the config of a command, if it is the path of a file."""
    if isinstance(config, str | Path):
        known[:] = [str(config)]


def given_path(otherwise: str) -> str:
    """Returns the path of the config that this process was given last.

    Args:
        otherwise: What to return if it was given none.
    """
    return known[0] if known else otherwise


def complete(text: str) -> str:
    """Puts the path of the config into the commands of a text.

    Example:
        >>> before = list(known)
        >>> note_path("configs/demo.yaml")
        >>> complete("Train one: python -m flows.train CONFIG force=true.")
        'Train one: python -m flows.train configs/demo.yaml force=true.'
        >>> known[:] = before
    """
    return COMMAND.sub(lambda found: f"{found[1]} {known[0]}", text) if known else text


def complete_error(error: ContractError) -> None:
    """Puts the path of the config into an error."""
    error.where, error.expected, error.actual, error.remedy = parts = [
        complete(part) for part in (error.where, error.expected, error.actual, error.remedy)
    ]
    error.args = tuple(parts)


def complete_logs(*names: str) -> None:
    """Puts the path of the config into all messages of these loggers."""
    for name in names:
        logging.getLogger(name).addFilter(_complete_record)


def _complete_record(record: logging.LogRecord) -> bool:
    if "CONFIG" in f"{record.msg} {record.args}":
        record.msg, record.args = complete(record.getMessage()), None
    return True

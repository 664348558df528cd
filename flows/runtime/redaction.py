"""Masks credentials of a config in parameters, logs and errors, to keep them out of Prefect's database and pages."""

import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

from pipeline.config import RunConfig
from pipeline.config.draft import Draft
from pipeline.config.validation_messages import PRIVATE

MASK = "********"
KEYS = re.compile(r"passw|pwd|secret|token|credential|key|sas\b|connection-string|authorization", re.IGNORECASE)
"""Names of catalog properties, or of parameters in an address, that hold a secret."""
USER = re.compile(r"(?://[^/@:]*:|https?://(?=[^/@:]+@))([^@]+)@")
"""A password, or a token without a user."""
QUERY = re.compile(r"[?&]([^=&]+)=([^&]+)")
SHORTEST = 3
"""Characters of the shortest credential that is hidden. Masks of shorter ones would hit parts of words."""
R = TypeVar("R")
known: set[str] = set()
"""Every credential of the configs that this process has opened."""


def mask(value: Any, path: tuple[str, ...] = ()) -> Any:
    """Replaces private values in a config, in overrides, or in values that contain them.

    Example:
        >>> mask({"config": {"warehouse": {"catalog": {"uri": "x"}}}, "overrides": {"warehouse.catalog.uri": "x"}})
        {'config': {'warehouse': {'catalog': {'uri': '********'}}}, 'overrides': {'warehouse.catalog.uri': '********'}}
    """
    if isinstance(value, Mapping):
        return {key: mask(item, (*path, *str(key).split("."))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask(item, path) for item in value]
    private = any(key in PRIVATE.get(section, ()) for section, key in itertools.pairwise(path))
    return MASK if private and value is not None else value


def remember(config: RunConfig | Draft) -> None:
    """Notes the credentials of a config, for `hide`."""
    address = config.registration.tracking_uri if isinstance(config, RunConfig) else None
    properties = config.warehouse.catalog.items()
    found = {value for name, value in properties if KEYS.search(name)}
    for text in (*(value for _, value in properties), address or "", os.environ.get("MLFLOW_TRACKING_URI", "")):
        found.update(_in_address(text))
    known.update(value for value in found if len(value) >= SHORTEST and value not in ("true", "false"))


def _in_address(text: str) -> Iterator[str]:
    """Yields the passwords in an address, both as written and decoded."""
    found = USER.findall(text)
    found += [value for name, value in QUERY.findall(text) if KEYS.search(name)]
    for secret in found:
        yield from (secret, unquote(secret))


def hide(text: str) -> str:
    """Replaces all known credentials in a text."""
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def hiding(function: Callable[..., R]) -> Callable[..., R]:
    """Wraps a function to raise errors without credentials."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            shown = str(error)
            if hide(shown) == shown:
                raise
            error.args = tuple(_hidden(error.args))
            for name, value in vars(error).items():
                if isinstance(value, str):
                    setattr(error, name, hide(value))
            if hide(str(error)) == str(error):
                raise
            raise RuntimeError(hide(f"{type(error).__name__}: {shown}")) from None

    return call


def _hidden(values: Iterable[Any]) -> Iterator[Any]:
    return (hide(value) if isinstance(value, str) else value for value in values)


def hide_in_logs(*names: str) -> None:
    """Hides credentials in all messages and tracebacks of these loggers."""
    for name in names:
        logging.getLogger(name).addFilter(_hide_in_record)


def _hide_in_record(record: logging.LogRecord) -> bool:
    if known:
        record.msg, record.args = hide(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = hide(record.exc_text)
    return True

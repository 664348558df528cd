"""All keys of a config by their dotted names, for completion and for the closest name to a misspelt one."""

import difflib
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Union, get_args, get_origin

from pydantic import BaseModel

from pipeline.config.run import RunConfig


def list_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of a config that hold a value, section by section.

    Example:
        >>> "training.epochs" in set(list_keys())
        True
    """
    for name, field in model.model_fields.items():
        union = get_origin(field.annotation) in (Union, UnionType)
        kinds = get_args(field.annotation) if union else (field.annotation,)
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if sections:
            for section in sections:
                yield from list_keys(section, f"{prefix}{name}.")
        else:
            yield prefix + name


def closest_key(word: str, parameters: Sequence[str]) -> str | None:
    """Returns what a word of the command line may have meant: a parameter, or a key with its section.

    Example:
        >>> closest_key("epoch", ["force"]), closest_key("forze", ["force"]), closest_key("xyzzy", [])
        ('training.epochs', 'force', None)
        >>> closest_key("sed", ["force"]), closest_key("hom", [])
        ('seed', 'home')
    """
    if close := difflib.get_close_matches(word, parameters, n=1):
        return close[0]
    if close := difflib.get_close_matches(word, [key for key in list_keys() if "." not in key], n=1, cutoff=0.75):
        return close[0]
    by_last = {key.rpartition(".")[2]: key for key in reversed(list(list_keys()))}
    close = difflib.get_close_matches(word, by_last, n=1, cutoff=0.88)
    return by_last[close[0]] if close else None

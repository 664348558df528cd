"""Validation errors of a config as one sentence that names the key and the remedy."""

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pipeline.errors import ConfigError

PRIVATE: dict[str, Any] = {"warehouse": {"catalog"}, "registration": {"tracking_uri"}}
"""Section -> keys that may hold passwords. No message shows their values."""
ELSEWHERE = {"characterize": "Only dlrm characterize and dlrm estimate read it. Give them this file, or leave it out."}
"""Section that only some commands read -> what to do about it in the config of another one."""


def explain(where: str, error: ValidationError, root: type[BaseModel]) -> ConfigError:
    """Returns the first problem as one sentence, with the number of further problems."""
    problems = [problem for problem in error.errors() if not (problem["type"] == "too_short" and problem["input"])]
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])  # often a typo
    key = ".".join(str(part) for part in first["loc"])
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1], root)
        given = str(first["loc"][-1])
        close = difflib.get_close_matches(given, known)
        alike = [name for name in close if _likeness(given, name) == _likeness(given, close[0])]
        shown = " or ".join(f"'{name}'" for name in alike)
        remedy = f"Did you mean {shown}?" if close else f"Known here: {', '.join(known)}." if known else "Remove it."
        remedy = ELSEWHERE.get(key, remedy)
        return ConfigError(f"{where}, key '{key}'", "a known key", f"'{first['loc'][-1]}'{more}", remedy)
    if first["type"] == "missing":
        return ConfigError(f"{where}, key '{key}'", "a value", f"none{more}", "Add the key.")
    if first["type"] == "union_tag_invalid":
        context = first.get("ctx", {})
        return ConfigError(
            f"{where}, key '{key}'",
            f"a kind among {context.get('expected_tags')}",
            f"'{context.get('tag')}'{more}",
            "Correct it.",
        )
    if first["type"] == "union_tag_not_found":
        return ConfigError(
            f"{where}, key '{key}'", "a mapping with a `kind`", f"{first['input']!r:.80}{more}", "Add it."
        )
    if first["type"] == "too_short":
        return ConfigError(f"{where}, key '{key}'", "at least one entry", f"none{more}", "Add one.")
    choices = [problem for problem in problems if _same_value(problem, first, root)]
    if len(choices) > 1:  # a value of several types is one problem for each of them
        key = ".".join(str(part) for part in first["loc"][:-1])
        more = f" ({len(problems) - len(choices)} more)" if len(problems) > len(choices) else ""
    words = [problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ") for problem in choices]
    given = "another value" if _is_private(first["loc"]) else f"{first['input']!r:.80}"
    return ConfigError(f"{where}, key '{key}'", " or ".join(words), f"{given}{more}", "Correct the value.")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()


def _is_private(path: tuple[int | str, ...]) -> bool:
    return len(path) > 1 and path[1] in PRIVATE.get(str(path[0]), ())


def _same_value(problem: Any, other: Any, root: type[BaseModel]) -> bool:
    """Whether two problems are about one value that may be of several types: each ends in the name of a type."""
    if problem is other:
        return True
    (*path, name), (*others, last) = problem["loc"], other["loc"]
    names = isinstance(name, str) and isinstance(last, str) and not {name, last} & set(_known_keys(tuple(path), root))
    return names and path == others and problem["input"] is other["input"]


def _known_keys(path: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """Keys of the section that a problem's path leads to; none where it leads elsewhere."""
    models: list[type[BaseModel]] = [root]
    for part in path:
        if isinstance(part, str):
            of_kind = [
                model for model in models if "kind" in model.model_fields and model.model_fields["kind"].default == part
            ]
            inner = [model.model_fields[part].annotation for model in models if part in model.model_fields]
            models = of_kind or [model for annotation in inner for model in _models_in(annotation)]
    return list(dict.fromkeys(key for model in models for key in model.model_fields))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]

"""Config files: YAML by the safe loader, `base` files below, `${NAME:-default}` replaced, dotted keys put on top."""

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError
from pipeline.processes.process import ROOT
from storage.objects import is_address


def home_path(home: str) -> Path:
    """The folder a run writes to: DLRM_HOME if set, else `home`, below ROOT unless absolute.

    Raises:
        ConfigError: If the path has # or ?, which cut off the addresses of files and databases below it, or is itself
            an address, or if there is no such folder and none can be made.
    """
    text = os.environ.get("DLRM_HOME") or home
    if is_address(text):
        raise ConfigError(
            "home", "a folder on a disk of this machine", f"'{text}'",
            "Choose a folder. Tables go to an object store by warehouse.catalog, and models by MLflow's artifact root.",
        )  # fmt: skip
    path = ROOT / Path(text).expanduser()
    if "#" in str(path) or "?" in str(path):
        raise ConfigError("home", "a path without # and ?", f"'{path}'", "Choose another folder.")
    place = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not place.is_dir() or (place != path and not os.access(place, os.W_OK)):
        problem = "in which this user may make folders" if place.is_dir() else "a folder"
        raise ConfigError(f"home '{path}'", problem, f"'{place}'", "Set DLRM_HOME, or home, to another folder.")
    return path


DOTTED = re.compile(
    r"characterize\.axes(\.[^.]+\.[^.]+)?|sweep\.(space|trial_overrides)|release\.(explore|fresh|candidates\.[^.]+)"
)
"""Sections whose keys are dotted keys themselves. In an override, all that follows is one of them."""
DATA_PATHS = re.compile(
    r"(sweep\.space\.|release\.(explore|fresh|candidates\.[^.]+)\.)?"
    r"(source(\.outcomes|\.lookups\.\d+)?|events\.[^.]+|features\.(joined|histories|windows)\.\d+)\.path(\.choices)?(\.\d+)?"
)
"""Dotted keys of data paths: paths, globs or lists of them."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
MERGE = "tag:yaml.org,2002:merge"
"""Tag of `<<`, which may stand several times."""
MOST_VALUES = 1_000_000
"""Values in a YAML text. A few lines of aliases may stand for billions."""
MOST_LEVELS = 100
"""Levels of lists and mappings inside each other."""


class _Loader(yaml.SafeLoader):
    """Loads YAML 1.2: only true and false are booleans, because `on` is a key of ours. 010 and 1:30 are text.

    A key that stands twice is refused: PyYAML takes the last one, and the first section is gone.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Reads a mapping as it is written. Later `<<` adds keys to it, which its own may repeat."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(f"key '{key.value}' twice, in lines {lines[key.value]} and {line}")
            lines[key.value] = line
        return node


_BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float"))
_PATTERNS = {
    _INT: re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+)$"),
    _FLOAT: re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, _PATTERNS.get(tag, pattern)) for tag, pattern in rules if tag != _BOOL or first in "tTfF"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str) -> Any:
    """A YAML text's value, by the safe loader.

    Raises:
        yaml.YAMLError: If the text is not YAML, or stands for more values than a config may have.
    """
    try:
        value = yaml.load(text, _Loader)
        if _count(value, {}, 0) > MOST_VALUES:
            raise yaml.YAMLError(f"aliases that stand for more than {MOST_VALUES:,} values")
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError(f"more than {MOST_LEVELS} levels of values inside values") from None
    except Exception as error:  # a tag with the wrong text raises almost any exception
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None
    return value


def _count(value: Any, known: dict[int, int], level: int) -> int:
    """Counts values. Those behind an alias count at each use."""
    if isinstance(value, str):
        value.encode()  # raises for half a surrogate pair
    if not isinstance(value, dict | list):
        return 1
    if level > MOST_LEVELS:
        raise RecursionError
    if id(value) in known:
        if not known[id(value)]:
            raise yaml.YAMLError("a value inside itself")
        return known[id(value)]
    known[id(value)] = 0  # while its content is counted
    content = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    known[id(value)] = 1 + sum(_count(one, known, level + 1) for one in content)
    return known[id(value)]


def read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A config file's content, over that of its `base` if it names one; `${NAME:-default}` is replaced.

    Relative data paths start at the folder of the file that they stand in, and those that begin with a variable's value
    at the current folder.
    """
    try:
        places = [path] if path.is_absolute() else [Path.cwd() / path, ROOT / path]
        full = next((place for place in places if place.exists()), places[-1])
        if full.resolve() in above:
            raise ConfigError(f"config '{path}'", "a `base` that ends somewhere", "a circle", "Remove one `base`.")
        if not full.is_file():  # a device may have no end
            raise OSError
        text = full.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"config '{path}'", "text in UTF-8", "other bytes", "Save the file as UTF-8.") from None
    except (OSError, ValueError):  # ValueError: a null character in the path
        got = "a folder" if os.path.isdir(path) else "none"
        raise ConfigError(
            f"config '{path}'", "a readable YAML file", got, "Correct the path; `dlrm examples` writes examples."
        ) from None
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config '{path}'", "valid YAML", _problem(error), "Mind indentation and colons.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config '{path}'", "a mapping of keys", type(values).__name__, "See configs/demo.yaml.")
    values = _change_texts(values, lambda key, text: _complete(key, text, full.parent))
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"config '{path}', key 'base'", "a file name", f"{base!r:.80}", "Correct the value.")
    return _merged(read_yaml(full.parent / base, (*above, full.resolve())), values)


def _problem(error: yaml.YAMLError) -> str:
    """Says what is wrong and where, without the line's text, which may hold a password."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return " ".join(str(error).split())


def start_paths(values: Any, folder: Path, key: str = "") -> Any:
    """Returns the values of a config with absolute data paths: relative ones start at the folder.

    Args:
        key: Dotted key of the values. Empty: they are a whole config.
    """
    return _change_texts(values, lambda place, text: _start_at(folder, place, text), key)


def _change_texts(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Returns the values with each text changed by a function of its dotted key and itself."""
    start = f"{key}." if key else ""
    if isinstance(value, dict):
        return {inner: _change_texts(item, change, f"{start}{inner}") for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_change_texts(item, change, f"{start}{i}") for i, item in enumerate(value)]
    return change(key, value) if isinstance(value, str) else value


def _complete(key: str, text: str, folder: Path) -> str:
    first = _VARIABLE.match(text)
    start = Path.cwd() if first is not None and first[1] in os.environ else folder
    return _start_at(start, key, _VARIABLE.sub(_variable, text))


def _start_at(folder: Path, key: str, text: str) -> str:
    """Returns a data path as an absolute one. Other texts, addresses and paths of home folders stay as they are."""
    if not DATA_PATHS.fullmatch(key) or not text or is_address(text) or text.startswith(("/", "~")):
        return text
    folder = folder.resolve()
    while text == ".." or text.startswith(("../", "./")):
        step, _, text = text.partition("/")
        folder = folder.parent if step == ".." else folder
    return f"{Path(glob.escape(str(folder)), text)}"


def _variable(match: re.Match[str]) -> str:
    value = os.environ.get(match[1], match[2])
    if value is None:
        raise ConfigError(f"${{{match[1]}}}", "an environment variable", "none of that name", f"Set {match[1]}.")
    return value


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def put(values: dict[str, Any], keys: list[str], value: Any, whole: str) -> dict[str, Any]:
    if DOTTED.fullmatch(whole[: -len(".".join(keys)) - 1]):
        keys = _join_keys(values, keys)
    if len(keys) == 1:
        return values | {keys[0]: value}
    inner = values.get(keys[0]) or {}
    if isinstance(inner, list):
        return values | {keys[0]: _put_into_list(inner, keys[1:], value, whole)}
    if not isinstance(inner, dict):
        raise ConfigError(f"override '{whole}'", f"a section '{keys[0]}'", type(inner).__name__, "Correct the key.")
    return values | {keys[0]: put(inner, keys[1:], value, whole)}


def _join_keys(values: dict[str, Any], keys: list[str]) -> list[str]:
    """Makes one key of those that are one there: a section that is there, such as an axis with a name, or all."""
    for count in range(len(keys) - 1, 0, -1):
        if isinstance(values.get(section := ".".join(keys[:count])), dict):
            return [section, *keys[count:]]
    return [".".join(keys)]


def _put_into_list(values: list[Any], keys: list[str], value: Any, whole: str) -> list[Any]:
    number = int(keys[0]) if keys[0].isdecimal() else len(values)
    if number >= len(values) or (len(keys) > 1 and not isinstance(values[number], dict)):
        expected = f"the number of a section, below {len(values)}"
        raise ConfigError(f"override '{whole}'", expected, f"'{keys[0]}'", "Correct the key.")
    entry = value if len(keys) == 1 else put(values[number], keys[1:], value, whole)
    return [*values[:number], entry, *values[number + 1 :]]

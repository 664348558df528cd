"""Tells whether all lines of a file of JSON are as its first ones, in a third of the time that DuckDB takes to look."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.data.formats.csv import BLOCK_BYTES
from storage.compiled import compiled, inlined

_KEY = re.compile(r"[A-Za-z0-9_. -]+")
"""Names of keys that JSON writes as they are."""
_WHOLE, _DECIMAL, _TRUTH, _TEXT, _LISTS = 0, 1, 2, 3, 4
_KINDS = {"BIGINT": _WHOLE, "DOUBLE": _DECIMAL, "BOOLEAN": _TRUTH, "VARCHAR": _TEXT}
_KINDS |= {f"{name}[]": kind + _LISTS for name, kind in _KINDS.items()}
"""DuckDB's type -> the values that have it."""
_WHOLE_DIGITS, _DECIMAL_DIGITS = 18, 15
"""Digits up to which each whole number is exact in 64 bits, and before the point of a double."""
_NULL, _TRUE, _FALSE = (np.frombuffer(word, np.uint8) for word in (b"null", b"true", b"false"))


def are_alike(plain: Path, types: Mapping[str, str]) -> bool:
    """Tells whether all lines are objects of these keys in this order, whose values have these types or are null.

    Keys may be missing. Then no line can change a type that the first ones have.

    Args:
        types: Key -> BIGINT, DOUBLE, BOOLEAN, VARCHAR, or a list of one of them. With others nothing is certain.
    """
    if not {*types.values()} <= {*_KINDS} or not all(map(_KEY.fullmatch, types)):
        return False
    words = [f'"{name}"'.encode() for name in types]
    keys, ends = np.frombuffer(b"".join(words), np.uint8), np.cumsum([0, *map(len, words)])
    kinds = np.array([_KINDS[name] for name in types.values()])
    rest = b""
    with plain.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            lines, end, rest = (rest + block).rpartition(b"\n")
            if not _are_alike(np.frombuffer(lines + end, np.uint8), keys, ends, kinds):
                return False
    return _are_alike(np.frombuffer(rest + b"\n", np.uint8), keys, ends, kinds)


# All loops stop at the end of a line, and text ends with one: nothing is read behind it. A place of -1 says no.


@inlined
def _skip(text: NDArray[np.uint8], at: int) -> int:
    """Returns the next place that is no blank."""
    while text[at] in (9, 13, 32):
        at += 1
    return at


@inlined
def _digits(text: NDArray[np.uint8], at: int) -> int:
    while 48 <= text[at] <= 57:
        at += 1
    return at


@inlined
def _word(text: NDArray[np.uint8], at: int, word: NDArray[np.uint8]) -> int:
    """Returns the place after a word."""
    for place in range(len(word)):
        if text[at + place] != word[place]:
            return -1
    return at + len(word)


@compiled
def _item(text: NDArray[np.uint8], at: int, kind: int) -> int:
    """Returns the place after a value that is no list."""
    first = text[at]
    if first == ord("n"):
        return _word(text, at, _NULL)
    if kind == _TRUTH:
        return _word(text, at, _TRUE if first == ord("t") else _FALSE)
    if kind == _TEXT:
        at += 1
        while first == ord('"') and text[at] >= 32 and text[at] != ord('"'):
            at += 2 if text[at] == ord("\\") and text[at + 1] >= 32 else 1
        return at + 1 if first == text[at] else -1
    begun = at + (first == ord("-"))
    at = _digits(text, begun)
    if at == begun or at - begun > (_WHOLE_DIGITS if kind == _WHOLE else _DECIMAL_DIGITS):
        return -1
    if kind == _DECIMAL and text[at] == ord("."):
        at = _digits(text, at + 1)
    if kind == _DECIMAL and text[at] in (ord("e"), ord("E")) and text[at + 1] == ord("-"):
        at = _digits(text, at + 2)
    return at


@compiled
def _value(text: NDArray[np.uint8], at: int, kind: int) -> int:
    """Returns the place after a value."""
    if kind < _LISTS or text[at] == ord("n"):
        return _item(text, at, kind % _LISTS)
    if text[at] != ord("["):
        return -1
    at = _skip(text, at + 1)
    while text[at] != ord("]"):
        at = _item(text, at, kind - _LISTS)
        if at < 0:
            return -1
        at = _skip(text, at)
        if text[at] == ord(","):
            at = _skip(text, at + 1)
        elif text[at] != ord("]"):
            return -1
    return at + 1


@compiled
def _object(
    text: NDArray[np.uint8], at: int, keys: NDArray[np.uint8], ends: NDArray[np.int64], kinds: NDArray[np.int64]
) -> int:
    """Returns the place after an object."""
    if text[at] != ord("{"):
        return -1
    at, key = _skip(text, at + 1), 0
    more = text[at] != ord("}")
    while more:
        after = -1
        while after < 0 and key < len(kinds):
            after = _word(text, at, keys[ends[key] : ends[key + 1]])
            key += 1
        if after < 0:
            return -1
        at = _skip(text, after)
        if text[at] != ord(":"):
            return -1
        after = _value(text, _skip(text, at + 1), kinds[key - 1])
        if after < 0:
            return -1
        at = _skip(text, after)
        more = text[at] == ord(",")
        if more:
            at = _skip(text, at + 1)
    return at + 1 if text[at] == ord("}") else -1


@compiled
def _are_alike(
    text: NDArray[np.uint8], keys: NDArray[np.uint8], ends: NDArray[np.int64], kinds: NDArray[np.int64]
) -> bool:
    at = 0
    while at < len(text):
        at = _skip(text, at)
        if text[at] != ord("\n"):
            after = _object(text, at, keys, ends, kinds)
            if after < 0:
                return False
            at = _skip(text, after)
            if text[at] != ord("\n"):
                return False
        at += 1
    return True

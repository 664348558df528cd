"""Loops that hash ids and strings, and loops over lists. They release the interpreter lock for reading threads."""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from storage.compiled import compiled, instruction

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def offsets_of(lengths: npt.NDArray[Any]) -> Ids:
    """Returns the offsets [N + 1] of lists of the given lengths [N].

    Example:
        >>> offsets_of(np.array([2, 0, 1])).tolist()
        [0, 2, 2, 3]
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@compiled
def fnv1a(text: npt.NDArray[np.uint8], starts: Ids) -> Ids:
    """Hashes each byte string text[starts[i]:starts[i + 1]] by 64-bit FNV-1a, with the authors' constants."""
    out = np.empty(len(starts) - 1, np.int64)
    for i in range(len(out)):
        state = np.uint64(0xCBF29CE484222325)
        for j in range(starts[i], starts[i + 1]):
            state = (state ^ np.uint64(text[j])) * np.uint64(0x100000001B3)
        out[i] = np.int64(state)
    return out


def fnv1a_text(text: str) -> int:
    """Returns the 64-bit FNV-1a hash of a string's UTF-8 bytes: its id in a column.

    Example:
        >>> fnv1a_text("a")
        -5808556873153909620
    """
    data = np.frombuffer(text.encode(), np.uint8)
    return int(fnv1a(data, np.array([0, len(data)]))[0])


@compiled
def take_lists(values: npt.NDArray[Any], offsets: Ids, rows: Ids) -> tuple[npt.NDArray[Any], Ids]:
    """Copies the lists of the given rows, in that order: (values, offsets)."""
    starts = np.empty(len(rows) + 1, np.int64)
    starts[0] = 0
    for i in range(len(rows)):
        starts[i + 1] = starts[i] + offsets[rows[i] + 1] - offsets[rows[i]]
    out = np.empty(starts[-1], values.dtype)
    for i in range(len(rows)):
        first = offsets[rows[i]]
        for j in range(starts[i + 1] - starts[i]):
            out[starts[i] + j] = values[first + j]
    return out, starts


@compiled
def mix(value: int) -> Any:
    """Mixes 64 bits one to one (Thomas Wang) into an unsigned integer."""
    key = np.uint64(value)
    key = ~key + (key << np.uint64(21))
    key ^= key >> np.uint64(24)
    key += (key << np.uint64(3)) + (key << np.uint64(8))
    key ^= key >> np.uint64(14)
    key += (key << np.uint64(2)) + (key << np.uint64(4))
    key ^= key >> np.uint64(28)
    key += key << np.uint64(31)
    return key


@compiled
def chain(upper: Any, lower: Any) -> Any:
    """Hashes 128 bits to 64, the last step of CityHash. Order matters: chain(a, b) is not chain(b, a)."""
    multiplier = np.uint64(0x9DDFEA08EB382D69)
    low = (lower ^ upper) * multiplier
    low ^= low >> np.uint64(47)
    high = (upper ^ low) * multiplier
    high ^= high >> np.uint64(47)
    return high * multiplier


@instruction
def multiply_high(_: Any, left: Any, right: Any) -> Any:
    """Returns the upper 64 bits of the product of two unsigned integers."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(one, wide) for one in arguments))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), code


@compiled
def sigrid_hash(values: Ids, salt: int, size: int) -> Ids:
    """Hashes ids into [0, size): the floored remainder of chain(salt, mix(id)).

    Bit-compatible with TorchArrow's sigrid_hash.
    """
    upper = np.uint64(salt)
    out = np.empty(len(values), np.int64)
    for i in range(len(values)):
        out[i] = np.int64(chain(upper, mix(values[i]))) % size  # floored, like Python's
    return out

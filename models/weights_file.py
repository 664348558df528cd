"""Writes files of weights in the format of safetensors, a part at a time: no tensor is whole in memory."""

import json
import math
from collections.abc import Mapping
from typing import Literal

Number = Literal["F32", "U8"]
"""Kinds of numbers, as the format names them."""
NUMBER_BYTES: Mapping[Number, int] = {"F32": 4, "U8": 1}
HEADER_MULTIPLE = 8
"""The header is filled up with spaces to a multiple of this."""


def header(tensors: Mapping[str, tuple[Number, tuple[int, ...]]]) -> bytes:
    """Returns the start of a file, up to its first number. The numbers of each tensor follow in the same order.

    Args:
        tensors: Name -> kind of its numbers, shape. Those with larger numbers first, which keeps all aligned.
    Source:
        https://github.com/huggingface/safetensors#format
    Example:
        >>> header({"a": ("F32", (2,))})[8:]
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    """
    entries, at = {}, 0
    for name, (kind, shape) in tensors.items():
        end = at + NUMBER_BYTES[kind] * math.prod(shape)
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_MULTIPLE)
    return len(text).to_bytes(8, "little") + text

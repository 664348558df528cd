"""Writes the weights of a sharded model to one file. One whole table at a time is in memory, and only on rank 0."""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.training.state.checkpoint import gather_whole

HEADER_MULTIPLE = 8
"""The header of a safetensors file is filled up with spaces to a multiple of this."""


def export_weights(tensors: dict[str, Any], path: Path | None, written: Callable[[], None]) -> str | None:
    """Writes whole tensors as float32 to a safetensors file. All ranks call it together; rank 0 writes.

    The tensors are written in the order of their names, as safetensors itself does.

    Args:
        tensors: Name -> tensor, whole on each rank or sharded over the ranks.
        path: None writes no file.
        written: Called after each tensor, on every rank.
    Returns:
        SHA-256 of the numbers, None on other ranks than the first.
    Source:
        https://github.com/huggingface/safetensors#format
    """
    ordered = dict(sorted(tensors.items()))
    digest, first = hashlib.sha256(), dist.get_rank() == 0
    with ExitStack() as stack:
        file = stack.enter_context(path.open("wb")) if path is not None and first else None
        if file is not None:
            file.write(_header({name: tuple(tensor.size()) for name, tensor in ordered.items()}))
        for _, whole in gather_whole(ordered):
            if whole is not None:
                numbers = whole.float().contiguous().numpy().data.cast("B") if whole.numel() else b""
                digest.update(numbers)
                if file is not None:
                    file.write(numbers)
                del numbers
            del whole  # before the next one is gathered
            written()
    return digest.hexdigest() if first else None


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Returns the start of a safetensors file, up to its first number.

    Example:
        >>> _header({"a": (2,)})[8:]
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    """
    entries, at = {}, 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_MULTIPLE)
    return len(text).to_bytes(8, "little") + text

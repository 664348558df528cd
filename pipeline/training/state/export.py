"""Writes the weights of a sharded model to one file. One whole table at a time is in memory, and only on rank 0."""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from models.weights_file import header
from pipeline.training.state.checkpoint import gather_whole


def export_weights(tensors: dict[str, Any], path: Path | None, written: Callable[[], None]) -> str | None:
    """Writes whole tensors as float32 to a safetensors file. All ranks call it together; rank 0 writes.

    The tensors are written in the order of their names, as safetensors itself does.

    Args:
        tensors: Name -> tensor, whole on each rank or sharded over the ranks.
        path: None writes no file.
        written: Called after each tensor, on every rank.
    Returns:
        SHA-256 of the numbers, None on other ranks than the first.
    """
    ordered = dict(sorted(tensors.items()))
    digest, first = hashlib.sha256(), dist.get_rank() == 0
    with ExitStack() as stack:
        file = stack.enter_context(path.open("wb")) if path is not None and first else None
        if file is not None:
            file.write(header({name: ("F32", tuple(tensor.size())) for name, tensor in ordered.items()}))
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

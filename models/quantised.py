"""Embedding tables of bytes, for scoring only. Shape letters: B rows, V ids, R rows of a table, E width."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from models.tables import TABLES, EmbeddingTable
from models.weights_file import Number, header

ROW_OVERHEAD_BYTES = 8
"""Bytes after a row's numbers: its scale and its least number, float32 each."""
PART_ROWS = 1 << 16
"""Rows of a table that are rounded at a time."""


class QuantisedBags(nn.Module):
    """Tables with one byte per number. Only the rows that it looks up become floats.

    A number is q * scale + least with q in [0, 255]. scale and least belong to the row and are float32, as PyTorch's
    kernel has them. TorchRec's quantised collection pads rows to 16 bytes and rounds worse: numbers of 1e-4 were off
    by 10 steps, not by half a step.

    Args:
        tables: Their rows are loaded from the file that `write_quantised` makes.
        width: E.
        device: `meta` if the rows are assigned later.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], width: int, device: str = "cpu") -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict({table.name: _Table(table, width, device) for table in tables})


class _Table(nn.Module):
    """Rows of one table: uint8 [R, E + 8]."""

    def __init__(self, table: EmbeddingTable, width: int, device: str) -> None:
        super().__init__()
        self.mean = table.pooling == "mean"
        size = (table.rows, width + ROW_OVERHEAD_BYTES)
        self.register_buffer("weight", torch.zeros(size, dtype=torch.uint8, device=device))

    def forward(
        self, ids_V: torch.Tensor, offsets: torch.Tensor, weights_V: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the sum or mean of each list, float32 [B, E]. The arguments are those of `IdLists`."""
        sums_BE: torch.Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self.weight, ids_V, offsets.to(ids_V.dtype), per_sample_weights=weights_V, include_last_offset=True
        )
        # The kernel has a `mode` argument but ignores it.
        return sums_BE / offsets.diff().clamp(min=1).unsqueeze(1) if self.mean else sums_BE


def write_quantised(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes a DLRM's weights to a safetensors file: tables rounded to bytes, all others as float32.

    The error of a number is at most half of (greatest - least) / 255 of its row. A few rows at a time are in memory.

    Args:
        weights: float32, tables [R, E]. Mapped ones are read once.
    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_quantised({TABLES + "user.weight": torch.tensor([[0.0, 1.0, 2.55]])}, Path(folder, "weights"))
        ...     load_file(Path(folder, "weights"))[TABLES + "user.weight"][0, :3].tolist()
        [0, 100, 255]
    """
    layers = {name: value for name, value in sorted(weights.items()) if not name.startswith(TABLES)}
    tables = {name: value for name, value in sorted(weights.items()) if name.startswith(TABLES)}
    entries: dict[str, tuple[Number, tuple[int, ...]]] = {
        **{name: ("F32", tuple(value.shape)) for name, value in layers.items()},
        **{name: ("U8", (len(value), value.shape[1] + ROW_OVERHEAD_BYTES)) for name, value in tables.items()},
    }
    with path.open("wb") as file:
        file.write(header(entries))
        for value in layers.values():
            file.write(value.contiguous().numpy().tobytes())
        for value in tables.values():
            for part in value.split(PART_ROWS):
                file.write(torch.ops.quantized.embedding_bag_byte_prepack(part).numpy().tobytes())

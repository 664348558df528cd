"""Embedding tables of bytes, for scoring alone. Shape letters: B rows, V ids, R rows of a table, E width."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

TABLES = "embeddings.embedding_bags."
"""Begin of the names that a DLRM's tables have among its weights."""
ROW_OVERHEAD_BYTES = 8
"""Bytes behind a row's numbers: its scale and its least number, float32 each."""


class QuantisedBags(nn.Module):
    """An EmbeddingBagCollection with a byte for each number; only the rows looked up become floats.

    A number is q * scale + least, q in [0, 255], (scale, least) of its own row, both float32 in PyTorch's kernel.
    TorchRec's quantised collection pads rows to 16 bytes; numbers of 1e-4 were off by 10 steps there, not by a half.

    Args:
        tables: Names, sizes and pooling; their rows come with the state dict, as `quantise_tables` makes them.
    Shapes:
        F bags of B rows -> float32 [B, F * E], features in the order of the bags. An empty bag is zeros.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict({table.name: _Table(table) for table in tables})
        self.table_of = {name: table.name for table in tables for name in table.feature_names}

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """The bags' vectors."""
        names = sparse.keys()
        pooled = []
        for name in names:
            bags = sparse[name]
            pooled.append(self.embedding_bags[self.table_of[name]](bags.values(), bags.lengths()))
        return KeyedTensor(names, [vectors_BE.shape[1] for vectors_BE in pooled], torch.cat(pooled, dim=1))


class _Table(nn.Module):
    """Rows of one table: uint8 [R, E + 8]."""

    def __init__(self, table: EmbeddingBagConfig) -> None:
        super().__init__()
        self.mean = table.pooling == PoolingType.MEAN
        size = (table.num_embeddings, table.embedding_dim + ROW_OVERHEAD_BYTES)
        self.register_buffer("weight", torch.zeros(size, dtype=torch.uint8))

    def forward(self, ids_V: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Sum or mean of each bag, float32 [B, E]."""
        starts = torch.zeros(len(lengths_B) + 1, dtype=ids_V.dtype)
        torch.cumsum(lengths_B, 0, out=starts[1:])
        sums_BE: torch.Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self.weight, ids_V, starts, include_last_offset=True
        )
        # The kernel takes a `mode` and passes it over.
        return sums_BE / lengths_B.clamp(min=1).unsqueeze(1) if self.mean else sums_BE


def quantise_tables(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A DLRM's weights with its tables rounded to bytes; all else stays as it is.

    A number is off by at most half of (greatest - least) / 255 of its row.

    Example:
        >>> table = torch.tensor([[0.0, 1.0, 2.55]])
        >>> quantise_tables({TABLES + "user.weight": table})[TABLES + "user.weight"][0, :3].tolist()
        [0, 100, 255]
    """
    pack = torch.ops.quantized.embedding_bag_byte_prepack
    return {name: pack(value.float()) if name.startswith(TABLES) else value for name, value in weights.items()}

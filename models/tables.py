"""The embedding tables of a model, as its features name them."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from models.config import SparseFeature

TABLES = "embeddings.embedding_bags."
"""Prefix of the tables among the weights of a model."""


class EmbeddingTable(NamedTuple):
    """A table. Features that name it share it."""

    name: str
    """Of its module."""
    rows: int
    pooling: Literal["sum", "mean"]
    features: tuple[str, ...]


def module_name(table: str) -> str:
    """Returns the name of a table's module. PyTorch reserves some names, such as `items` and `type`.

    Example:
        >>> module_name("user"), module_name("type")
        ('user', 'type_')
    """
    return f"{table}_" if hasattr(nn.ModuleDict(), table) else table


def tables_of(features: Sequence[SparseFeature]) -> list[EmbeddingTable]:
    """Returns the tables of the features, in order of first use.

    Raises:
        ValueError: If features of one table differ in size or pooling.
    """
    tables: dict[str, list[SparseFeature]] = {}
    for feature in features:
        tables.setdefault(feature.table, []).append(feature)
    for name, members in tables.items():
        if len({(member.rows, member.pooling) for member in members}) > 1:
            raise ValueError(f"table '{name}': its features {[m.name for m in members]} must agree in size and pooling")
    return [
        EmbeddingTable(
            module_name(name),
            members[0].rows,
            "sum" if members[0].weighted else members[0].pooling,
            tuple(member.name for member in members),
        )
        for name, members in tables.items()
    ]


class PlainBags(nn.Module):
    """Tables of float32 for scoring, as PyTorch has them. Their weights have the names of a DLRM's.

    Args:
        width: E.
        device: `meta` if the weights are assigned later.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], width: int, device: str = "cpu") -> None:
        super().__init__()
        # Without given weights PyTorch draws some. On `meta` it imports its compiler for this, which takes a second.
        self.embedding_bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag.from_pretrained(
                    torch.empty(table.rows, width, device=device), mode=table.pooling, include_last_offset=True
                )
                for table in tables
            }
        )

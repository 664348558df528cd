"""DLRM: dense numbers and lists of ids -> logits. Shape letters: B rows, D dense columns, F vectors, E width."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.config import DLRMConfig, SparseFeature
from models.layers import CatInteraction, CrossInteraction, DotInteraction, mlp


class IdLists(NamedTuple):
    """The lists of a feature. List i has the ids from offsets[i] to offsets[i + 1].

    Shapes:
        ids_V: int64 [V]. offsets: int64 [B + 1]. weights_V: float32 [V], None without weights.
    """

    ids_V: torch.Tensor
    offsets: torch.Tensor
    weights_V: torch.Tensor | None = None


class SharedFeatures(NamedTuple):
    """Deduplicated features (IKJT): each distinct list of ids is looked up once, for all rows that share it.

    Shapes:
        inverse_B: int64 [B], for each row the index of its list among the distinct lists of these features.
    """

    inverse_B: torch.Tensor
    features: tuple[int, ...]
    """Indices of the features, ascending."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "SharedFeatures":
        """Returns the same on another device."""
        return SharedFeatures(self.inverse_B.to(device, non_blocking=non_blocking), self.features)

    def expand(self, vectors_BFE: torch.Tensor) -> list[torch.Tensor]:
        """Expands the vectors of the distinct lists to all rows. Returns pieces of neighbouring features, in order.

        It uses `gather` and `split`: the gradients of `index_select` and of slices take several times as long on CPU.
        """
        alike = itertools.groupby(number in self.features for number in range(vectors_BFE.shape[1]))
        kinds = [(shared, len(list(members))) for shared, members in alike]
        pieces = vectors_BFE.split([count for _, count in kinds], dim=1)
        return [
            piece.gather(0, self.inverse_B[:, None, None].expand_as(piece)) if shared else piece
            for piece, (shared, _) in zip(pieces, kinds, strict=True)
        ]


class DLRM(nn.Module):
    """Deep learning recommendation model.

    Args:
        config: Sizes and interaction.
        num_dense: D. 0 omits the bottom MLP.
        features: Those that name one table share it.
        device: Device of the tables. `meta` if they are sharded later.
        table_type: Number format of the tables.
    Shapes:
        dense_BD float32 [B, D], sparse: lists of ids of F features and B rows (a shared feature has its distinct lists
        first, then empty ones) -> logits_B float32 [B].
    Source:
        Naumov et al. 2019, arXiv:1906.00091.
    """

    def __init__(
        self,
        config: DLRMConfig,
        num_dense: int,
        features: Sequence[SparseFeature],
        device: torch.device | str = "cpu",
        table_type: DataType = DataType.FP32,
    ) -> None:
        super().__init__()
        self.names = [feature.name for feature in features]
        self.table_of = {feature.name: module_name(feature.table) for feature in features}
        self.embeddings = EmbeddingBagCollection(
            tables=tables_of(config, features, table_type),
            is_weighted=any(feature.weighted for feature in features),
            device=torch.device(device),
        )
        width = config.embedding_width
        self.bottom = mlp(num_dense, [*config.bottom_mlp, width]) if num_dense else None
        num_features = len(features) + (1 if num_dense else 0)
        self.interaction: DotInteraction | CatInteraction | CrossInteraction
        if config.interaction == "dot":
            self.interaction = DotInteraction(num_features, width)
        elif config.interaction == "cat":
            self.interaction = CatInteraction(num_features, width)
        else:
            self.interaction = CrossInteraction(num_features, width, config.cross_layers, config.cross_rank)
        self.dropout = nn.Dropout(config.interaction_dropout) if config.interaction_dropout else nn.Identity()
        self.top = mlp(self.interaction.width_out, config.top_mlp, config.dropout)
        self.logit = nn.Linear(config.top_mlp[-1] if config.top_mlp else self.interaction.width_out, 1)

    def forward(
        self, dense_BD: torch.Tensor, sparse: KeyedJaggedTensor, shared: SharedFeatures | None = None
    ) -> torch.Tensor:
        """Returns the logits of the rows."""
        vectors_BFE = self.pool(sparse)
        return self.score(dense_BD, *([vectors_BFE] if shared is None else shared.expand(vectors_BFE)))

    def pool(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Looks up the tables: one vector for each list of ids, float32 [B, F, E]."""
        pooled = self.embeddings(sparse)
        if list(pooled.keys()) == self.names:
            return pooled.values().unflatten(1, (len(self.names), -1))
        by_name = pooled.to_dict()  # a sharded collection may have another order
        return torch.stack([by_name[name] for name in self.names], dim=1)

    def pool_lists(self, lists: Mapping[str, IdLists]) -> torch.Tensor:
        """Looks up some of the features in whole tables: the same vectors as `pool`, at half its cost for few rows.

        Shapes:
            lists: feature -> lists of B rows -> float32 [B, F, E], features in the order of lists.
        """
        bags = self.embeddings.embedding_bags
        return torch.stack([bags[self.table_of[name]](*one) for name, one in lists.items()], dim=1)

    def score(self, dense_BD: torch.Tensor, *pooled_BFE: torch.Tensor) -> torch.Tensor:
        """Returns the logits from the pooled vectors, in one piece or several: the model without its tables."""
        pieces = list(pooled_BFE)
        if self.bottom is not None:
            pieces.insert(0, self.bottom(dense_BD).unsqueeze(1))
        logits_B1: torch.Tensor = self.logit(self.top(self.dropout(self.interaction(*pieces))))
        return logits_B1.squeeze(1)


Labels = list[tuple[str, ...]]
"""Labels of the numbers along an axis of a weight: names of features and indices in their vectors."""


def axes_of(config: DLRMConfig, dense: Sequence[str], sparse: Sequence[str]) -> dict[str, tuple[Labels | None, ...]]:
    """Returns the labels of each axis of the weights that depend on the features. None: the axis does not.

    State transfer uses them to copy the weights of a model into one with other features: labels match by feature.

    Args:
        dense: Names of the dense columns. sparse: Names of the sparse features.
    Example:
        >>> axes_of(DLRMConfig(embedding_width=1, top_mlp=()), [], ["user", "item"])["logit.weight"]
        (None, [('user', '0'), ('item', 'user')])
    """
    names = ["(dense)", *sparse] if dense else list(sparse)
    width = range(config.embedding_width)
    inputs: Labels = [(name, str(i)) for name in names for i in width]
    if config.interaction == "dot":
        pairs = [tuple(sorted((a, b))) for i, a in enumerate(names) for b in names[i + 1 :]]
        inputs = [*inputs[: config.embedding_width], *pairs]
    axes: dict[str, tuple[Labels | None, ...]] = {}
    axes["top.0.weight" if config.top_mlp else "logit.weight"] = (None, inputs)
    if dense:
        axes["bottom.0.weight"] = (None, [(name,) for name in dense])
    if config.interaction == "dcn":
        low_rank = config.cross_rank is not None
        for layer in range(config.cross_layers):
            axes[f"interaction.cross.bias.{layer}"] = (inputs,) if low_rank else (inputs, None)
            axes[f"interaction.cross.kernels.{layer}"] = (inputs, inputs)
            axes[f"interaction.cross.W_kernels.{layer}"] = (inputs, None)
            axes[f"interaction.cross.V_kernels.{layer}"] = (None, inputs)
    return axes


def module_name(table: str) -> str:
    """Returns the name of a table's module. PyTorch reserves some names, such as `items` and `type`.

    Example:
        >>> module_name("user"), module_name("type")
        ('user', 'type_')
    """
    return f"{table}_" if hasattr(nn.ModuleDict(), table) else table


def tables_of(
    config: DLRMConfig, features: Sequence[SparseFeature], table_type: DataType = DataType.FP32
) -> list[EmbeddingBagConfig]:
    """Returns the embedding tables of the features, in order of first use.

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
        EmbeddingBagConfig(
            name=module_name(name),
            num_embeddings=members[0].rows,
            embedding_dim=config.embedding_width,
            data_type=table_type,
            feature_names=[member.name for member in members],
            pooling=PoolingType.SUM if members[0].pooling == "sum" or members[0].weighted else PoolingType.MEAN,
        )
        for name, members in tables.items()
    ]

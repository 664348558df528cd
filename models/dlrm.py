"""DLRM: dense numbers and lists of ids -> logits. Shape letters: B rows, D dense columns, F vectors, E width."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.config import DLRMConfig, SparseFeature
from models.plain import PlainDLRM
from models.tables import tables_of


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


class DLRM(PlainDLRM):
    """Deep learning recommendation model, with TorchRec's tables: whole ones, or sharded ones in their place.

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

    embeddings: EmbeddingBagCollection

    def __init__(
        self,
        config: DLRMConfig,
        num_dense: int,
        features: Sequence[SparseFeature],
        device: torch.device | str = "cpu",
        table_type: DataType = DataType.FP32,
    ) -> None:
        tables = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=config.embedding_width,
                data_type=table_type,
                feature_names=[*table.features],
                pooling=PoolingType.SUM if table.pooling == "sum" else PoolingType.MEAN,
            )
            for table in tables_of(features)
        ]
        weighted = any(feature.weighted for feature in features)
        collection = EmbeddingBagCollection(tables=tables, is_weighted=weighted, device=torch.device(device))
        super().__init__(config, num_dense, features, collection)

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

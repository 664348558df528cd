"""DLRM without TorchRec, which takes seconds to import: all that scoring needs.

Shape letters: B rows, D dense columns, F vectors, E width.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

from models.config import DLRMConfig, SparseFeature
from models.layers import CatInteraction, CrossInteraction, DotInteraction, mlp
from models.tables import module_name


class IdLists(NamedTuple):
    """The lists of a feature. List i has the ids from offsets[i] to offsets[i + 1].

    Shapes:
        ids_V: int64 [V]. offsets: int64 [B + 1]. weights_V: float32 [V], None without weights.
    """

    ids_V: torch.Tensor
    offsets: torch.Tensor
    weights_V: torch.Tensor | None = None


class PlainDLRM(nn.Module):
    """The layers of a DLRM over tables that it is given.

    Args:
        config: Sizes and interaction.
        num_dense: D. 0 omits the bottom MLP.
        features: Those that name one table share it.
        embeddings: Has the tables as modules in `embedding_bags`.
    Source:
        Naumov et al. 2019, arXiv:1906.00091.
    """

    embeddings: nn.Module
    interaction: DotInteraction | CatInteraction | CrossInteraction

    def __init__(
        self, config: DLRMConfig, num_dense: int, features: Sequence[SparseFeature], embeddings: nn.Module
    ) -> None:
        super().__init__()
        self.names = [feature.name for feature in features]
        self.table_of = {feature.name: module_name(feature.table) for feature in features}
        self.embeddings = embeddings
        width = config.embedding_width
        self.bottom = mlp(num_dense, [*config.bottom_mlp, width]) if num_dense else None
        num_features = len(features) + (1 if num_dense else 0)
        if config.interaction == "dot":
            self.interaction = DotInteraction(num_features, width)
        elif config.interaction == "cat":
            self.interaction = CatInteraction(num_features, width)
        else:
            self.interaction = CrossInteraction(num_features, width, config.cross_layers, config.cross_rank)
        self.dropout = nn.Dropout(config.interaction_dropout) if config.interaction_dropout else nn.Identity()
        self.top = mlp(self.interaction.width_out, config.top_mlp, config.dropout)
        self.logit = nn.Linear(config.top_mlp[-1] if config.top_mlp else self.interaction.width_out, 1)

    def pool_lists(self, lists: Mapping[str, IdLists]) -> torch.Tensor:
        """Looks up some of the features in whole tables: the same vectors as `pool`, at half its cost for few rows.

        Shapes:
            lists: feature -> lists of B rows -> float32 [B, F, E], features in the order of lists.
        """
        bags = cast("nn.ModuleDict", self.embeddings.embedding_bags)
        return torch.stack([bags[self.table_of[name]](*one) for name, one in lists.items()], dim=1)

    def score(self, dense_BD: torch.Tensor, *pooled_BFE: torch.Tensor) -> torch.Tensor:
        """Returns the logits from the pooled vectors, in one piece or several: the model without its tables."""
        pieces = list(pooled_BFE)
        if self.bottom is not None:
            pieces.insert(0, self.bottom(dense_BD).unsqueeze(1))
        logits_B1: torch.Tensor = self.logit(self.top(self.dropout(self.interaction(*pieces))))
        return logits_B1.squeeze(1)

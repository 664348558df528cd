"""The shape of a model: DLRMConfig and its sparse features."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class SparseFeature:
    """A list of ids per row and the embedding table that looks them up: the rows of one list become one vector."""

    name: str
    table: str
    """Features that name the same table share its rows."""
    rows: int
    """Size of the table: ids are in [0, rows)."""
    pooling: Literal["sum", "mean"]
    """How the vectors of a list become one."""
    weighted: bool = False
    """Whether each id comes with a weight, by which its vector is multiplied before the vectors are summed. TorchRec
    cannot combine weights and means: where one feature has weights, a mean is a sum with weights of 1 / n."""


class DLRMConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A deep learning recommendation model (Naumov et al. 2019, arXiv:1906.00091)."""

    embedding_width: PositiveInt = 16
    """E: length of every embedding vector and of the output of the bottom MLP."""
    bottom_mlp: tuple[PositiveInt, ...] = (64,)
    """Hidden layers between the dense columns and their vector."""
    top_mlp: tuple[PositiveInt, ...] = (64, 32)
    """Hidden layers between the interaction and the logit."""
    interaction: Literal["dot", "cat", "dcn"] = "dot"
    """dot: the dense columns' vector and the products of all pairs of vectors. Without dense columns it passes on the
    vector of the first sparse feature, so their order counts. cat: the concatenated vectors. dcn: cross layers over
    them (DCN-v2)."""
    cross_layers: PositiveInt = 2
    """Cross layers of dcn."""
    cross_rank: PositiveInt | None = None
    """Rank of the cross layers' matrices. None: full rank."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the top MLP's hidden units to drop in training."""
    interaction_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the interaction's outputs to drop in training."""
    embedding_init: PositiveFloat | None = None
    """Embeddings start uniform in [-x, x]. None: x = 1 / sqrt(rows of the table)."""

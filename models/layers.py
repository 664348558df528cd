"""MLP and interactions. Shape letters: B rows, F feature vectors of a row (dense first), E width, P pairs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def mlp(inputs: int, sizes: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Returns linear layers, each followed by ReLU: float32 [B, inputs] -> [B, sizes[-1]].

    Example:
        >>> mlp(3, [8, 4])(torch.ones(2, 3)).shape
        torch.Size([2, 4])
    """
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        if dropout > 0.0:
            layers.append(nn.Dropout(dropout))
        inputs = size
    return nn.Sequential(*layers)


def join_vectors(pieces_BFE: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins vectors of neighbouring features, [B, F_i, E] each, in the number type of the first."""
    first, *others = pieces_BFE
    return torch.cat([first, *(piece.to(first.dtype) for piece in others)], dim=1) if others else first


class DotInteraction(nn.Module):
    """The first vector, followed by the dot product of every pair of feature vectors.

    The first vector is that of the dense columns. Without dense columns it is that of the first sparse feature, so the
    model then depends on which feature the config names first.

    Args:
        num_features: F, vectors per row, the dense one included.
        width: E.
    Shapes:
        Vectors in one piece or several, float32 [B, F_i, E], which add up to F -> float32 [B, E + P],
        P = F * (F - 1) / 2.
    Raises:
        ValueError: If num_features is below 2, which makes no pair.
    Source:
        Naumov et al. 2019, arXiv:1906.00091, section 2. Without self-pairs.
    Example:
        >>> DotInteraction(3, 4)(torch.ones(2, 3, 4)).shape
        torch.Size([2, 7])
    """

    pair_P: torch.Tensor
    both: torch.Tensor

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        if num_features < 2:
            raise ValueError(f"a dot interaction needs at least 2 vectors, got {num_features}")
        self.width_out = width + num_features * (num_features - 1) // 2
        rows, columns = torch.triu_indices(num_features, num_features, offset=1)
        pairs = len(rows)
        self.register_buffer("pair_P", rows * num_features + columns, persistent=False)
        both_FF = torch.full((num_features, num_features), pairs)  # the diagonal: no pair
        both_FF[rows, columns] = both_FF[columns, rows] = torch.arange(pairs)
        self.register_buffer("both", both_FF.flatten(), persistent=False)

    def forward(self, *pieces_BFE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        out: torch.Tensor = _PairDots.apply(join_vectors(pieces_BFE), self.pair_P, self.both)
        return out


class _PairDots(torch.autograd.Function):
    """The first vector, followed by the products of all pairs.

    Plain autograd would multiply once for each of the two factors and sum the results. It would also pad the gradient
    of the first vector with zeros to the size of all vectors.
    """

    @staticmethod
    def forward(ctx: Any, features_BFE: torch.Tensor, pair_P: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(features_BFE, both)
        products_BFF = torch.bmm(features_BFE, features_BFE.transpose(1, 2))
        pairs_BP = products_BFF.flatten(1).gather(1, pair_P.expand(len(products_BFF), -1))
        return torch.cat([features_BFE[:, 0], pairs_BP], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        features_BFE, both = ctx.saved_tensors
        width = features_BFE.shape[2]
        padded = torch.nn.functional.pad(gradient[:, width:], (0, 1)).to(features_BFE.dtype)
        gradient_BFF = padded.gather(1, both.expand(len(padded), -1)).view(
            -1, features_BFE.shape[1], features_BFE.shape[1]
        )
        gradient_BFE = torch.bmm(gradient_BFF, features_BFE)
        gradient_BFE[:, 0] += gradient[:, :width]
        return gradient_BFE, None, None


class CatInteraction(nn.Module):
    """The concatenated vectors, in one piece or several, float32 [B, F_i, E] -> [B, F * E]."""

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.width_out = num_features * width

    def forward(self, *pieces_BFE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return join_vectors(pieces_BFE).flatten(1)


class CrossInteraction(nn.Module):
    """Cross layers x <- x0 * (W x + b) + x over the concatenated vectors, float32 [B, F, E] -> [B, F * E].

    Source:
        Wang et al. 2021, arXiv:2008.13535 (DCN-v2), section 3; the low-rank form W = U V from section 4.
    Example:
        >>> CrossInteraction(3, 4, layers=2, rank=None)(torch.ones(2, 3, 4)).shape
        torch.Size([2, 12])
    """

    def __init__(self, num_features: int, width: int, layers: int, rank: int | None) -> None:
        super().__init__()
        from torchrec.modules.crossnet import CrossNet, LowRankCrossNet  # models without it need no TorchRec to score

        self.width_out = num_features * width
        self.cross = CrossNet(self.width_out, layers) if rank is None else LowRankCrossNet(self.width_out, layers, rank)

    def forward(self, *pieces_BFE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        crossed: torch.Tensor = self.cross(join_vectors(pieces_BFE).flatten(1))
        return crossed

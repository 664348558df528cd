"""The tensors of one step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.dlrm import SharedFeatures
from pipeline.data.position import NO_TIMES, Position, Times
from pipeline.transforms.kernels.hashing import offsets_of, take_lists
from pipeline.transforms.kernels.weights import unpack


@dataclass(frozen=True)
class Batch:
    """Rows of one step on one rank.

    Shapes:
        dense: float32 [B, D]. labels: float32 [B]. weights: float32 [B], 0 for padding, else the weight column or 1.
        sparse: F features of B bags, ids int64, lengths int32, and weights float32 where a feature has some. A shared
        feature has one bag per run of rows first; its other bags are empty.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    position: Position
    global_rows: int
    """Rows of the global batch."""
    times: Times = NO_TIMES
    global_weight: float | None = None
    """Sum of the weights of the global batch. None: each row weighs 1."""
    shared: SharedFeatures | None = None
    """Bags shared by rows. None: each row has its own."""

    @property
    def whole(self) -> float:
        """Divisor of the summed losses of all ranks: training minimizes the weighted mean."""
        return self.global_rows if self.global_weight is None else self.global_weight

    @property
    def inputs(self) -> tuple[torch.Tensor, KeyedJaggedTensor] | tuple[torch.Tensor, KeyedJaggedTensor, SharedFeatures]:
        """Arguments of the model."""
        return (self.dense, self.sparse) if self.shared is None else (self.dense, self.sparse, self.shared)

    @property
    def plain(self) -> "Batch":
        """The same rows without shared bags."""
        if self.shared is None:
            return self
        features, rows = len(self.sparse.keys()), len(self.labels)
        bags = np.arange(features * rows).reshape(features, rows)
        for feature in self.shared.features:
            bags[feature] = feature * rows + self.shared.inverse_B.numpy()
        before, taken = self.sparse.offsets().numpy(), bags.reshape(-1)
        values, offsets = take_lists(self.sparse.values().numpy(), before, taken)
        weights = self.sparse.weights_or_none()
        if weights is not None:
            weights = torch.from_numpy(take_lists(weights.numpy(), before, taken)[0])
        lengths = torch.from_numpy(np.diff(offsets).astype(np.int32))
        sparse = KeyedJaggedTensor(self.sparse.keys(), torch.from_numpy(values), weights, lengths)
        return replace(self, sparse=sparse, shared=None)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Moves the batch to a device."""
        if self.dense.device == device:
            return self
        moved = [tensor.to(device, non_blocking=non_blocking) for tensor in (self.dense, self.labels, self.weights)]
        sparse = self.sparse.to(device, non_blocking=non_blocking)
        shared = self.shared and self.shared.to(device, non_blocking)
        return replace(self, dense=moved[0], sparse=sparse, labels=moved[1], weights=moved[2], shared=shared)


def keyed_lists(
    names: list[str], values: np.ndarray, lengths: np.ndarray, weighted: Sequence[int] = ()
) -> KeyedJaggedTensor:
    """Returns the bags of F features over B rows in TorchRec's format.

    Args:
        values: int64 [V], feature by feature. lengths: int32 [F * B].
        weighted: Indices of the features whose ids are packed with weights. The ids of all others weigh 1.
    """
    if not weighted:
        return KeyedJaggedTensor(names, torch.from_numpy(values), lengths=torch.from_numpy(lengths))
    bounds = offsets_of(lengths.reshape(len(names), -1).sum(1))
    ids, weights = values.copy(), np.ones(len(values), np.float32)
    for feature in weighted:
        part = slice(bounds[feature], bounds[feature + 1])
        ids[part], weights[part] = unpack(values[part])
    return KeyedJaggedTensor(names, torch.from_numpy(ids), torch.from_numpy(weights), torch.from_numpy(lengths))

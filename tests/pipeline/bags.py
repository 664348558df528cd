"""Bags of features in TorchRec's form."""

from collections.abc import Sequence

import numpy as np
from torchrec import KeyedJaggedTensor

from pipeline.data.batch import keyed_lists
from pipeline.transforms.column import Column


def sparse_tensor(names: list[str], columns: tuple[Column, ...], weighted: Sequence[int] = ()) -> KeyedJaggedTensor:
    """The bags of F features over B rows; see `keyed_lists`."""
    values = np.concatenate([column.values for column in columns])
    lengths = np.concatenate([np.diff(column.offsets) for column in columns if column.offsets is not None])
    return keyed_lists(names, values, lengths.astype(np.int32), weighted)

"""Batches hold bags in TorchRec's form and move as a whole."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.transforms.column import Column
from tests.pipeline.bags import sparse_tensor

ROWS = st.integers(0, 5).flatmap(
    lambda n: st.lists(
        st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), min_size=n, max_size=n), min_size=1, max_size=3
    )
)


def column(rows: list[list[int]]) -> Column:
    return Column(np.array(list(itertools.chain(*rows)), np.int64), np.cumsum([0, *map(len, rows)], dtype=np.int64))


@settings(derandomize=True, max_examples=40, deadline=None, database=None)
@given(ROWS)
def test_bags_come_back_as_they_were(features: list[list[list[int]]]) -> None:
    names = [f"f{i}" for i in range(len(features))]
    tensor = sparse_tensor(names, tuple(map(column, features)))
    assert (tensor.keys(), tensor.values().dtype, tensor.lengths().dtype) == (names, torch.int64, torch.int32)
    for name, rows in zip(names, features, strict=True):
        bags = tensor[name]
        assert bags.lengths().tolist() == [len(row) for row in rows]
        assert bags.values().tolist() == list(itertools.chain(*rows))


def test_the_tensor_owns_its_memory() -> None:
    ids = column([[1, 2]])
    sparse_tensor(["a"], (ids,)).values().zero_()
    assert ids.values.tolist() == [1, 2]


def test_a_moved_batch_keeps_its_position() -> None:
    sparse = sparse_tensor(["a"], (column([[3], []]),))
    batch = Batch(torch.ones(2, 1), sparse, torch.zeros(2), torch.ones(2), Position(epoch=1, batches=4), 7)
    moved = batch.to(torch.device("meta"))
    assert {t.device.type for t in (moved.dense, moved.labels, moved.weights, moved.sparse.values())} == {"meta"}
    assert (moved.position, moved.global_rows) == (Position(epoch=1, batches=4), 7)


def test_a_position_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Position().batches = 3  # type: ignore[misc]

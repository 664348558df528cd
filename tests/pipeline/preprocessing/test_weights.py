"""Weights accompany the labels in every chunk and batch. Their sum is the same for every rank and world size."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.errors import DataError
from pipeline.preprocessing.client import Client, InlineSource
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from tests.pipeline.preprocessing.reference import all_equal, joined, numbers

CONFIG = PreprocessingConfig(executor="inline", workers=1)


def weighted(days: list[pa.Table], make_warehouse: Callable[..., DataSpec], home: Path, values: pa.Array) -> DataSpec:
    whole = pa.concat_tables(days[:2]).append_column("importance", values)
    spec = make_warehouse(home, [whole.slice(0, days[0].num_rows), whole.slice(days[0].num_rows)])
    return spec.model_copy(update={"weight": "importance"})


def batches(spec: DataSpec, rank: int = 0, world_size: int = 1) -> list:
    reader = Client(InlineSource({"t": spec}, CONFIG), ("t", spec), 160, 3, 500, rank, world_size)
    return list(reader.batches())


@pytest.fixture(scope="module")
def importance(days: list[pa.Table]) -> np.ndarray:
    return np.random.default_rng(8).choice([0.5, 1.0, 5.0], days[0].num_rows + days[1].num_rows)


@pytest.fixture(scope="module")
def spec(
    days: list[pa.Table], make_warehouse: Callable[..., DataSpec], importance: np.ndarray,
    tmp_path_factory: pytest.TempPathFactory,
) -> DataSpec:  # fmt: skip
    return weighted(days, make_warehouse, tmp_path_factory.mktemp("weighted"), pa.array(importance))


def test_each_row_keeps_its_weight(spec: DataSpec, importance: np.ndarray) -> None:
    found = batches(spec)
    order = numbers(found)
    assert sorted(order) == list(range(len(importance)))
    assert np.concatenate([batch.weights for batch in found]).tolist() == importance[order].tolist()
    assert [batch.global_weight for batch in found] == [batch.weights.double().sum().item() for batch in found]


def test_world_sizes_share_one_sum(spec: DataSpec) -> None:
    whole, shares = batches(spec), [batches(spec, rank, 3) for rank in range(3)]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert {part.global_weight for part in parts} == {batch.global_weight}
        assert joined(parts).weights.equal(batch.weights)


def test_without_a_column_nothing_is_added(spec: DataSpec) -> None:
    plain = batches(spec.model_copy(update={"weight": None}))
    assert {batch.global_weight for batch in plain} == {None}
    assert all_equal(plain, [batch for batch in plain if batch.weights.unique().tolist() == [1.0]])
    assert plain[0].whole == 160


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null or NaN"),
        (float("nan"), "null or NaN"),
        (-1.0, "-1"),
        (0.0, "0"),
        (float("inf"), "inf"),
        (1e5, "100000"),
    ],
    ids=str,
)
def test_a_bad_weight_is_named(
    days: list[pa.Table], make_warehouse: Callable[..., DataSpec], tmp_path: Path, value: float | None, shown: str
) -> None:
    values = pa.array([1.0] * 700 + [value] + [1.0] * 719, pa.float64())
    spec = weighted(days, make_warehouse, tmp_path, values)
    message = rf"weight 'importance' in .*expected a number from 0.0001 to 10,000, got {shown}\. Scale the weights"
    with pytest.raises(DataError, match=message):
        batches(spec)

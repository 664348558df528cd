"""Measured table use agrees with counts by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from models.config import SparseFeature
from pipeline.jobs.training.rank.model import measure_uses
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.training.tables.statistics import LOAD_FACTORS, MeasuredCache, measure_table_use
from pipeline.transforms.column import Column


def column(lists: list[list[int]]) -> Column:
    lengths = [len(ids) for ids in lists]
    return Column(
        np.array([i for ids in lists for i in ids], np.int64),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def test_two_features_of_a_table_count_together() -> None:
    bags = [SparseFeature("a", "t", 10, "sum"), SparseFeature("b", "t", 10, "sum"), SparseFeature("c", "u", 5, "sum")]
    columns = [column([[1, 2], [], [1], [3]]), column([[2], [2], [4], []]), column([[], [], [], []])]
    uses = measure_table_use(bags, columns, batch_rows=2)
    assert uses["t"].ids_per_bag == (4 / 3, 1.0)
    assert uses["t"].filled_share == (0.75, 0.75)
    assert uses["t"].distinct_rows == (len({1, 2}) + len({1, 3, 4})) / 2
    assert (uses["u"].ids_per_bag, uses["u"].filled_share, uses["u"].distinct_rows) == ((1.0,), (0.0,), 0.0)


def test_miss_rates_of_a_known_distribution() -> None:
    """Nine of ten lookups go to one row in a hundred, so a cache of 1 % misses a tenth of them."""
    random = np.random.default_rng(1)
    hot = random.random(40_000) < 0.9
    ids = np.where(hot, random.integers(0, 10, 40_000), random.integers(10, 1000, 40_000))
    use = measure_table_use([SparseFeature("a", "t", 1000, "sum")], [Column(ids, np.arange(40_001))], 4_000)["t"]
    cache = MeasuredCache(use)
    assert use.miss_rates[0] == 1.0
    assert use.miss_rates[-1] == 0.0
    assert list(use.miss_rates) == sorted(use.miss_rates, reverse=True)
    assert cache.expected_miss_rate(0.01) == pytest.approx(0.1, abs=0.01)
    assert cache.expected_miss_rate(0.5) == pytest.approx(0.1 * 0.5, abs=0.01)
    assert cache.cacheability < 0.1
    assert cache.expected_lookups == pytest.approx(10 + 990 * (1 - (1 - 1 / 990) ** 400), rel=0.02)


def test_unseen_rows_do_not_count_as_hits() -> None:
    """Each id occurs once, so the first half predicts nothing about the second."""
    feature = SparseFeature("a", "t", 10**6, "sum")
    use = measure_table_use([feature], [Column(np.arange(1000), np.arange(1001))], 100)["t"]
    assert MeasuredCache(use).expected_miss_rate(0.2) == pytest.approx(0.8, abs=0.01)
    assert len(use.miss_rates) == len(LOAD_FACTORS)


def test_the_sample_is_the_first_training_rows(
    rank_spec: Callable[..., RankSpec], days: list[pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = rank_spec(tmp_path)
    lists = [ids for day in days[:3] for ids in day["list_items"].to_pylist()]
    users = [user for day in days[:3] for user in day["cat_user"].to_pylist()]
    for rows in (10**6, 150):
        monkeypatch.setattr("pipeline.jobs.training.rank.model.SAMPLE_ROWS", rows)
        uses: dict[str, Any] = measure_uses(spec)
        lengths = np.array([len(ids or []) for ids in lists[:rows]])
        assert uses["list_items"].filled_share == (np.mean(lengths > 0),)
        assert uses["list_items"].ids_per_bag == (lengths[lengths > 0].mean(),)
        seen = users[:rows]
        batches = [seen[i : i + 160] for i in range(0, max(len(seen) // 160, 1) * 160, 160)]
        assert uses["cat_user"].distinct_rows == np.mean([len(set(batch)) for batch in batches])
        assert measure_uses(spec) == uses

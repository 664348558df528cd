"""Generated batches: shape, rows per rank, list lengths and popularity of ids."""

import numpy as np
import pytest

from pipeline.data.batch import Batch
from pipeline.errors import ConfigError
from pipeline.study.points.config import Workload
from pipeline.study.points.workload import (
    HEAD,
    assign_ids,
    draw_batches,
    draw_ranks,
    fit_length_chances,
    make_plan,
    table_lookups,
    table_sizes,
)

SMALL = Workload(dense_features=3, sparse_features=4, hash_size=50, lookups=6, lengths="power_law", truncation=9)


def rows_of(batch: Batch) -> list[tuple]:
    """Numbers, label and lists of each row that is not padding."""
    bags = [column.to_dense() for column in batch.sparse.to_dict().values()]
    return [
        (tuple(batch.dense[i].tolist()), batch.labels[i].item(), tuple(tuple(bag[i].tolist()) for bag in bags))
        for i in np.flatnonzero(batch.weights)
    ]


def test_a_plan_names_features_and_a_table_each():
    plan = make_plan(Workload(dense_features=2, sparse_features=3, hash_size=7))
    assert plan.features == ["dense_0", "dense_1", "sparse_0", "sparse_1", "sparse_2"]
    assert [(one.table, one.rows, one.pooling) for one in plan.sparse] == [(f"sparse_{i}", 7, "sum") for i in range(3)]
    assert plan.columns == []


@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_the_shares_of_all_ranks_are_the_global_batch(world_size):
    whole = draw_batches(SMALL, 10, 2, seed=5)
    shares = [draw_batches(SMALL, 10, 2, 5, rank, world_size) for rank in range(world_size)]
    for number, batch in enumerate(whole):
        mine = [of_rank[number] for of_rank in shares]
        assert [row for share in mine for row in rows_of(share)] == rows_of(batch)
        assert {len(share.labels) for share in mine} == {
            -(-10 // world_size)
        }  # all ranks have equal numbers of rows, padding included
        assert {(share.global_rows, share.position) for share in mine} == {(10, batch.position)}
        for share in mine:
            padding = share.weights.numpy() == 0.0
            assert share.sparse.lengths().view(4, -1).numpy()[:, padding].sum() == 0
            assert int(share.sparse.lengths().sum()) == len(share.sparse.values())


def test_batches_differ_from_one_another_and_by_seed_alone():
    first, second = draw_batches(SMALL, 10, 2, seed=5)
    assert rows_of(first) == rows_of(draw_batches(SMALL, 10, 1, seed=5)[0])
    assert rows_of(first) != rows_of(second)
    assert rows_of(first) != rows_of(draw_batches(SMALL, 10, 1, seed=6)[0])


def test_a_workload_may_have_no_numbers():
    (batch,) = draw_batches(SMALL.model_copy(update={"dense_features": 0}), 4, 1, seed=1)
    assert batch.dense.shape == (4, 0)


@pytest.mark.parametrize("lookups", [1, 2, 10, 49])
def test_lengths_follow_a_power_law_with_the_configured_mean(lookups):
    chances = fit_length_chances(lookups)
    lengths = np.arange(1, len(chances) + 1)
    assert np.average(lengths, weights=chances) == pytest.approx(lookups)
    assert chances.sum() == pytest.approx(1.0)
    if lookups > 1:  # a power law: twice as long is rarer by one factor
        assert chances[1] / chances[0] == pytest.approx(chances[3] / chances[1])


@pytest.mark.parametrize(
    ("lengths", "lookups", "truncation", "mean"),
    [("fixed", 10, 32, 10.0), ("fixed", 40, 32, 32.0), ("power_law", 10, 32, 6.338), ("power_law", 10, 1_000, 10.0)],
)
def test_lists_have_the_configured_length(lengths, lookups, truncation, mean):
    workload = Workload(sparse_features=10, lookups=lookups, lengths=lengths, truncation=truncation)
    drawn = draw_batches(workload, 3_000, 1, seed=3)[0].sparse.lengths().numpy()
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.max() <= truncation


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("ids", [1, 100, HEAD, 20_000])
def test_ranks_follow_zipfs_law(ids, exponent):
    """Compares with the sum of all probabilities, which is too slow for large tables."""
    chances = (np.arange(100_000) + 0.37) / 100_000
    weights = np.arange(1, ids + 1) ** -exponent
    expected = np.searchsorted(np.cumsum(weights) / weights.sum(), chances, side="right")
    found = draw_ranks(chances, ids, exponent)
    assert found.min() >= 0
    assert found.max() < ids
    assert np.abs(found - expected).max() <= 1
    assert (found != expected).mean() < 0.01


def test_the_first_rank_is_as_much_more_popular_as_the_exponent_says():
    counts = np.bincount(draw_ranks(np.random.default_rng(1).random(2_000_000), 100_000, 1.05))
    assert counts[0] / counts[9] == pytest.approx(10**1.05, rel=0.03)


@pytest.mark.parametrize("hash_size", [1, 2, 3, 6, 100, 4_096, 99_991])
def test_popular_ids_are_spread_over_the_table(hash_size):
    ids = assign_ids(np.arange(hash_size), np.array([hash_size]), hash_size)
    assert sorted(ids.tolist()) == list(range(hash_size))
    if hash_size > 10:
        gaps = np.diff(np.sort(ids[:10]), append=ids[:10].min() + hash_size)
        assert gaps.min() > hash_size / 30  # the ten most popular: none is another's neighbour


PUBLISHED = {"M1": (30, 5_700_000, 28), "M2": (13, 7_300_000, 17), "M3": (127, 3_700_000, 49)}
"""Tables, mean hash size and mean lookups of the paper's models. All have tables of 30 and of 20 million rows."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_tables_spread_as_published(model):
    tables, mean, lookups = PUBLISHED[model]
    workload = Workload(
        sparse_features=tables, hash_size=mean, hash_spread=(30 / mean, 20e6 / mean), lookups=lookups,
        lookups_exponent=0.7,
    )  # fmt: skip
    sizes, means = np.array(table_sizes(workload)), np.array(table_lookups(workload))
    assert (sizes.min(), sizes.max()) == (30, 20_000_000)
    assert sizes.mean() == pytest.approx(mean, rel=1e-6)
    assert means.mean() == pytest.approx(lookups, rel=0.01)
    assert means[0] / means[7] == pytest.approx(8**0.7, rel=0.1)
    assert abs(np.corrcoef(np.argsort(np.argsort(sizes)), np.arange(tables))[0, 1]) < 0.3
    assert [one.rows for one in make_plan(workload).sparse] == sizes.tolist()


def test_ids_and_lists_of_a_spread_workload_are_those_of_their_table():
    workload = Workload(
        sparse_features=6, hash_size=100, hash_spread=(0.05, 3.0), lookups=12, lookups_exponent=1.0,
        lengths="power_law", truncation=10_000,
    )  # fmt: skip
    (batch,) = draw_batches(workload, 20_000, 1, seed=3)
    for (_, lists), size, mean in zip(
        batch.sparse.to_dict().items(), table_sizes(workload), table_lookups(workload), strict=True
    ):
        assert sorted(set(lists.values().tolist())) == list(range(size))  # all ids of a small table are drawn
        assert lists.lengths().double().mean().item() == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    ("tables", "spread"), [(2, (1e-5, 3.5)), (26, (0.1, 1.0)), (26, (0.9, 100.0)), (26, (1.5, 3.0))]
)
def test_a_spread_that_cannot_have_its_mean_is_refused(tables, spread):
    with pytest.raises(ConfigError, match=f"hash_spread of {tables} tables: expected ends between which"):
        table_sizes(Workload(sparse_features=tables, hash_spread=spread))

"""Random batches of any shape in memory: popularity of ids, and lengths of lists."""

import itertools
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.config import SparseFeature
from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.errors import ConfigError
from pipeline.study.points.config import Workload
from pipeline.transforms.plan.plan import Plan

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

HEAD = 256
"""Ranks with tabulated probabilities. Later ones follow a curve with a relative error of at most 1e-5."""
LONGEST = 20
"""Longest list of a power law before truncation, as a multiple of the mean."""
POSITIVES = 0.1
"""Share of rows with label 1."""
GOLDEN = (5**0.5 - 1) / 2


def make_plan(workload: Workload) -> Plan:
    """Makes a plan without ops: features `dense_0`, ... and `sparse_0`, ... with a table each."""
    sparse = [f"sparse_{number}" for number in range(workload.sparse_features)]
    return Plan(
        ops=(),
        dense=tuple(f"dense_{number}" for number in range(workload.dense_features)),
        sparse=tuple(
            SparseFeature(name=name, table=name, rows=rows, pooling="sum")
            for name, rows in zip(sparse, table_sizes(workload), strict=True)
        ),
        raw={},
    )


def draw_batches(
    workload: Workload, batch_rows: int, count: int, seed: int, rank: int = 0, world_size: int = 1
) -> list[Batch]:
    """Draws a rank's share of the first global batches. All ranks together have the same rows at every world size.

    Args:
        batch_rows: Rows of the global batch.
    """
    return [_batch(workload, batch_rows, number, seed, rank, world_size) for number in range(count)]


def _batch(workload: Workload, rows: int, number: int, seed: int, rank: int, world_size: int) -> Batch:
    """Draws a batch. Rows are shared out as by the preprocessing service: a rank with one row less gets padding."""
    random = np.random.default_rng((seed, number))
    begin, end, padded = rank * rows // world_size, (rank + 1) * rows // world_size, -(-rows // world_size)
    held, features = end - begin, workload.sparse_features
    dense, labels, weights = np.zeros((padded, workload.dense_features), np.float32), np.zeros(padded), np.zeros(padded)
    dense[:held] = random.standard_normal((rows, workload.dense_features), np.float32)[begin:end]
    labels[:held] = (random.random(rows) < POSITIVES)[begin:end]
    weights[:held] = 1.0
    whole = draw_lengths(workload, random, (features, rows))
    lengths = np.zeros((features, padded), np.int32)
    lengths[:, :held] = whole[:, begin:end]
    ends = np.cumsum(whole).reshape(features, rows)
    bounds = (ends - whole)[:, begin], ends[:, end - 1]
    chances = random.random(int(ends[-1, -1]))
    kept = np.concatenate([chances[low:high] for low, high in zip(*bounds, strict=True)]) if held else chances[:0]
    ids = _draw_ids(workload, kept, lengths.sum(axis=1))
    return Batch(
        dense=torch.from_numpy(dense),
        sparse=KeyedJaggedTensor(
            keys=[f"sparse_{feature}" for feature in range(features)],
            values=torch.from_numpy(ids),
            lengths=torch.from_numpy(lengths.reshape(-1)),
        ),
        labels=torch.from_numpy(labels.astype(np.float32)),
        weights=torch.from_numpy(weights.astype(np.float32)),
        position=Position(batches=number + 1, row=(number + 1) * rows),
        global_rows=rows,
    )


def _draw_ids(workload: Workload, chances: Floats, counts: Ids) -> Ids:
    """Draws the ids of all features. `chances` are uniform numbers, `counts` of them for each feature."""
    sizes, made = table_sizes(workload), list[Ids]()
    first = 0
    for size, group in itertools.groupby(range(len(sizes)), key=lambda feature: sizes[feature]):
        of_group = counts[list(group)]
        end = first + int(of_group.sum())
        ranks = draw_ranks(chances[first:end], size, workload.popularity)
        made.append(assign_ids(ranks, of_group, size))
        first = end
    return np.concatenate(made)


@cache
def table_sizes(workload: Workload) -> tuple[int, ...]:
    """Returns the rows of each table. Their mean is `hash_size`, as far as rounding allows.

    Raises:
        ConfigError: If no power law between the ends of `hash_spread` has that mean.
    Source:
        Acun et al. 2021, arXiv:2011.05497, figure 6: from 30 to 20 million rows in one model.
    """
    tables, spread = workload.sparse_features, workload.hash_spread
    if spread is None or tables == 1:
        return (workload.hash_size,) * tables
    places = np.linspace(0.0, 1.0, tables)
    low, high = -1.0, 3.0  # exponents
    for _ in range(64):
        exponent = (low + high) / 2
        found = _power_law_quantiles(spread, exponent, places)
        low, high = (exponent, high) if found.mean() > 1 else (low, exponent)
    if abs(found.mean() - 1) > 0.01:
        raise ConfigError(
            f"characterize.workload.hash_spread of {tables} tables", "ends between which a power law has the mean 1",
            f"{spread[0]:g} and {spread[1]:g}, with a mean of {found.mean():.2f}", "Move one of them.",
        )  # fmt: skip
    order = np.argsort(np.arange(tables) * GOLDEN % 1.0, kind="stable")  # as if drawn: size tells nothing of lookups
    rows = np.maximum(np.rint(found * workload.hash_size), 1).astype(np.int64)
    return tuple(rows[np.argsort(order)].tolist())


def _power_law_quantiles(spread: tuple[float, float], exponent: float, places: Floats) -> Floats:
    """Returns quantiles of the density x ** -exponent between two bounds."""
    low, high = spread
    power = 1.0 - exponent
    if abs(power) < 1e-9:
        return np.asarray(low * (high / low) ** places)
    return np.asarray((low**power + places * (high**power - low**power)) ** (1 / power))


@cache
def table_lookups(workload: Workload) -> tuple[int, ...]:
    """Returns the mean ids per list of each table, at least 1. Their mean is `lookups`, as far as that allows.

    Source:
        Acun et al. 2021, arXiv:2011.05497, figure 7: a few tables have most lookups.
    """
    shares = np.arange(1, workload.sparse_features + 1, dtype=np.float64) ** -workload.lookups_exponent
    means = workload.lookups * shares / shares.mean()
    return tuple(np.maximum(np.rint(means), 1).astype(np.int64).tolist())


def draw_ranks(chances: Floats, ids: int, exponent: float) -> Ids:
    """Draws by Zipf's law: rank r of `ids`, from 0 on, has a probability proportional to (r + 1) ** -exponent.

    Args:
        chances: Uniform numbers in [0, 1). Each becomes a rank, popular ones first.
    Example:
        >>> draw_ranks(np.array([0.0, 0.4, 0.99]), 3, 1.0).tolist()
        [0, 0, 2]
    """
    head = np.cumsum(np.arange(1, min(ids, HEAD) + 1, dtype=np.float64) ** -exponent)
    tail = float(_area(ids + 0.5, exponent) - _area(HEAD + 0.5, exponent)) if ids > HEAD else 0.0
    heights = chances * (head[-1] + tail)
    ranks = np.searchsorted(head, heights, side="right")
    later = np.flatnonzero(ranks >= len(head))
    if ids <= HEAD:
        ranks[later] = ids - 1  # reached by rounding only
        return ranks
    areas = heights[later] - head[-1] + _area(HEAD + 0.5, exponent)
    found = np.exp(areas) if exponent == 1.0 else (areas * (1.0 - exponent)) ** (1.0 / (1.0 - exponent))
    ranks[later] = np.clip(np.rint(found).astype(np.int64) - 1, HEAD, ids - 1)
    return ranks


def _area(x: float, exponent: float) -> np.float64:
    """Integral of x ** -exponent. Over [r - 1/2, r + 1/2] it approximates the weight of rank r."""
    return np.float64(np.log(x) if exponent == 1.0 else x ** (1.0 - exponent) / (1.0 - exponent))


def assign_ids(ranks: Ids, counts: Ids, hash_size: int) -> Ids:
    """Maps ranks to table rows. Adjacent ranks lie far apart, and at other rows in each table.

    Args:
        ranks: Ranks of all features, one after the other.
        counts: Number of ranks per feature.
    """
    stride = next(step for step in range(round(GOLDEN * hash_size) or 1, 2 * hash_size) if np.gcd(step, hash_size) == 1)
    first = (np.arange(len(counts)) * GOLDEN % 1.0 * hash_size).astype(np.int64)
    return (ranks * stride + np.repeat(first, counts)) % hash_size


def draw_lengths(workload: Workload, random: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray[np.int32]:
    """Draws list lengths [features, rows] after truncation."""
    means = table_lookups(workload)
    if workload.lengths == "fixed":
        drawn = np.broadcast_to(np.array(means)[:, None], shape)
    else:
        sums = [np.cumsum(fit_length_chances(mean)) for mean in means]
        chances = random.random(shape)
        drawn = np.stack([np.searchsorted(*one, side="right") for one in zip(sums, chances, strict=True)]) + 1
    return np.minimum(drawn, workload.truncation).astype(np.int32)


@cache
def fit_length_chances(mean: int) -> Floats:
    """Returns the probabilities of lists of 1, 2, ... ids before truncation: n ** -a, with a fitted to the mean."""
    lengths = np.arange(1, LONGEST * mean + 1, dtype=np.float64)
    low, high = 0.0, 64.0
    for _ in range(64):
        exponent = (low + high) / 2
        weights = lengths**-exponent
        low, high = (exponent, high) if lengths @ weights > mean * weights.sum() else (low, exponent)
    found: Floats = weights / weights.sum()
    return found

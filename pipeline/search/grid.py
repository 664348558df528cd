"""The trials of a grid: all combinations of the values of its keys, in a seeded order."""

import itertools
import math
from typing import Any

import numpy as np

from pipeline.search.config import Dimension, SweepConfig


def grid_values(dimension: Dimension) -> tuple[Any, ...]:
    """Lists the values that a grid takes of a key. Empty if they cannot be counted.

    Example:
        >>> grid_values(Dimension(low=0.01, high=1.0, log=True, points=3))
        (0.01, 0.1, 1.0)
        >>> grid_values(Dimension(low=8, high=32, step=8))
        (8, 16, 24, 32)
    """
    if dimension.choices is not None:
        return dimension.choices
    low, high, step = dimension.low, dimension.high, dimension.spacing
    assert low is not None
    assert high is not None
    if dimension.points is not None:
        spaced = (np.geomspace if dimension.log else np.linspace)(low, high, dimension.points).tolist()
        return tuple(dict.fromkeys(round(value) for value in spaced)) if dimension.is_whole else tuple(spaced)
    if step is None:
        return ()
    count = math.floor((high - low) / step + 1e-9) + 1
    return tuple(low + number * step for number in range(count))


def grid_points(config: SweepConfig) -> list[dict[str, Any]]:
    """Lists all combinations in a seeded order."""
    values = [grid_values(dimension) for dimension in config.space.values()]
    points = [dict(zip(config.space, combination, strict=True)) for combination in itertools.product(*values)]
    order = np.random.default_rng(config.seed).permutation(len(points))
    return [points[number] for number in order]


def count_trials(config: SweepConfig) -> int:
    """Returns the largest number of trials of a sweep. A grid ends with its last combination."""
    return min(config.trials, len(grid_points(config))) if config.strategy == "grid" else config.trials

"""Grids: the values of a key, and the order of their combinations."""

import itertools

import pytest

from pipeline.search.config import Dimension, SweepConfig
from pipeline.search.grid import count_trials, grid_points, grid_values


@pytest.mark.parametrize(
    ("dimension", "values"),
    [
        ({"choices": ["a", "b"]}, ("a", "b")),
        ({"low": 1, "high": 4}, (1, 2, 3, 4)),
        ({"low": 0.0, "high": 0.3, "step": 0.1}, pytest.approx((0.0, 0.1, 0.2, 0.3))),
        ({"low": 1e-3, "high": 10.0, "log": True, "points": 5}, pytest.approx((1e-3, 1e-2, 1e-1, 1.0, 10.0))),
        ({"low": 1, "high": 100, "log": True, "points": 3}, (1, 10, 100)),
        ({"low": 0.0, "high": 1.0}, ()),
        ({"low": 1, "high": 100, "log": True}, ()),
    ],
)
def test_the_values_that_a_grid_takes(dimension, values):
    assert grid_values(Dimension(**dimension)) == values


def test_a_grid_has_each_combination_once_in_a_seeded_order():
    space = {"a": {"low": 1, "high": 3}, "b": {"choices": ["x", "y"]}}
    grid = grid_points(SweepConfig(strategy="grid", space=space, trials=100))
    assert sorted((point["a"], point["b"]) for point in grid) == list(itertools.product((1, 2, 3), ("x", "y")))
    assert grid == grid_points(SweepConfig(strategy="grid", space=space, parallel=3))
    assert grid != grid_points(SweepConfig(strategy="grid", space=space, seed=2))
    assert count_trials(SweepConfig(strategy="grid", space=space, trials=100)) == 6
    assert count_trials(SweepConfig(strategy="grid", space=space, trials=4)) == 4

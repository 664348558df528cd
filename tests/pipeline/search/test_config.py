"""SweepConfig: the values that a dimension holds, and the settings that are refused."""

import subprocess
import sys

import pytest

from pipeline.errors import ConfigError
from pipeline.search.config import Dimension, SweepConfig


@pytest.mark.parametrize(
    ("dimension", "inside", "outside"),
    [
        ({"choices": ["adam", None, [32, 16]]}, ["adam", None, [32, 16]], ["sgd", 0, [32]]),
        ({"low": 0.1, "high": 1.0}, [0.1, 0.55, 1], [0.09, 1.01, "0.5", None, True]),
        ({"low": 8, "high": 32, "step": 8}, [8, 24, 32], [9, 40, 16.0]),
        ({"low": 0.0, "high": 0.5, "step": 0.1}, [0.0, 0.3, 0.5], [0.25]),
        ({"low": 1, "high": 1024, "log": True}, [1, 700], [0, 2.5]),
    ],
)
def test_what_a_dimension_holds(dimension, inside, outside):
    found = Dimension(**dimension)
    assert [value for value in inside if not found.holds(value)] == []
    assert [value for value in outside if found.holds(value)] == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "expected `choices`, or `low` below `high`, got None and None. Correct it."),
        ({"low": 2, "high": 1}, "expected `choices`, or `low` below `high`, got 2 and 1. Correct it."),
        ({"choices": [1, 1]}, "expected `choices` alone, each once, got {'choices': (1, 1)}. Correct it."),
        ({"choices": []}, "expected `choices` alone, each once, got {'choices': ()}. Correct it."),
        (
            {"choices": [1], "low": 1},
            "expected `choices` alone, each once, got {'choices': (1,), 'low': 1}. Correct it.",
        ),
        (
            {"choices": [{"a": 1}]},
            "expected `choices` without mappings, because a mapping in a file would be merged with them, got a mapping. "
            "Correct it.",
        ),
        (
            {"low": 0.0, "high": 1.0, "log": True},
            "expected `low` above 0 and no `step` with `log`, got low=0.0, step=None. Correct it.",
        ),
        (
            {"low": 1, "high": 9, "step": 0.5},
            "expected `step` without `points`, and whole where the bounds are, got 0.5. Correct it.",
        ),
    ],
)
def test_an_impossible_dimension_is_refused(values, said):
    with pytest.raises(ConfigError) as error:
        SweepConfig(space={"a.b": values})
    assert str(error.value) == f"sweep.space 'a.b': {said}"


def test_a_key_of_the_base_can_be_taken_out():
    assert SweepConfig(space={"a": {"low": 1, "high": 3}, "b": None}).space.keys() == {"a"}


def test_a_grid_needs_to_know_its_values():
    with pytest.raises(ConfigError) as error:
        SweepConfig(space={"a": {"low": 0.0, "high": 1.0}}, strategy="grid")
    assert str(error.value) == "sweep.space 'a' with strategy=grid: expected `step` or `points`, got none. Add one."


def test_its_identity_covers_what_is_drawn():
    config = SweepConfig(space={"a": {"low": 1, "high": 3}})
    same = config.model_copy(update={"trials": 99, "parallel": 4})
    assert same.identity() == config.identity()
    assert config.model_copy(update={"seed": 2}).identity() != config.identity()


def test_importing_the_config_loads_no_heavy_library():
    heavy = {"matplotlib", "mlflow", "numpy", "optuna", "pyarrow", "torch"}
    code = f"import sys, pipeline.search.config; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"

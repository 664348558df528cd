"""Errors cross process boundaries as a list of strings."""

import json

import pytest

from pipeline import errors
from pipeline.errors import ColumnError, ContractError, StorageError, TrainingError, from_wire, to_wire

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ContractError)]
PARTS = ("column 'age'", "numbers", "text", "Clean it.")


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_of_ours_keeps_its_class_and_words(kind: type[ContractError]) -> None:
    copy = from_wire(json.loads(json.dumps(to_wire(kind(*PARTS)))))
    assert type(copy) is kind
    assert (copy.where, copy.expected, copy.actual, copy.remedy) == PARTS


def test_every_class_is_exported() -> None:
    assert {kind.__name__ for kind in CLASSES} | {"closest_names", "from_wire", "keep_if_failed", "to_wire"} == set(
        errors.__all__
    )


def test_a_class_of_a_stage_arrives_as_its_nearest_base_class() -> None:
    class LostError(TrainingError):
        """A class that the other process need not have."""

    assert to_wire(LostError(*PARTS)) == ["TrainingError", *PARTS]


def test_a_class_of_the_same_name_elsewhere_is_not_ours() -> None:
    other = type("ColumnError", (StorageError,), {})
    assert type(from_wire(to_wire(other(*PARTS)))) is StorageError
    assert type(from_wire(to_wire(ColumnError(*PARTS)))) is ColumnError


@pytest.mark.parametrize(
    "values", [[], None, "DataError", {"a": 1}, ["Foreign", "a", "b", "c", "d"], ["DataError", "a", "b", 3, "d"]]
)
def test_a_damaged_error_of_another_process_is_an_error(values):
    assert str(from_wire(values)).startswith("error of another process: expected five texts, got ")

"""An error is one sentence with a remedy, and it crosses processes."""

import pickle

import pytest

from storage.errors import ConflictError, ContractError, CorruptFileError, EmptyDatasetError, StorageError

KINDS = [ContractError, StorageError, EmptyDatasetError, ConflictError, CorruptFileError]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_a_sentence_and_survives_pickling(kind: type[ContractError]) -> None:
    error = kind("column 'age'", "numbers", "text", "Clean it.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == "column 'age': expected numbers, got text. Clean it."
    assert (copy.where, copy.expected, copy.actual, copy.remedy) == ("column 'age'", "numbers", "text", "Clean it.")


def test_an_error_is_one_line_that_a_terminal_can_show() -> None:
    """What others wrote is part of it."""
    error = ContractError("column 'a\nb\x1b[31m'", "x" * 100_000, "\ud800 and \u202e, but é stays", "Clean it.")
    text = str(error)
    assert text.startswith("column 'a\\nb\\x1b[31m': expected xxx")
    assert text.endswith("xxx, got \\ud800 and \\u202e, but é stays. Clean it.")
    assert text.isprintable()
    assert len(text) < 3_000
    assert pickle.loads(pickle.dumps(error)).where == error.where


def test_every_storage_error_is_caught_as_one() -> None:
    assert all(issubclass(kind, StorageError) for kind in KINDS[1:])
    assert issubclass(StorageError, ContractError)

"""The errors that stages raise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storage.errors import (
    ConfigError,
    ConflictError,
    ContractError,
    CorruptFileError,
    EmptyDatasetError,
    StorageError,
    closest_names,
)

__all__ = [
    "AccessError",
    "ColumnError",
    "ConfigError",
    "ConflictError",
    "ContractError",
    "CorruptFileError",
    "DataError",
    "EmptyDatasetError",
    "InputError",
    "NotFiniteError",
    "RegistryError",
    "StorageError",
    "TrackingError",
    "TrainingError",
    "closest_names",
    "from_wire",
    "keep_if_failed",
    "to_wire",
]


class ColumnError(ConfigError):
    """The configuration names a column that the table does not have, or declares it with the wrong type."""

    def at(self, snapshot: str) -> "ColumnError":
        """Returns the same error with the snapshot added to where it happened."""
        return ColumnError(f"{self.where} at {snapshot}", self.expected, self.actual, self.remedy)


class DataError(ContractError):
    """More source rows break the rules than the configuration allows."""


class InputError(ContractError):
    """A model cannot score a row. The message names the row and the column."""


class TrainingError(ContractError):
    """Training cannot continue. The last complete checkpoint is kept."""


class NotFiniteError(TrainingError):
    """A loss or a weight is inf or nan."""


class RegistryError(ContractError):
    """A model cannot be registered as it is."""


class TrackingError(ContractError):
    """MLflow's server or database is unreachable."""


class AccessError(TrackingError):
    """MLflow's server, or a proxy before it, refuses access."""


@contextmanager
def keep_if_failed(**result: Any) -> Iterator[None]:
    """Gives an error that ends the block what was finished before it, as `finished`, so that people are told of both.

    Args:
        result: As a command's result. Lists may grow within the block.

    Example:
        >>> try:
        ...     with keep_if_failed(held=["2025-01-01"]):
        ...         raise ValueError
        ... except ValueError as error:
        ...     error.finished
        [{'status': 'failed', 'held': ['2025-01-01']}]
    """
    try:
        yield
    except Exception as error:
        vars(error).setdefault("finished", []).append({"status": "failed"} | result)
        raise


_CLASSES: dict[str, type[ContractError]] = {
    kind.__name__: kind
    for kind in (
        AccessError,
        ColumnError,
        ConfigError,
        ConflictError,
        ContractError,
        CorruptFileError,
        DataError,
        EmptyDatasetError,
        InputError,
        NotFiniteError,
        RegistryError,
        StorageError,
        TrackingError,
        TrainingError,
    )
}


def to_wire(error: ContractError) -> list[str]:
    """Encodes an error for another process, as strings that fit into JSON.

    A class that this module does not have is sent as its nearest base class.

    Example:
        >>> to_wire(ConfigError("training.epochs", "at least 1", "0", "Raise it."))
        ['ConfigError', 'training.epochs', 'at least 1', '0', 'Raise it.']
    """
    name = next(kind.__name__ for kind in type(error).__mro__ if _CLASSES.get(kind.__name__) is kind)
    return [name, error.where, error.expected, error.actual, error.remedy]


def from_wire(values: Any) -> ContractError:
    """Decodes what `to_wire` encoded. The caller raises the error. A damaged one becomes an error that says so.

    Example:
        >>> from_wire(["DataError", "source", "rows", "none", "Add files."])
        DataError('source', 'rows', 'none', 'Add files.')
    """
    match values:
        case [str() as name, str() as where, str() as expected, str() as actual, str() as remedy] if name in _CLASSES:
            return _CLASSES[name](where, expected, actual, remedy)
    return ContractError("error of another process", "five texts", f"{values!r:.200}", "See the logs of its run.")

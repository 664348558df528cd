"""What each stage can complain about."""

from storage.errors import ContractError, EmptyDatasetError, StorageError

__all__ = [
    "ConfigError",
    "ContractError",
    "DataError",
    "EmptyDatasetError",
    "InputError",
    "RegistryError",
    "StorageError",
    "TrackingError",
    "TrainingError",
]


class ConfigError(ContractError):
    """The configuration contradicts itself or the data it is for."""


class DataError(ContractError):
    """Source rows break the rules, more of them than the configuration allows."""


class InputError(ContractError):
    """A row given to a model for scoring cannot be scored; names the row and the column."""


class TrainingError(ContractError):
    """Training cannot go on; the last complete checkpoint is kept."""


class RegistryError(ContractError):
    """A model cannot be registered as it is."""


class TrackingError(ContractError):
    """MLflow's server or database cannot be reached."""

"""What each stage can complain about."""

from storage.errors import ContractError, EmptyDatasetError, StorageError

__all__ = [
    "ColumnError",
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


class ColumnError(ConfigError):
    """A column that the configuration names is not in the table, or of a type that cannot be read as declared."""

    def at(self, snapshot: str) -> "ColumnError":
        """The complaint with the snapshot, in words, that was looked at."""
        return ColumnError(f"{self.where} at {snapshot}", self.expected, self.actual, self.remedy)


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

"""What can be wrong, said so that the reader knows what to do."""


class ContractError(Exception):
    """A promise between two parts was not kept; the message is one sentence and a remedy.

    Args:
        where: The thing complained about, as the user knows it (a column, a config key, a file).
        expected: What should have been there.
        actual: What was there.
        remedy: What the reader can do about it.
    Example:
        >>> str(ContractError("bucketize on 'age'", "increasing borders", "[3, 1]", "Sort them."))
        "bucketize on 'age': expected increasing borders, got [3, 1]. Sort them."
    """

    def __init__(self, where: str, expected: str, actual: str, remedy: str) -> None:
        super().__init__(where, expected, actual, remedy)
        self.where, self.expected, self.actual, self.remedy = where, expected, actual, remedy

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.actual}. {self.remedy}"


class StorageError(ContractError):
    """The warehouse cannot do what was asked."""


class EmptyDatasetError(StorageError):
    """A selection holds no rows, so nothing can be trained or judged on it."""


class ConflictError(StorageError):
    """Another writer changed the same days at the same time; nothing of ours was written."""


class CorruptFileError(StorageError):
    """A data file of a snapshot cannot be read."""

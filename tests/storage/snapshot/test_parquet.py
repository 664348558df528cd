"""What is said of a file that cannot be read."""

import datetime
import errno
from pathlib import Path
from typing import Any

import pytest

from storage.config import WarehouseConfig
from storage.errors import CorruptFileError, StorageError
from storage.snapshot.parquet import reading
from storage.warehouse import Warehouse
from tests.homes import rows_of, write_days


@pytest.fixture
def table(tmp_path: Path) -> Any:
    warehouse = Warehouse(WarehouseConfig(), tmp_path)
    write_days(warehouse, rows_of(datetime.date(2025, 1, 1), x=[1]))
    return warehouse.table("events")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_the_machine_lacks_is_no_fault_of_the_file(table: Any, number: int) -> None:
    """Whoever took it for a damaged file would quarantine its rows, or write them again."""
    with pytest.raises(OSError, match="no") as error, reading("file 'a'", table):
        raise OSError(number, "no")
    assert error.value.errno == number


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_file_that_may_not_be_read_is_not_damaged(table: Any, number: int) -> None:
    with (
        pytest.raises(StorageError, match="expected a file that this process may read") as error,
        reading("file 'a'", table),
    ):
        raise PermissionError(number, "no")
    assert not isinstance(error.value, CorruptFileError)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "no"), OSError("page checksum"), FileNotFoundError(errno.ENOENT, "no")]
)
def test_other_errors_are_the_files(table: Any, error: OSError) -> None:
    with pytest.raises(CorruptFileError), reading("file 'a'", table):
        raise error

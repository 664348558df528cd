"""A warehouse in a folder of its own."""

from pathlib import Path

import pytest

from storage.config import WarehouseConfig
from storage.warehouse import Warehouse


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "warehouse"


@pytest.fixture
def warehouse(home: Path) -> Warehouse:
    """Small files and row groups, so that a few rows already make several."""
    return Warehouse(WarehouseConfig(row_group_rows=4, file_rows=10), home)

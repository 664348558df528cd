"""Fixtures to run an ingest and to read what it stored."""

import datetime
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.extraction.checks import CheckResult
from pipeline.extraction.config import IngestConfig, SourceConfig, names_in
from pipeline.extraction.extract import IngestResult, extract
from pipeline.extraction.opening import SourceContext
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse

Ingest = Callable[..., IngestResult]
Rows = Callable[..., pd.DataFrame]


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(WarehouseConfig(), tmp_path / "home")


@pytest.fixture
def ingest(tmp_path: Path, warehouse: Warehouse) -> Ingest:
    """Runs the stage on `source` (keys of SourceConfig) for the features `dense` and `sparse`."""

    def run(
        source: dict[str, Any],
        sparse: Iterable[str] = ("user",),
        dense: Iterable[str] = (),
        derived: Iterable[dict[str, Any]] = (),
        only: Iterable[datetime.date] = (),
        into: Warehouse = warehouse,
        force: bool = False,
        warn: Callable[[str], None] = lambda sentence: None,
        on_checked: Callable[[CheckResult], None] = lambda checked: None,
        **config: Any,
    ) -> IngestResult:
        groups = {"dense": [{"columns": list(dense)}] if dense else [], "derived": list(derived)}
        hashed = [{"kind": "sigrid_hash", "size": 100}]
        schema = FeatureSchema.model_validate({**groups, "sparse": [{"columns": list(sparse), "transforms": hashed}]})
        settings = SourceConfig.model_validate(source)
        config.setdefault("other_sources", True)  # most tests are of one table and several files
        wanted, logs = IngestConfig(**config), tmp_path / "logs"
        roles = frozenset(names_in(wanted, {"skip"}))
        context = SourceContext(
            settings, schema, into, "events", tmp_path, logs, memory_bytes=wanted.memory_bytes, roles=roles
        )
        return extract(context, wanted, only, force, on_checked=on_checked, warn=warn)

    return run


@pytest.fixture
def stored(warehouse: Warehouse) -> Rows:
    """All rows of a table, in the order of reading."""

    def read(table: str = "events", into: Warehouse = warehouse) -> pd.DataFrame:
        snapshot = into.current(table)
        schema = into.schema(snapshot)
        reader = into.reader(snapshot, schema.names)
        parts = [reader.read(fragment) for fragment in reader.fragments()]
        return pa.concat_tables(parts).to_pandas() if parts else pd.DataFrame(columns=schema.names)

    return read


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., pa.Table]:
    """Writes columns as the Parquet file `name` below the root of the source."""

    def write(name: str, **columns: Any) -> pa.Table:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table(columns)
        pq.write_table(table, path)
        return table

    return write

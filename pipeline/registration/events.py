"""Histories and windows of a model, computed from event logs that its caller names."""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from pipeline.data.joined.reader import SourceColumns
from pipeline.data.joined.source import FeatureSource, added_columns, pin_sources
from pipeline.errors import ConfigError, closest_names
from pipeline.registration.request import TYPES
from pipeline.transforms.joins import EventWindow, History
from pipeline.transforms.plan.schedule import single_array
from storage.config import WarehouseConfig
from storage.scratch import ScratchFolder
from storage.warehouse import Warehouse

ANY_DAY = datetime.date.min
"""Logs are read as of a time, whatever the day of a row."""


class EventRecord(BaseModel, frozen=True):
    """What a packed model says of its histories and windows."""

    sources: tuple[History | EventWindow, ...]
    columns: Mapping[str, str]
    """Raw columns that name a row's key and time, with their types."""


class EventColumns:
    """Computes a model's histories and windows, as while its training read the rows.

    The logs are sorted into a temporary folder when this is made, and read as they are then.

    Args:
        record: The model's.
        logs: Table or path of a log, as the model's config names it -> files in its place: a path, a glob or a list of
            them. Columns of other logs are not computed.
        wanted: The model's raw columns, with their types.
    Attributes:
        needed: Raw columns that name a row's key and time, with their types.
        made: The columns that it computes.
    Raises:
        ConfigError: If the model reads no such log, there is no such file, or its columns do not fit.
        DataError: If a file is unreadable.
    """

    def __init__(self, record: EventRecord, logs: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
        names = list(dict.fromkeys(source.name for source in record.sources))
        for name in logs:
            if name not in names:
                remedy = f"The model reads {', '.join(names) or 'none'}. Closest: {closest_names(name, names)}."
                raise ConfigError(f"events '{name}'", "an event log of the model", "none of that name", remedy)
        self.scratch = ScratchFolder("dlrm-events-")
        warehouse = Warehouse(WarehouseConfig(), Path(self.scratch.name))
        given = [_in_files(source, logs[source.name]) for source in record.sources if source.name in logs]
        sources = [FeatureSource(pinned, warehouse) for pinned in pin_sources(given, Path.cwd(), warehouse)]
        added_columns(sources, pa.schema([(name, TYPES[kind]) for name, kind in record.columns.items()]))
        self.kinds = {name: TYPES[kind] for name, kind in wanted.items()}
        columns = [(source, [name for name in source.schema.names if name in wanted]) for source in sources]
        self.sides = [SourceColumns(source, chosen) for source, chosen in columns if chosen]
        self.needed = {name: record.columns[name] for side in self.sides for name in side.needed}
        self.made = [name for side in self.sides for name in side.names]
        for side in self.sides:
            side.load_day(ANY_DAY)

    def add(self, rows: pa.Table) -> pa.Table:
        """Returns rows with the columns in `made`. A row without events has empty lists and counts of 0.

        Args:
            rows: They have the columns in `needed`.
        """
        known = {name: single_array(rows.column(name)) for name in self.needed}
        for side in self.sides:
            for name, values in zip(side.names, side.look_up(known, ANY_DAY), strict=True):
                rows = rows.append_column(name, values.cast(self.kinds[name]))
        return rows


def _in_files(source: History | EventWindow, path: Any) -> History | EventWindow:
    """Returns a source that reads files in place of its table or path."""
    try:
        return type(source).model_validate(source.model_dump() | {"table": None, "path": path})
    except ValidationError:
        found = f"{path!r:.60}"
        raise ConfigError(f"events '{source.name}'", "a path, a glob or a list of them", found, "Correct it.") from None

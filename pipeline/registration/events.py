"""Histories and windows of a model, computed from event logs that its caller names."""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from pipeline.data.joined.reader import SourceColumns
from pipeline.data.joined.source import FeatureSource, added_columns, pin_sources
from pipeline.errors import ConfigError, closest_names
from pipeline.registration.request import TYPES, fits
from pipeline.transforms.joins import EventWindow, History
from pipeline.transforms.plan.schedule import single_array
from storage.config import WarehouseConfig
from storage.scratch import ScratchFolder
from storage.warehouse import Warehouse

LOG = "files, or {table: NAME, catalog: {uri: ..., ...}} of an event table"


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
        logs: Table or path of a log, as the model's config names it -> what is read in its place: Parquet or CSV files
            (a path, a glob or a list of them), or `{table: NAME, catalog: PROPERTIES}`: a table that an ingest made of
            `events`. Columns of other logs are not computed.
        wanted: The model's raw columns, with their types.
    Attributes:
        needed: Raw columns that name a row's key and time, with their types.
        made: The columns that it computes.
    Raises:
        ConfigError: If the model reads no such log, there is no such file, or its columns do not fit.
        DataError: If a file is unreadable.
        StorageError: If there is no such table.
    """

    def __init__(self, record: EventRecord, logs: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
        self.scratch = ScratchFolder("dlrm-events-")
        self._refuse_unknown(record, logs)
        sources = [self._open(source, logs[source.name]) for source in record.sources if source.name in logs]
        added_columns(sources, self._schema_of_rows(record))
        self.kinds = {name: kind for name, kind in wanted.items() if any(name in one.schema.names for one in sources)}
        for source in sources:
            for name in {*source.schema.names} & {*wanted}:
                if not fits(kind := source.schema.field(name).type, wanted[name]):
                    where = f"{source.pinned.where}, column '{name}'"
                    raise ConfigError(where, f"{wanted[name]} as in the training", f"{kind}", "Convert it.")
        columns = [(source, [name for name in source.schema.names if name in wanted]) for source in sources]
        self.sides = [SourceColumns(source, chosen) for source, chosen in columns if chosen]
        self.needed = {name: record.columns[name] for side in self.sides for name in side.needed}
        self.made = [name for side in self.sides for name in side.names]
        for side in self.sides:
            side.load_day(None)

    def add(self, rows: pa.Table) -> pa.Table:
        """Returns rows with the columns in `made`. A row without events has empty lists and counts of 0.

        Args:
            rows: They have the columns in `needed`.
        """
        known = {name: single_array(rows.column(name)) for name in self.needed}
        for side in self.sides:
            dates = {name: known[name].cast(pa.date32()) for name in side.on if self.needed[name] == "timestamp"}
            for name, values in zip(side.names, side.look_up(known | dates, date.min), strict=True):
                kind = self.kinds[name]
                rows = rows.append_column(name, values.cast(TYPES[kind], safe="double" not in kind))
        return rows

    def _refuse_unknown(self, record: EventRecord, logs: Mapping[str, Any]) -> None:
        names = list(dict.fromkeys(source.name for source in record.sources))
        if not isinstance(logs, Mapping):
            raise ConfigError("events", f"{', '.join(names)} and what is read for each", f"{logs!r:.60}", "Correct it.")
        for name in logs:
            if name not in names:
                remedy = f"The model reads {', '.join(names)}. Closest: {closest_names(name, names)}."
                raise ConfigError(f"events '{name}'", "an event log of the model", "none of that name", remedy)

    def _open(self, source: History | EventWindow, log: Any) -> FeatureSource:
        """Opens what is read in place of a source's log."""
        where, home = f"events '{source.name}'", Path(self.scratch.name)
        place: dict[str, Any] = {"table": None, "path": log}
        config = WarehouseConfig()
        try:
            if isinstance(log, Mapping):
                config = WarehouseConfig.model_validate({name: log[name] for name in log if name != "table"})
                place = {"table": log["table"], "path": None}
            elif not log:
                raise KeyError
            own = type(source).model_validate(source.model_dump() | place)
        except (ValidationError, KeyError):
            raise ConfigError(where, LOG, f"{log!r:.60}", "Correct it.") from None
        warehouse = Warehouse(config, home)
        return FeatureSource(pin_sources([own], Path.cwd(), warehouse)[0], warehouse)

    @staticmethod
    def _schema_of_rows(record: EventRecord) -> pa.Schema:
        """Returns key and time of the rows. A key that callers send as a time is a date."""
        kinds = {name: TYPES[kind] for name, kind in record.columns.items()}
        dates = [name for source in record.sources for name in source.on if record.columns[name] == "timestamp"]
        return pa.schema(list((kinds | dict.fromkeys(dates, pa.date32())).items()))

"""Histories and windows of a model, computed from event logs that its caller names."""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from pipeline.data.joined.reader import SourceColumns
from pipeline.data.joined.source import FeatureSource, added_columns, pin_sources
from pipeline.errors import ConfigError, closest_names
from pipeline.inference.request import TYPES, fits
from pipeline.transforms.joins import EventWindow, History
from pipeline.transforms.plan.schedule import single_array
from storage.config import WarehouseConfig
from storage.scratch import ScratchFolder
from storage.warehouse import Warehouse


class EventRecord(BaseModel, frozen=True):
    """What a packed model says of its histories and windows."""

    sources: tuple[History | EventWindow, ...]
    columns: Mapping[str, str]
    """Raw columns that name a row's key and time, with their types."""


class EventTableAddress(BaseModel, frozen=True, extra="forbid"):
    """A table that an ingest made of `events`."""

    table: str
    catalog: Mapping[str, str]
    """Properties, as in `warehouse.catalog`."""


PLACE: TypeAdapter[str | tuple[str, ...] | EventTableAddress] = TypeAdapter(
    Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] | EventTableAddress
)
"""What is read in place of a log."""


class EventColumns:
    """Computes a model's histories and windows, as while its training read the rows.

    The logs are sorted into a temporary folder when this is made, and read as they are then.

    Args:
        record: The model's.
        logs: Table or path of a log, or the end of its path -> what is read in its place: files of any format (a path,
            a glob or a list of them), or `{table: NAME, catalog: PROPERTIES}`: a table that an ingest made of `events`.
            Columns of other logs are not computed.
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
        logs = self._name_in_full(record, logs)
        sources = [self._open(source, logs[source.name]) for source in record.sources if source.name in logs]
        added_columns(sources, self._schema_of_rows(record))
        self.sides = []
        for source in sources:
            chosen = [name for name in source.schema.names if name in wanted]
            for name in chosen:
                if not fits(kind := source.schema.field(name).type, wanted[name]):
                    where = f"{source.pinned.where}, column '{name}'"
                    raise ConfigError(where, f"{wanted[name]} as in the training", f"{kind}", "Convert it.")
            if chosen:
                self.sides.append(SourceColumns(source, chosen))
        self.needed = {name: record.columns[name] for side in self.sides for name in side.needed}
        self.made = [name for side in self.sides for name in side.names]
        for side in self.sides:
            side.load_day(None)

    def add(self, rows: pa.Table) -> pa.Table:
        """Returns rows with the columns in `made`, in the log's types. Without events: empty lists and counts of 0.

        Args:
            rows: They have the columns in `needed`.
        """
        known = {name: single_array(rows.column(name)) for name in self.needed}
        for side in self.sides:
            dates = {name: known[name].cast(pa.date32()) for name in side.on if self.needed[name] == "timestamp"}
            for name, values in zip(side.names, side.look_up(known | dates, date.min), strict=True):
                rows = rows.append_column(name, values)
        return rows

    @staticmethod
    def _name_in_full(record: EventRecord, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the logs by the model's names for them, which hold the folders of the machine of the training."""
        names = list(dict.fromkeys(source.name for source in record.sources))
        if not isinstance(logs, Mapping):
            raise ConfigError("events", f"{', '.join(names)} and what is read for each", f"{logs!r:.60}", "Correct it.")
        found = {}
        for name, log in logs.items():
            meant = [one for one in names if one == name] or [one for one in names if one.endswith(f"/{name}")]
            if len(meant) != 1:
                remedy = f"The model reads {', '.join(names)}. Closest: {closest_names(name, names)}."
                problem = "several of that name" if meant else "none of that name"
                raise ConfigError(f"events '{name}'", "an event log of the model", problem, remedy)
            found[meant[0]] = log
        return found

    def _open(self, source: History | EventWindow, log: Any) -> FeatureSource:
        """Opens what is read in place of a source's log."""
        try:
            place = PLACE.validate_python(log)
        except ValidationError:
            expected = "files, or {table: NAME, catalog: {uri: ..., ...}} of an event table"
            raise ConfigError(f"events '{source.name}'", expected, f"{log!r:.60}", "Correct it.") from None
        config, read = WarehouseConfig(), dict[str, Any](table=None, path=place)
        if isinstance(place, EventTableAddress):
            config, read = WarehouseConfig(catalog=place.catalog), {"table": place.table, "path": None}
        warehouse = Warehouse(config, Path(self.scratch.name))
        own = type(source).model_validate(source.model_dump() | read)
        return FeatureSource(pin_sources([own], Path.cwd(), warehouse)[0], warehouse)

    @staticmethod
    def _schema_of_rows(record: EventRecord) -> pa.Schema:
        """Returns key and time of the rows. A key that callers send as a time is a date."""
        kinds = {name: TYPES[kind] for name, kind in record.columns.items()}
        dates = [name for source in record.sources for name in source.on if record.columns[name] == "timestamp"]
        return pa.schema(list((kinds | dict.fromkeys(dates, pa.date32())).items()))

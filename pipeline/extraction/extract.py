"""Stage entry: raw files in, labelled samples in the warehouse out."""

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import duckdb
import pyarrow as pa
from pydantic import BaseModel, Field, PositiveInt, model_validator

from pipeline.errors import ConfigError, DataError, EmptyDatasetError
from pipeline.extraction.checks import Checked, ChecksConfig
from pipeline.extraction.generator import write_logs
from pipeline.extraction.generator_config import GeneratorConfig
from pipeline.extraction.intake import (
    Intake,
    Warn,
    held_name,
    hold_back,
    inspect,
    keep_profile,
    mend_profile,
    refuse_none,
)
from pipeline.extraction.join import KEY, LEFT_OUT, REASON, SHOWN, Join, Joined
from pipeline.extraction.outcomes import Outcomes
from pipeline.extraction.samples import add_types, count_rows, dense_columns
from pipeline.extraction.sources import Format, Lookup, add_lookups, create_view, first_line, not_utf8
from pipeline.files import files_of, stamp
from pipeline.schema import FeatureSchema, resolve
from storage.query import connect, quoted
from storage.reader import DAY, SnapshotRef
from storage.warehouse import Warehouse

SPOILED = "quarantine"
"""Suffix of the table that holds refused rows."""
MEMORY = "512MB"
"""What DuckDB may hold; joins and sorts beyond it are spilled to disk."""
LATER = {
    "outcomes": ("action_column", "labels", "keep_negatives", "keep_seed"),
    "generator": ("lists_per",),
}
"""Keys of parts of the source that older versions did not have."""


class SourceConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Where rows come from."""

    path: str | tuple[str, ...] | None = None
    """Files of samples, or of the feature log: a path, a glob, or several; below the project root unless absolute."""
    format: Format = "auto"
    """auto: CSV by the file name, else Parquet. criteo: tab-separated, no header, gz too."""
    day_column: str | None = None
    """Column that gives the day (date, timestamp or ISO text)."""
    day: datetime.date | None = None
    """The one day of all rows, where the data has none."""
    outcomes: Outcomes | None = None
    """The log that labels the feature log; None: rows carry their label."""
    lookups: tuple[Lookup, ...] = ()
    """Side tables joined to the rows."""
    generator: GeneratorConfig | None = None
    """Makes both logs instead of reading yours."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.generator is None):
            raise ConfigError("source", "either `path` or `generator`", "both or neither", "Give exactly one.")
        if (self.day_column is None) == (self.day is None):
            raise ConfigError("source", "either `day_column` or `day`", "both or neither", "Give exactly one.")
        if self.generator is not None and self.outcomes is None:
            raise ConfigError("source", "`outcomes` beside `generator`", "none", "Add `outcomes: {}`.")
        if self.generator is None and self.outcomes is not None and self.outcomes.path is None:
            raise ConfigError("source.outcomes", "`path` of the outcome log", "none", "Add it.")
        return self


class IngestConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What is accepted and how it is written."""

    max_quarantined_share: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of a day's rows that may be refused; above it the day is."""
    rows_per_commit: PositiveInt = 5_000_000
    """Days are written together until this many rows; each group is one commit."""
    order_by: tuple[str, ...] = ()
    """Columns that a day's rows are sorted by when they are written, such as a session and a time; none: not sorted."""
    profile: bool = True
    """Whether new days are measured before they are written. The checks need it."""
    checks: ChecksConfig = ChecksConfig()


class IngestResult(BaseModel, frozen=True):
    """What an ingest did."""

    snapshot: SnapshotRef
    rows: int
    days_written: tuple[datetime.date, ...]
    days_skipped: tuple[datetime.date, ...]
    quarantined: Mapping[str, int]
    unmatched: Mapping[str, int]
    days_elsewhere: int
    """Days of the table that this source does not have; they stay."""
    outcomes: Mapping[str, Joined] = {}
    """Label -> what became of its outcomes, where logs were joined."""
    by_day: Mapping[datetime.date, "DayRows"] = {}
    """Of the days written."""
    days_held: tuple[datetime.date, ...] = ()
    """Days that broke a rule and stand in the table of held days instead."""
    checked: Checked = Checked()


class DayRows(BaseModel, frozen=True):
    """Where the rows of a day went: `rows` is the sum of the others."""

    rows: int
    written: int
    quarantined: int
    left_out: int
    """Negatives that were thinned out."""


@dataclass(frozen=True)
class Day:
    """What a first look at the source says of one day."""

    day: datetime.date
    rows: int
    refused: int
    identity: str
    left_out: int = 0
    """Negatives that are thinned out."""

    @property
    def kept(self) -> int:
        """Rows that are written."""
        return self.rows - self.refused - self.left_out


Report = Callable[[str, int, int], None]
"""Called with (what, done, total) while rows are made or written."""


def extract(
    source: SourceConfig,
    config: IngestConfig,
    schema: FeatureSchema,
    warehouse: Warehouse,
    table: str,
    root: Path,
    logs: Path,
    only: Iterable[datetime.date] = (),
    again: bool = False,
    report: Report = lambda what, done, total: None,
    on_checked: Callable[[Checked], None] = lambda checked: None,
    warn: Warn = lambda sentence: None,
) -> IngestResult:
    """Writes the days of a source into the warehouse; days that stand there from the same input are left alone.

    Args:
        root: Folder that relative paths start from.
        logs: Folder the generator writes its logs into.
        only: Days to write; none means all.
        again: Writes days that stand there already, too, and looks again at those that were held back.
        on_checked: Called with what the rules say of the new days, before anything is written.
        warn: Called with what went wrong and does not end the ingest.
    Raises:
        ConfigError: If the source does not have the columns that the configuration names.
        DataError: If values are of the wrong kind, too many labels of a day are bad, or a day breaks a rule that fails.
        EmptyDatasetError: If there are no rows, a day asked for has none, or no day may be written and none is.
    """
    files, outcomes = _files(source, root, logs, table, report)
    lookups = [(lookup, files_of(lookup.path, root, "source.lookups path")) for lookup in source.lookups]
    every = [*files, *outcomes, *(path for _, paths in lookups for path in paths)]
    with _connection(every, warehouse.home / "tmp") as connection:
        view, unmatched, join = _samples(connection, source, schema, files, outcomes, lookups, bool(config.order_by))
        order = _order(connection, view, config.order_by, bool(lookups or source.outcomes))
        decides = [_said(source), schema.label, _stamps(every[len(files) + len(outcomes) :])]
        decides += [config.order_by] if config.order_by else []
        shared = _fingerprint(decides + ([schema.weight] if schema.weight else []))
        stamps = {str(path.resolve()): _stamps([path]) for path in [*files, *outcomes]}
        days = _survey(connection, view, shared, stamps, None if join is None else join.files_by_day(view))
        wanted = _wanted(days, set(only))
        _refuse_spoiled(connection, view, wanted, config)
        stored = warehouse.written_days(table)
        done = {} if again else stored
        held = {} if again else warehouse.written_days(held_name(table))
        todo = [day for day in wanted if day.identity not in (done.get(day.day), held.get(day.day))]
        if join is not None and todo:
            join.attribute(view, _in(todo))
            todo = [day for day in _thinned(connection, view, todo) if day.kept or day.day in stored]
        intake = None
        if config.profile:
            numbers = _numbers(connection, view, schema, source)
            standing = {day.day: day.identity for day in wanted if day.identity == done.get(day.day)}
            mend_profile(connection, warehouse, table, standing, numbers, warn)
        if config.profile and todo:
            intake = _inspected(connection, view, todo, warehouse, table, config.checks, schema.label, numbers, warn)
        if intake is not None:
            on_checked(intake.checked)
            intake.checked.refuse()
        broken = [day for day in todo if intake is not None and day.day in intake.checked.held]
        left = [day for day in wanted if held.get(day.day) == day.identity != done.get(day.day)]
        todo = [day for day in todo if day not in broken]
        into_held = partial(_write, connection, view, warehouse, table, broken, order, lambda rows: None)
        hold_back(warehouse, table, [day.day for day in todo], into_held, bool(broken))
        refuse_none(warehouse, table, [] if todo else [day.day for day in [*broken, *left]])
        _refuse_nothing(wanted, bool(todo) or warehouse.has_table(table))
        total = sum(day.kept for day in todo)
        written = 0
        for group in _groups(todo, config.rows_per_commit):
            on_rows = partial(_report_from, report, written, total)
            _write(connection, view, warehouse, table, group, order, on_rows, table)
            keep_profile(warehouse, table, intake, {day.day: day.identity for day in group})
            written += sum(day.kept for day in group)
        refused = _refused(connection, view, [*todo, *broken])
        missing = {
            path: count_rows(connection, view, f"{column} IS NULL AND {_in(todo)}") for path, column in unmatched
        }
        counts = join.counts() if join is not None and [*todo, *broken] else {}
    return IngestResult(
        snapshot=warehouse.current(table),
        rows=written,
        days_written=tuple(day.day for day in todo),
        days_skipped=tuple(day.day for day in wanted if day.day not in {one.day for one in [*todo, *broken, *left]}),
        quarantined=refused,
        unmatched=missing,
        days_elsewhere=len(stored.keys() - {day.day for day in days}),
        outcomes=counts,
        by_day={
            day.day: DayRows(rows=day.rows, written=day.kept, quarantined=day.refused, left_out=day.left_out)
            for day in todo
        },
        days_held=tuple(sorted(day.day for day in [*broken, *left])),
        checked=intake.checked if intake is not None else Checked(),
    )


def source_days(
    source: SourceConfig,
    schema: FeatureSchema,
    warehouse: Warehouse,
    table: str,
    root: Path,
    logs: Path,
    report: Report = lambda what, done, total: None,
) -> list[datetime.date]:
    """Days that a source has rows of, in order. Arguments and errors as in `extract`."""
    files, outcomes = _files(source, root, logs, table, report)
    lookups = [(lookup, files_of(lookup.path, root, "source.lookups path")) for lookup in source.lookups]
    every = [*files, *outcomes, *(path for _, paths in lookups for path in paths)]
    with _connection(every, warehouse.home / "tmp") as connection:
        view, *_ = _samples(connection, source, schema, files, outcomes, lookups)
        stamps = {str(path.resolve()): "" for path in files}
        return [day.day for day in _survey(connection, view, "", stamps)]


@contextmanager
def open_samples(
    source: SourceConfig, schema: FeatureSchema, warehouse: Warehouse, table: str, root: Path, logs: Path
) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """The rows that an ingest of all days would write, as a view. Arguments and errors as in `extract`."""
    files, outcomes = _files(source, root, logs, table, lambda what, done, total: None)
    lookups = [(lookup, files_of(lookup.path, root, "source.lookups path")) for lookup in source.lookups]
    every = [*files, *outcomes, *(path for _, paths in lookups for path in paths)]
    with _connection(every, warehouse.home / "tmp") as connection:
        view, _, join = _samples(connection, source, schema, files, outcomes, lookups)
        if join is not None:
            join.attribute(view, f"{DAY} IS NOT NULL")
        connection.execute(f"CREATE VIEW good AS SELECT * FROM {view} WHERE __reason IS NULL AND NOT {LEFT_OUT}")
        yield connection, "good"


@contextmanager
def _connection(files: Iterable[Path], temporary: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB with a temporary folder of its own; what it finds wrong in the rows is our kind of error."""
    temporary.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix="ingest-", dir=temporary) as folder,
        connect(files, Path(folder), MEMORY) as connection,
    ):
        try:
            yield connection
        except duckdb.Error as error:
            if "Invalid string encoding" in str(error) and (found := not_utf8(list(files))) is not None:
                where = f"column '{found[1]}' of '{found[0].name}'"
                raise DataError(where, "text in UTF-8", "bytes that are none", "Write the file anew.") from error
            if isinstance(error, duckdb.OutOfMemoryException):
                raise DataError(
                    "memory of the ingest", f"at most {MEMORY} at a time", first_line(error),
                    "Ingest fewer days at once.",
                ) from error  # fmt: skip
            raise DataError("rows of the source", "readable values", first_line(error), "Mend the files.") from error


def _files(source: SourceConfig, root: Path, logs: Path, table: str, report: Report) -> tuple[list[Path], list[Path]]:
    """Files of the samples (or the feature log) and of the outcome log; the generator writes its own if absent."""
    if source.generator is None or source.outcomes is None:
        assert source.path is not None
        files = files_of(source.path, root, "source.path")
        logged = source.outcomes.path if source.outcomes else None
        return files, files_of(logged, root, "source.outcomes.path") if logged else []
    content = [_said(source)["generator"], source.outcomes.window_seconds]
    folder = logs / f"{table}-{_fingerprint(content)[:12]}"
    if not (folder / "complete").exists():
        total = source.generator.days * source.generator.rows_per_day
        made = Counter[str]()

        def on_rows(rows: int) -> None:
            made["rows"] += rows
            report("generate", made["rows"], total)

        write_logs(source.generator, folder, source.outcomes.window_seconds, on_rows)
        (folder / "complete").touch()
    return sorted((folder / "features").glob("*.parquet")), sorted((folder / "outcomes").glob("*.parquet"))


def _samples(
    connection: duckdb.DuckDBPyConnection,
    source: SourceConfig,
    schema: FeatureSchema,
    files: list[Path],
    outcomes: list[Path],
    lookups: list[tuple[Lookup, list[Path]]],
    sorted_rows: bool = False,
) -> tuple[str, list[tuple[str, str]], Join | None]:
    """The view of typed, labelled samples, (side table, its match column) pairs, and the join with the outcomes."""
    joined = bool(lookups or source.outcomes or sorted_rows)
    create_view(connection, "source", files, source.format, numbered=joined)
    view = "source"
    unmatched: list[tuple[str, str]] = []
    if lookups:
        view = add_lookups(connection, view, lookups)
        unmatched = [(lookup.path, f"__matched_{i}") for i, (lookup, _) in enumerate(lookups)]
    join, columns = None, [column for _, column in unmatched]
    if source.outcomes is not None:
        join = Join(connection, view, source.outcomes, outcomes, schema.label)
        join.set_repeated_aside()
        view, columns = join.view, [*columns, KEY, SHOWN, REASON, LEFT_OUT]
    made = source.outcomes.columns(schema.label) if source.outcomes is not None else []
    day = source.day or source.day_column
    assert day is not None  # SourceConfig has one of the two
    return add_types(connection, view, schema, day, columns, made, numbered=joined), unmatched, join


def _order(connection: duckdb.DuckDBPyConnection, view: str, wanted: Sequence[str], joined: bool) -> str:
    """How rows are sorted: as they stand in the files, or by the wanted columns first."""
    view_of = connection.view(view)
    types = {name: str(kind) for name, kind in zip(view_of.columns, view_of.types, strict=True)}
    columns = resolve(wanted, [name for name in types if not name.startswith("__")], "ingest.order_by")
    for name in columns:
        if types[name].endswith("[]"):
            raise ConfigError(f"ingest.order_by '{name}'", "one value a row", "a list", "Name another column.")
    if not columns:
        return "ORDER BY __file, __row" if joined else ""
    return f"ORDER BY {', '.join([DAY, *map(quoted, columns), '__file', '__row'])}"


def _survey(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    shared: str,
    stamps: Mapping[str, str],
    outcomes: Mapping[datetime.date, list[str]] | None = None,
) -> list[Day]:
    """Counts by day, and for each day an identity made of the files that hold its rows and, where logs are joined, of
    those that may hold outcomes of them."""
    which = f"sum(md5_number_lower(concat_ws(':', {KEY}, parse_filename(__file), __row))) FILTER (__reason IS NOT NULL)"
    rows = connection.sql(
        f"SELECT {DAY}, count(*), count(__reason), list(DISTINCT __file ORDER BY __file),"
        f" {'NULL' if outcomes is None else which} FROM {view} GROUP BY {DAY} ORDER BY {DAY}"
    ).fetchall()
    days = []
    for day, count, bad, files, aside in rows:
        content = [shared, [stamps[file] for file in files]]
        if outcomes is not None:  # a repeated impression may have its first row in the file of another day
            content += [[stamps[file] for file in outcomes.get(day, [])], str(aside or 0)]
        days.append(Day(day, count, bad, _fingerprint(content)[:16]))
    return days


def _thinned(connection: duckdb.DuckDBPyConnection, view: str, days: list[Day]) -> list[Day]:
    """The days, with the negatives that are left out of them."""
    query = f"SELECT {DAY}, count(*) FROM {view} WHERE {LEFT_OUT} AND __reason IS NULL AND {_in(days)} GROUP BY {DAY}"
    left_out = dict(connection.sql(query).fetchall())
    return [replace(day, left_out=left_out.get(day.day, 0)) for day in days]


def _wanted(days: list[Day], only: set[datetime.date]) -> list[Day]:
    if not days:
        raise EmptyDatasetError("source", "at least one row", "none", "Check source.path.")
    absent = sorted(only - {day.day for day in days})
    if absent:
        raise EmptyDatasetError(
            f"day {absent[0]}",
            f"a day of the source, {days[0].day} to {days[-1].day}",
            "no row of it",
            "Name another day.",
        )
    return [day for day in days if not only or day.day in only]


def _refuse_spoiled(connection: duckdb.DuckDBPyConnection, view: str, days: list[Day], config: IngestConfig) -> None:
    spoiled = [day for day in days if day.refused > config.max_quarantined_share * day.rows or day.refused == day.rows]
    if spoiled:
        reasons = _refused(connection, view, spoiled)
        worst = max(spoiled, key=lambda day: day.refused / day.rows)
        raise DataError(
            f"labels of {len(spoiled)} day(s), worst {worst.day}",
            f"at most {config.max_quarantined_share:.2%} bad rows a day, and a good one",
            f"{worst.refused} of {worst.rows} ({', '.join(reasons)})",
            "Mend the source, or raise ingest.max_quarantined_share.",
        )


def _refuse_nothing(days: list[Day], something: bool) -> None:
    if not something:
        raise EmptyDatasetError(
            f"{len(days)} day(s) of the source", "rows to keep", "only negatives that are thinned out",
            "Raise source.outcomes.keep_negatives.",
        )  # fmt: skip


def _inspected(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    days: list[Day],
    warehouse: Warehouse,
    table: str,
    config: ChecksConfig,
    label: str,
    numbers: Collection[str],
    warn: Warn,
) -> Intake | None:
    """The rows of days that are to be written, measured and held against the rules."""
    which = f"__reason IS NULL AND NOT {LEFT_OUT} AND {_in(days)}"
    connection.execute(f"CREATE VIEW good AS SELECT * FROM {view} WHERE {which}")
    counts = {day.day: day.kept for day in days}
    return inspect(connection, "good", counts, warehouse, table, config, label, numbers, warn)


def _numbers(connection: duckdb.DuckDBPyConnection, view: str, schema: FeatureSchema, source: SourceConfig) -> set[str]:
    """Columns whose integers are counts or labels, not ids."""
    columns = [name for name in connection.view(view).columns if not name.startswith("__")]
    made = source.outcomes.columns(schema.label) if source.outcomes is not None else []
    return {schema.label, *made, *dense_columns(schema, columns, made)}


def _refused(connection: duckdb.DuckDBPyConnection, view: str, days: list[Day]) -> dict[str, int]:
    bad = [day for day in days if day.refused]
    if not bad:
        return {}
    query = f"SELECT __reason, count(*) FROM {view} WHERE __reason IS NOT NULL AND {_in(bad)} GROUP BY 1 ORDER BY 1"
    return dict(connection.sql(query).fetchall())


def _groups(days: list[Day], rows: int) -> Iterator[list[Day]]:
    group: list[Day] = []
    for day in days:
        if group and sum(other.rows for other in group) + day.rows > rows:
            yield group
            group = []
        group.append(day)
    if group:
        yield group


def _write(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    warehouse: Warehouse,
    table: str,
    days: list[Day],
    order: str,
    on_rows: Callable[[int], None],
    into: str,
) -> None:
    """Bad rows first: if the second commit, into the table of that name, fails, running again replaces them."""
    identities = {day.day: day.identity for day in days}
    refused = sum(day.refused for day in days)
    spoiled = f"{table}_{SPOILED}"
    if refused or warehouse.has_table(spoiled):
        what = f"{DAY}, __reason AS reason, CAST(to_json(s) AS VARCHAR) AS source_row"
        query = f"SELECT {what} FROM {view} s WHERE __reason IS NOT NULL AND {_in(days)} {order}"
        reader = connection.sql(query).to_arrow_reader(65_536)
        warehouse.replace_days(spoiled, identities, reader.schema, reader, refused)
    kept = [name for name in connection.view(view).columns if not name.startswith("__")]
    columns = ", ".join(quoted(name) for name in kept)
    query = f"SELECT {columns} FROM {view} WHERE __reason IS NULL AND NOT {LEFT_OUT} AND {_in(days)} {order}"
    reader = connection.sql(query).to_arrow_reader(65_536)
    rows = sum(day.kept for day in days)
    warehouse.replace_days(into, identities, reader.schema, _counted(reader, on_rows), rows)


def _counted(batches: Iterable[pa.RecordBatch], on_rows: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    count = 0
    for batch in batches:
        yield batch
        count += batch.num_rows
        on_rows(count)


def _report_from(report: Report, base: int, total: int, rows: int) -> None:
    report("ingest", base + rows, total)


def _in(days: list[Day]) -> str:
    if not days:
        return "false"
    return f"{DAY} IN ({', '.join(f'DATE {chr(39)}{day.day.isoformat()}{chr(39)}' for day in days)})"


def _said(source: SourceConfig) -> dict[str, Any]:
    """What the source is, without keys that came later and say nothing: days of older versions keep their identity."""
    content = source.model_dump(mode="json")
    for part, keys in LATER.items():
        model = getattr(source, part)
        for key in keys if model is not None else ():
            if getattr(model, key) == type(model).model_fields[key].default:
                del content[part][key]
    return content


def _stamps(files: Iterable[Path]) -> str:
    """Name, size and time of change of files: what tells that a file is the one already read."""
    return json.dumps([stamp(path) for path in files])


def _fingerprint(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

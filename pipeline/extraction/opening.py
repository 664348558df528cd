"""A source opened: its files found or made, its rows one view of labelled samples."""

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb

from pipeline.data.files import files_of
from pipeline.data.profile import rows_of
from pipeline.errors import DataError
from pipeline.extraction.config import SourceConfig
from pipeline.extraction.generator.logs import write_logs
from pipeline.extraction.join import KEY, LEFT_OUT, REASON, SHOWN, Join
from pipeline.extraction.samples import GOOD, add_types
from pipeline.extraction.sources import add_lookups, create_view, first_line, not_utf8
from pipeline.transforms.schema import FeatureSchema
from storage.query import connect
from storage.reader import DAY
from storage.warehouse import Warehouse

MEMORY = "512MB"
"""What DuckDB may hold; joins and sorts beyond it are spilled to disk."""

Report = Callable[[str, int, int], None]
"""Called with (what, done, total) while rows are made or written."""


@dataclass(frozen=True)
class Opened:
    """The rows of a source, to be asked for."""

    connection: duckdb.DuckDBPyConnection
    view: str
    """Of `add_types`."""
    files: list[Path]
    """Of the samples, or of the feature log."""
    outcomes: list[Path]
    """Of the outcome log."""
    lookups: list[Path]
    """Of the side tables."""
    join: Join | None
    unmatched: list[tuple[str, str]]
    """(side table, column that is null where it lacks the key of the row)."""

    @property
    def columns(self) -> list[str]:
        """Columns that are stored."""
        return [name for name in self.connection.view(self.view).columns if not name.startswith("__")]

    def good(self, where: str) -> str:
        """A view of the rows to be written that meet a condition; returns its name."""
        self.connection.execute(f"CREATE VIEW good AS SELECT * FROM {self.view} WHERE {GOOD} AND {where}")
        return "good"


@contextmanager
def opened(
    source: SourceConfig,
    schema: FeatureSchema,
    warehouse: Warehouse,
    table: str,
    root: Path,
    logs: Path,
    report: Report = lambda what, done, total: None,
    numbered: bool = False,
) -> Iterator[Opened]:
    """The samples of a source; those of joined logs are labelled once `Join.attribute` is called.

    Args:
        root: Folder that relative paths start from.
        logs: Folder the generator writes its logs into.
        numbered: Whether the order of the rows is needed where nothing is joined.
    Raises:
        ConfigError: If the source does not have the columns that the configuration names.
        DataError: If values are of the wrong kind, or cannot be read while the source is open.
    """
    files, outcomes = _files(source, root, logs, table, report)
    lookups = [(lookup, files_of(lookup.path, root, "source.lookups path")) for lookup in source.lookups]
    sides = [path for _, paths in lookups for path in paths]
    with _connection([*files, *outcomes, *sides], warehouse.home / "tmp") as connection:
        numbered = bool(lookups or source.outcomes or numbered)
        create_view(connection, "source", files, source.format, numbered=numbered)
        view = add_lookups(connection, "source", lookups) if lookups else "source"
        unmatched = [(lookup.path, f"__matched_{i}") for i, lookup in enumerate(source.lookups)]
        join, columns = None, [column for _, column in unmatched]
        if source.outcomes is not None:
            join = Join(connection, view, source.outcomes, outcomes, schema.label)
            join.set_repeated_aside()
            view, columns = join.view, [*columns, KEY, SHOWN, REASON, LEFT_OUT]
        day = source.day or source.day_column
        assert day is not None  # SourceConfig has one of the two
        samples = add_types(connection, view, schema, day, columns, source.made(schema.label), numbered)
        yield Opened(connection, samples, files, outcomes, sides, join, unmatched)


def source_days(
    source: SourceConfig, schema: FeatureSchema, warehouse: Warehouse, table: str, root: Path, logs: Path
) -> list[datetime.date]:
    """Days that a source has rows of, in order. Arguments and errors as in `opened`."""
    with opened(source, schema, warehouse, table, root, logs) as rows:
        return sorted(rows_of(rows.connection, rows.view))


@contextmanager
def open_samples(
    source: SourceConfig, schema: FeatureSchema, warehouse: Warehouse, table: str, root: Path, logs: Path
) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """The rows that an ingest of all days would write, as a view. Arguments and errors as in `opened`."""
    with opened(source, schema, warehouse, table, root, logs) as rows:
        if rows.join is not None:
            rows.join.attribute(rows.view, f"{DAY} IS NOT NULL")
        yield rows.connection, rows.good("true")


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
    content = [source.said()["generator"], source.outcomes.window_seconds]
    folder = logs / f"{table}-{fingerprint(content)[:12]}"
    if not (folder / "complete").exists():
        total = source.generator.days * source.generator.rows_per_day
        made = Counter[str]()

        def on_rows(rows: int) -> None:
            made["rows"] += rows
            report("generate", made["rows"], total)

        write_logs(source.generator, folder, source.outcomes.window_seconds, on_rows)
        (folder / "complete").touch()
    return sorted((folder / "features").glob("*.parquet")), sorted((folder / "outcomes").glob("*.parquet"))


def fingerprint(value: object) -> str:
    """A hash of what a JSON value says."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

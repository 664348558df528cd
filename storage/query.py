"""DuckDB over explicit files, locked down: it can read the files it is given and nothing else."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from storage.objects import register_stores

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

BATCH_ROWS = 65_536
BATCH_VALUES = 1 << 23
"""Rows times columns of a batch: 64 MB of numbers."""

AHEAD = 4
"""Batches of a relation held whole that are taken out of it while one is used: then the next relation is computed."""


def connect(
    readable: Iterable[Path],
    temporary: Path,
    memory_limit: str = "4GB",
    threads: int | None = None,
    objects: Sequence[str] = (),
    properties: Mapping[str, str] = MappingProxyType({}),
) -> "duckdb.DuckDBPyConnection":
    """Opens an in-memory DuckDB that can read the files and folders of `readable` and spill into `temporary`.

    Times are UTC on every machine. There is no other file, no network but for these objects, and no extension, and
    settings are locked. A value injected into a statement can therefore do no harm outside these paths.

    Args:
        objects: Addresses of files in object stores, to be readable, too.
        properties: Access to these stores: `warehouse.catalog`.
    """
    import duckdb  # imported here because ranks, workers and served models import this module but never query

    temporary.mkdir(parents=True, exist_ok=True)
    connection = duckdb.connect(":memory:")
    register_stores(connection, objects, properties)
    resolved = sorted({path.resolve() for path in readable})
    for setting, value in {
        "temp_directory": str(temporary.resolve()),
        "memory_limit": memory_limit,
        "threads": threads or min(4, os.cpu_count() or 1),  # each thread needs its share of the memory
        "preserve_insertion_order": True,  # the same files must give the same rows in the same order
        "TimeZone": "UTC",  # otherwise the day of a timestamp with a zone would depend on the machine
        "arrow_large_buffer_size": True,  # a batch may hold more than 2 GB of text, or 2^31 items of lists
        "enable_progress_bar": False,  # it would print between our own lines
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allowed_directories": [f"{path}/" for path in resolved if path.is_dir()],
        "allowed_paths": [*(str(path) for path in resolved if not path.is_dir()), *objects],
        "enable_external_access": False,
        "lock_configuration": True,
    }.items():
        connection.execute(f"SET {setting} = ?", [value])
    return connection


def column_types(connection: "duckdb.DuckDBPyConnection", view: str) -> dict[str, str]:
    """Returns column -> DuckDB type of a view."""
    relation = connection.view(view)
    return dict(zip(relation.columns, map(str, relation.types), strict=True))


def stream(
    *relations: "duckdb.DuckDBPyRelation",
    rows: int | None = None,
    arrange: "Callable[[pa.Table], pa.Table] | None" = None,
) -> "tuple[pa.Schema, Iterator[pa.RecordBatch]]":
    """Returns the schema of relations and their rows in batches. Errors in the middle are DuckDB's own.

    Arrow makes an OSError of them, which would pass as a fault of a disk. A thread makes the next batch meanwhile.
    Until the last one, the connection can do nothing else.

    Args:
        rows: Of a batch. None: as many as have BATCH_VALUES, at most BATCH_ROWS.
        arrange: Applied to the rows of each relation, which is then held whole.

    Example:
        >>> import duckdb
        >>> schema, batches = stream(duckdb.sql("SELECT 1 AS a"))
        >>> schema.names, [batch.num_rows for batch in batches]
        (['a'], [1])
    """
    import duckdb

    of_batch = rows or max(1, min(BATCH_ROWS, BATCH_VALUES // len(relations[0].columns)))
    if arrange is None:
        first = relations[0].to_arrow_reader(of_batch)
        others = (batch for one in relations[1:] for batch in one.to_arrow_reader(of_batch))
        schema, every = first.schema, cast("Iterator[pa.RecordBatch]", itertools.chain(first, others))
    else:
        schema = arrange(relations[0].limit(0).to_arrow_table()).schema
        every = (batch for one in relations for batch in arrange(one.to_arrow_table()).to_batches(of_batch))

    def batches() -> "Iterator[pa.RecordBatch]":
        thread = ThreadPoolExecutor(1, "stream")
        try:
            ahead = 1 if arrange is None else AHEAD
            coming = deque(thread.submit(next, every, None) for _ in range(ahead))
            while (batch := coming.popleft().result()) is not None:
                coming.append(thread.submit(next, every, None))
                yield batch
        except OSError as error:
            kind = f"{error}".partition(" Error:")[0].title().replace(" ", "")
            raise getattr(duckdb, f"{kind}Exception", duckdb.Error)(f"{error}") from error
        finally:
            thread.shutdown(cancel_futures=True)

    return schema, batches()


def literal(text: object) -> str:
    """Quotes a text, or a path, as an SQL string.

    Example:
        >>> literal("it's")
        "'it''s'"
    """
    return "'" + f"{text}".replace("'", "''") + "'"


def quote(name: str) -> str:
    """Quotes a column name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'

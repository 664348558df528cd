"""DuckDB over explicit files, locked down: it reads what it is given and nothing else."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb


def connect(
    readable: Iterable[Path], temporary: Path, memory_limit: str = "4GB", threads: int | None = None
) -> "duckdb.DuckDBPyConnection":
    """An in-memory DuckDB that can read the files of `readable`, or below its folders, and spill into `temporary`.

    Times are UTC wherever it runs. No network, no extensions, no other files, and no setting can be changed
    afterwards, so a value that finds its way into a statement can do no harm outside these places.
    """
    import duckdb  # not above: ranks, workers and served models have plans but no questions

    temporary.mkdir(parents=True, exist_ok=True)
    connection = duckdb.connect(":memory:")
    resolved = sorted({path.resolve() for path in readable})
    for setting, value in {
        "temp_directory": str(temporary.resolve()),
        "memory_limit": memory_limit,
        "threads": threads or min(4, os.cpu_count() or 1),  # each needs its share of the memory
        "preserve_insertion_order": True,  # the same files give the same rows in the same order
        "TimeZone": "UTC",  # else the day of a timestamp with a zone would depend on the machine
        "enable_progress_bar": False,  # it would be printed between our own lines
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allowed_directories": [f"{path}/" for path in resolved if path.is_dir()],
        "allowed_paths": [str(path) for path in resolved if not path.is_dir()],
        "enable_external_access": False,
        "lock_configuration": True,
    }.items():
        connection.execute(f"SET {setting} = ?", [value])
    return connection


def column_types(connection: "duckdb.DuckDBPyConnection", view: str) -> dict[str, str]:
    """Column of a view -> its type, as DuckDB calls it."""
    relation = connection.view(view)
    return dict(zip(relation.columns, map(str, relation.types), strict=True))


def quoted(name: str) -> str:
    """A column name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'

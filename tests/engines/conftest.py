"""Spark with Iceberg's runtime over a catalog in Postgres that ours shares, and DuckDB's Iceberg extension. Install it with `tests.engines.install`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from tests.postgres import serving_postgres

CATALOGS = ("prod", "dlrm")
"""Theirs, and ours."""


class Spark:
    """A Spark session in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", address: str, folder: Path) -> None:
        self.process, self.address, self.folder = process, address, folder

    def sql(self, *statements: str | dict[str, Any]) -> list[tuple[Any, ...]]:
        """Runs statements, and returns the rows of the last one."""
        rows: list[tuple[Any, ...]] = []
        for one in statements:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps(one) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline() or '{"error": "Spark ended"}')
            assert "error" not in answer, f"{one}: {answer['error']}"
            rows = [tuple(row) for row in answer["rows"]]
        return rows

    def properties(self, catalog: str) -> dict[str, str]:
        """pyiceberg's properties of a catalog."""
        return {"type": "sql", "uri": self.address, "warehouse": f"file://{self.folder / catalog}"}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    engines = Path(os.environ.get("DLRM_ENGINES", ""))
    if not (engines / "pyspark").is_dir():
        pytest.skip("needs Spark: run `python -m tests.engines.install FOLDER` and set DLRM_ENGINES=FOLDER")
    folder = tmp_path_factory.mktemp("spark")
    with serving_postgres() as address, (folder / "spark.log").open("w") as log:
        url = address.replace("postgresql+psycopg2://tester@", "jdbc:postgresql://")
        command = [
            sys.executable,
            str(Path(__file__).parent / "spark_shell.py"),
            str(engines),
            url,
            str(folder),
            *CATALOGS,
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder,
            env={**os.environ, "PYTHONPATH": str(engines), "PYSPARK_PYTHON": sys.executable},
        )  # fmt: skip
        try:
            yield Spark(process, address, folder)
        finally:
            process.terminate()
            process.wait(60)


class DuckDb:
    """DuckDB's Iceberg extension in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", spark: Spark) -> None:
        self.process, self.spark = process, spark

    def rows(self, catalog: str, table: str, columns: str) -> list[tuple[Any, ...]]:
        """Returns columns of all rows of a table at its newest snapshot."""
        location = SqlCatalog(catalog, **self.spark.properties(catalog)).load_table(table).metadata_location
        path = location.removeprefix("file://").removeprefix("file:")
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(f"SELECT {columns} FROM iceberg_scan('{path}')") + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "DuckDB ended"}')
        assert "error" not in answer, answer["error"]
        return [tuple(row) for row in answer["rows"]]


@pytest.fixture(scope="session")
def duck(spark: Spark) -> Iterator[DuckDb]:
    folder = Path(os.environ["DLRM_ENGINES"]) / "duckdb"
    if not folder.is_dir():
        pytest.skip("needs DuckDB's Iceberg extension: run `python -m tests.engines.install FOLDER` anew")
    with (spark.folder / "duckdb.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "duckdb_shell.py"), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        try:
            yield DuckDb(process, spark)
        finally:
            process.kill()
            process.wait()

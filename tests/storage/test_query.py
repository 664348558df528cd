"""DuckDB reads the files it is given and nothing else."""

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.query import connect, quote, stream


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("given", "other"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / name / "rows.parquet")
        (tmp_path / name / "rows.csv").write_text("x\n1\n")
    return tmp_path


@pytest.fixture
def connection(folders: Path) -> duckdb.DuckDBPyConnection:
    return connect([folders / "given"], folders / "temporary")


def test_given_folders_and_files_can_be_read(folders: Path, connection: duckdb.DuckDBPyConnection) -> None:
    assert connection.sql(f"SELECT sum(x) FROM '{folders}/given/rows.parquet'").fetchall() == [(6,)]
    by_file = connect([folders / "given" / "rows.csv"], folders / "temporary")
    assert by_file.sql(f"SELECT x FROM '{folders}/given/rows.csv'").fetchall() == [(1,)]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM '{root}/other/rows.parquet'",
        "SELECT * FROM read_csv('{root}/other/rows.csv')",
        "SELECT * FROM read_text('{root}/given/../other/rows.csv')",
        "SELECT * FROM read_blob('/etc/passwd')",
        "SELECT * FROM glob('/etc/*')",
        "COPY (SELECT 1) TO '{root}/other/new.csv'",
        "ATTACH '{root}/other/new.db'",
        "SELECT * FROM 'https://example.com/x.parquet'",
        "INSTALL httpfs",
        "LOAD httpfs",
    ],
)
def test_nothing_else_can_be_read_written_or_loaded(
    folders: Path, connection: duckdb.DuckDBPyConnection, statement: str
) -> None:
    before = sorted(folders.rglob("*"))
    with pytest.raises(duckdb.Error):
        connection.sql(statement.format(root=folders)).fetchall()
    assert sorted(folders.rglob("*")) == before


def test_a_given_file_does_not_open_its_folder(folders: Path) -> None:
    connection = connect([folders / "given" / "rows.csv"], folders / "temporary")
    with pytest.raises(duckdb.PermissionException):
        connection.sql(f"SELECT * FROM '{folders}/given/rows.parquet'").fetchall()


def test_settings_are_locked(connection: duckdb.DuckDBPyConnection) -> None:
    for setting, value in {
        "enable_external_access": "true", "allowed_directories": "['/']", "lock_configuration": "false",
        "memory_limit": "'1TB'", "autoload_known_extensions": "true", "TimeZone": "'Asia/Tokyo'",
    }.items():  # fmt: skip
        with pytest.raises(duckdb.Error, match="locked"):
            connection.execute(f"SET {setting} = {value}")


def test_time_is_utc_wherever_it_runs(connection: duckdb.DuckDBPyConnection) -> None:
    assert connection.sql("SELECT current_setting('TimeZone')").fetchall() == [("UTC",)]
    late = connection.sql("SELECT CAST(TIMESTAMPTZ '2024-01-01 23:30:00-01' AS DATE)::VARCHAR").fetchall()
    assert late == [("2024-01-02",)]


def test_data_beyond_memory_is_spilled_into_the_temporary_folder(folders: Path) -> None:
    connection = connect([], folders / "temporary", memory_limit="60MB")
    query = "SELECT count(DISTINCT hash(i)::VARCHAR || repeat('x', 40)) FROM range(600_000) t(i)"
    assert connection.sql(query).fetchall() == [(600_000,)]
    assert (folders / "temporary").is_dir()


def test_a_name_is_quoted() -> None:
    assert [quote(name) for name in ("a", "a b", 'a"; DROP TABLE x; --')] == [
        '"a"',
        '"a b"',
        '"a""; DROP TABLE x; --"',
    ]
    odd = 'a"; DROP TABLE x; --'
    assert duckdb.sql(f"SELECT 1 AS {quote(odd)}").columns == [odd]


def test_no_progress_bar_among_the_output(connection: duckdb.DuckDBPyConnection) -> None:
    assert connection.sql("SELECT current_setting('enable_progress_bar')").fetchall() == [(False,)]


def test_text_and_lists_of_a_batch_may_exceed_32_bit_offsets(connection: duckdb.DuckDBPyConnection) -> None:
    schema = connection.sql("SELECT 'a' AS x, [1] AS y, ['b'] AS z").to_arrow_reader(1).schema
    assert [str(kind).split("<")[0] for kind in schema.types] == ["large_string", "large_list", "large_list"]


FAILING = "SELECT CASE WHEN range < 200_000 THEN range ELSE error('such as ' || range) END AS a FROM range(300_000)"


def test_an_error_in_the_middle_of_a_stream_is_duckdbs() -> None:
    """The first batches come before the value that ends it."""
    with duckdb.connect() as connection:
        _, batches = stream(connection.sql(FAILING), rows=65_536)
        with pytest.raises(duckdb.InvalidInputException, match="such as 200000"):
            sum(batch.num_rows for batch in batches)
        relations = connection.sql("FROM range(100_000) t(a)"), connection.sql(FAILING)
        _, arranged = stream(*relations, arrange=lambda rows: rows.slice(1))
        assert [next(arranged).num_rows for _ in range(2)] == [65_536, 34_463]
        with pytest.raises(duckdb.InvalidInputException, match="such as 200000"):
            next(arranged)


def test_a_stream_that_is_not_read_to_its_end_leaves_the_connection_free() -> None:
    with duckdb.connect() as connection:
        computed: list[int] = []
        relations = [connection.sql(f"SELECT {number} AS a FROM range(10)") for number in range(20)]
        _, batches = stream(*relations, rows=10, arrange=lambda rows: computed.append(len(rows)) or rows)  # type: ignore[func-returns-value]
        assert next(batches)["a"].to_pylist() == [0] * 10
        batches.close()  # type: ignore[attr-defined]
        assert len(computed) < 10
        assert connection.sql("SELECT 1").fetchall() == [(1,)]

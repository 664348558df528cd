"""Formats, files and side tables, compared with pandas or counted by hand."""

import datetime
import gzip
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.extraction.sources import CRITEO_COLUMNS

DAY = datetime.date(2024, 1, 1)
FRAME = pd.DataFrame(
    {"user": [3, 1, 2, 1], "price": [0.5, None, 2.0, 4.0], "word": ["a", "ß", None, "x,y"], "label": [0, 1, 0, 1]}
)


def save(frame: pd.DataFrame, path: Path) -> None:
    frame.to_parquet(path, index=False) if path.suffix == ".parquet" else frame.to_csv(path, index=False)


# Formats


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "A.CSV.gz"])
def test_parquet_and_csv_give_the_same_rows(tmp_path: Path, ingest: Any, stored: Any, name: str) -> None:
    save(FRAME, tmp_path / name.replace("A.CSV.gz", "A.csv.gz"))
    if name == "A.CSV.gz":
        (tmp_path / "A.csv.gz").rename(tmp_path / name)
    result = ingest({"path": name, "day": "2024-01-01"}, dense=["price"])
    assert result.rows == 4
    expected = FRAME.assign(day=DAY)
    got = stored()[list(expected.columns)].astype({"label": "int64"})
    pd.testing.assert_frame_equal(got, expected, check_dtype=False)


def test_a_folder_named_like_a_csv_is_not_one(tmp_path: Path, ingest: Any, stored: Any) -> None:
    (tmp_path / "my.csvs").mkdir()
    save(FRAME, tmp_path / "my.csvs" / "a.parquet")
    assert ingest({"path": "my.csvs/*", "day": "2024-01-01"}).rows == 4


def test_several_files_by_glob_keep_their_order_and_fill_absent_columns(
    tmp_path: Path, ingest: Any, stored: Any
) -> None:
    save(FRAME, tmp_path / "b.parquet")
    save(FRAME.drop(columns="price").assign(extra=7), tmp_path / "a.parquet")
    ingest({"path": "*.parquet", "day": "2024-01-01"})
    frame = stored()
    assert frame["user"].tolist() == [3, 1, 2, 1] * 2
    assert frame["price"].isna().tolist() == [True] * 4 + [False, True, False, False]
    assert frame["extra"].isna().tolist() == [False] * 4 + [True] * 4


def test_csv_kinds_come_from_all_rows_of_all_files(tmp_path: Path, ingest: Any, stored: Any) -> None:
    """Late text makes the column text: 30,000 rows are more than a sample."""
    lines = [f"{i},0" for i in range(30_000)]
    (tmp_path / "a.csv").write_text("\n".join(["user,label", *lines, "u30000,1", ""]))
    (tmp_path / "b.csv").write_text("user,label\n5,1\n")
    assert ingest({"path": "*.csv", "day": "2024-01-01"}).rows == 30_002
    assert stored()["user"].tolist() == [*map(str, range(30_000)), "u30000", "5"]


def test_a_tab_separated_file_with_a_header(tmp_path: Path, ingest: Any, stored: Any) -> None:
    (tmp_path / "a.tsv").write_text("user\tlabel\n1\t0\n2\t1\n")
    ingest({"path": "a.tsv", "format": "csv", "day": "2024-01-01"})
    assert stored()["user"].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["a.txt", "a.tsv.gz"])
def test_criteo_lines(tmp_path: Path, ingest: Any, stored: Any, name: str) -> None:
    first = ["1", *map(str, range(-1, 12)), *(f"{i:08x}" for i in range(26))]
    second = ["0", *[""] * 13, '"a', *[""] * 25]
    text = "\n".join("\t".join(line) for line in (first, second)) + "\n"
    with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt") as file:
        file.write(text)
    ingest({"path": name, "format": "criteo", "day": "2014-06-01"}, sparse=["cat_*"], dense=["int_*"])
    frame = stored()[list(CRITEO_COLUMNS)]
    assert frame["label"].tolist() == [1, 0]
    assert frame.iloc[0, 1:].tolist() == [*range(-1, 12), *(f"{i:08x}" for i in range(26))]
    assert frame.iloc[1, 1:].isna().sum() == 38
    assert frame["cat_1"].tolist() == ["00000000", '"a']


def test_the_criteo_sample(shared_data: Path, ingest: Any, stored: Any) -> None:
    path = shared_data / "criteo10k" / "train_first10k.txt.gz"
    result = ingest({"path": str(path), "format": "criteo", "day": "2014-06-01"}, sparse=["cat_*"], dense=["int_*"])
    names = list(CRITEO_COLUMNS)
    text = pd.read_csv(path, sep="\t", header=None, names=names, dtype=str, keep_default_na=False)
    frame = stored()
    assert (result.rows, dict(result.quarantined)) == (10_000, {})
    assert frame["label"].mean() == pytest.approx(0.2182, abs=1e-9)
    got = pd.DataFrame(
        {name: ["" if pd.isna(v) else str(v) for v in frame[name].astype(object)] for name in names[14:]}
    )
    pd.testing.assert_frame_equal(got, text[names[14:]])
    for name in names[1:14]:
        pd.testing.assert_series_equal(frame[name].astype(float), pd.to_numeric(text[name]).astype(float))


def test_files_that_cannot_be_read(tmp_path: Path, ingest: Any, put: Any) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError) as error:
        ingest({"path": "a.parquet", "day": "2024-01-01"})
    sentence = str(error.value)
    assert sentence.startswith(
        "files of source.path, first 'a.parquet': expected readable files, format 'parquet', got "
    )
    assert sentence.endswith(". Set source.format, or correct the files.")
    put("b.parquet", user=[1], label=[0])
    with pytest.raises(
        DataError, match=r"^files of source\.lookups 'a\.parquet', first 'a\.parquet'.*\. Correct the files\.$"
    ):
        ingest({"path": "b.parquet", "day": "2024-01-01", "lookups": [{"path": "a.parquet", "on": ["user"]}]})


@pytest.mark.parametrize("line", ["0\tnot a number" + "\t" * 38, "0\t1\t2"])
def test_broken_lines_stop_the_ingest_before_anything_is_written(
    tmp_path: Path, ingest: Any, warehouse: Any, line: str
) -> None:
    (tmp_path / "a.txt").write_text("1" + "\t" * 39 + "\n" + line + "\n")
    with pytest.raises(DataError) as error:
        ingest({"path": "a.txt", "format": "criteo", "day": "2014-06-01"}, sparse=["cat_*"])
    assert str(error.value).startswith("rows of the source: expected readable values, got ")
    assert "Line: 2" in str(error.value)
    assert str(error.value).endswith(". Correct the files.")
    assert not list((tmp_path / "home").rglob("*.parquet"))
    assert not list((tmp_path / "home" / "tmp").iterdir())


def test_a_truncated_file_among_others(tmp_path: Path, ingest: Any, put: Any) -> None:
    for name in ("a.parquet", "b.parquet"):
        put(name, user=list(range(1_000)), label=[0] * 1_000)
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"b\.parquet"):
        ingest({"path": "*.parquet", "day": "2024-01-01"})


# Side tables


def test_lookups_add_columns_and_count_what_has_no_match(ingest: Any, stored: Any, put: Any, tmp_path: Path) -> None:
    rows = pd.DataFrame(
        {"user": [1, 2, None, 9, 1], "store": ["a", "b", "a", "a", "c"], "shelf": [1, 1, 2, 1, 1]}
    ).assign(label=[0, 1, 0, 1, 1])
    users = pd.DataFrame({"user": [2, 1], "age": [40, 30]})
    shelves = pd.DataFrame({"shelf": [1, 2, 1], "store": ["a", "a", "b"], "width": [10, 20, 30]})
    save(rows, tmp_path / "rows.parquet")
    save(users, tmp_path / "users.csv")
    save(shelves, tmp_path / "shelves.parquet")
    lookups = [{"path": "users.csv", "on": ["user"]}, {"path": "shelves.parquet", "on": ["store", "shelf"]}]
    result = ingest({"path": "rows.parquet", "day": "2024-01-01", "lookups": lookups}, dense=["age", "width"])
    assert dict(result.unmatched) == {"users.csv": 2, "shelves.parquet": 1}
    expected = rows.merge(users, "left", on="user").merge(shelves, "left", on=["store", "shelf"])
    got = stored()[list(expected.columns)]
    pd.testing.assert_frame_equal(got, expected, check_dtype=False)


def test_rows_keep_their_order_with_any_join(ingest: Any, stored: Any, put: Any) -> None:
    """DuckDB would stream a side table that is larger than the rows, in the order of the side table."""
    keys = [(i * 7_919) % 50_000 for i in range(3_000)]
    put("rows.parquet", user=keys, label=[0, 1] * 1_500)
    put("users.parquet", user=list(range(50_000)), age=[user % 90 for user in range(50_000)])
    ingest({"path": "rows.parquet", "day": "2024-01-01", "lookups": [{"path": "users.parquet", "on": ["user"]}]})
    frame = stored()
    assert frame["user"].tolist() == keys
    assert frame["age"].tolist() == [user % 90 for user in keys]


@pytest.mark.parametrize(
    ("columns", "kind", "sentence"),
    [
        (
            {"user": [1, 1, 2], "age": [1, 2, 3]},
            DataError,
            "source.lookups 'side.parquet': expected a unique key (\"user\"), got 3 rows of 2 keys. "
            "Remove duplicate and empty keys.",
        ),
        (
            {"user": [1], "price": [1], "label": [0]},
            ConfigError,
            "source.lookups 'side.parquet': expected columns that the rows do not have, got price, label in both. "
            "Rename them.",
        ),
        (
            {"member": [1]},
            ConfigError,
            "source.lookups 'side.parquet': expected key column 'user' in both tables, got a table without it. "
            "Correct `on`.",
        ),
    ],
)
def test_side_tables_that_cannot_be_joined(
    ingest: Any, put: Any, columns: dict[str, list[int]], kind: type[Exception], sentence: str
) -> None:
    put("rows.parquet", user=[1], price=[1.0], label=[0])
    put("side.parquet", **columns)
    with pytest.raises(kind) as error:
        ingest({"path": "rows.parquet", "day": "2024-01-01", "lookups": [{"path": "side.parquet", "on": ["user"]}]})
    assert str(error.value) == sentence

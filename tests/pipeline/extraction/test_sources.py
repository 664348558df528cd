"""Formats, files and side tables, compared with pandas or counted by hand."""

import datetime
import decimal
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipeline.data.formats.csv import CRITEO_COLUMNS
from pipeline.data.formats.reading import readable_files
from pipeline.errors import ConfigError, ContractError, DataError, EmptyDatasetError
from pipeline.extraction.sources import create_view
from pipeline.extraction.writing import in_file_order
from storage.query import column_types, connect

DAY = datetime.date(2024, 1, 1)
FRAME = pd.DataFrame(
    {"user": [3, 1, 2, 1], "price": [0.5, None, 2.0, 4.0], "word": ["a", "ß", None, "x,y"], "label": [0, 1, 0, 1]}
)


def save(frame: pd.DataFrame, path: Path) -> None:
    if path.suffix == ".parquet":
        frame.to_parquet(path, index=False)
    elif "json" in path.name:
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, sep="\t" if ".tsv" in path.name.lower() else ",")


# Formats


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.csv", "A.CSV.gz", "a.json", "a.jsonl.gz", "it's.ndjson", "a.tsv", "a.TSV.gz"]
)
def test_parquet_csv_and_json_give_the_same_rows(tmp_path: Path, ingest: Any, stored: Any, name: str) -> None:
    save(FRAME, tmp_path / name.lower())  # pandas knows small letters
    (tmp_path / name.lower()).rename(tmp_path / name)
    result = ingest({"path": name, "day": "2024-01-01"}, dense=["price"])
    assert result.rows == 4
    expected = FRAME.assign(day=DAY)
    got = stored()[list(expected.columns)].astype({"label": "int64"})
    pd.testing.assert_frame_equal(got, expected, check_dtype=False)


def test_json_lines_have_the_values_that_json_reads(tmp_path: Path, ingest: Any, stored: Any) -> None:
    """Types fit all lines of all files: numbers that come late, text that looks like dates, lists, columns of nulls."""
    lines = [
        {
            "user": 1,
            "tags": [5, None, 7],
            "when": "2024-01-01 10:00:00",
            "mixed": 1,
            "word": "2024-01-01",
            "none": None,
        },
        {"user": None, "tags": [], "when": None, "mixed": "x", "word": 'a"b, c', "none": None},
        {"user": 2**60, "tags": None, "when": "2024-01-01 23:59:59", "mixed": None, "price": 0.25, "it's": 1},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line | {"label": 1}) + "\n" for line in lines[:2]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line | {"label": 0}) + "\n" for line in lines[2:]))
    ingest({"path": "*.jsonl", "day": "2024-01-01", "rename": {"it's": "its"}})
    frame = stored()
    assert "none" not in frame.columns
    assert [None if pd.isna(value) else int(value) for value in frame["user"].astype("Int64")] == [1, None, 2**60]
    assert [None if value is None else [None if pd.isna(one) else int(one) for one in value] for value in frame["tags"]] == [
        [5, None, 7], [], None,
    ]  # fmt: skip
    assert [None if pd.isna(value) else str(value) for value in frame["when"]] == [
        "2024-01-01 10:00:00", None, "2024-01-01 23:59:59",
    ]  # fmt: skip
    assert frame["mixed"].tolist()[:2] == ["1", "x"]
    assert frame["word"].tolist()[:2] == ["2024-01-01", 'a"b, c']
    assert frame[["mixed", "word"]].isna().iloc[2].all()
    assert [None if pd.isna(value) else value for value in frame["price"]] == [None, None, 0.25]
    assert [None if pd.isna(value) else value for value in frame["its"]] == [None, None, 1]


def test_a_broken_line_of_json_is_named(tmp_path: Path, ingest: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"user": 1, "label": 1}\n{"user": 2, "lab\n')
    with pytest.raises(
        DataError,
        match=r"^JSON file 'a\.jsonl': expected one object a line, got no JSON in line 2\. Write one object a line",
    ):
        ingest({"path": "a.jsonl", "day": "2024-01-01"})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.json"])
def test_one_day_of_a_partitioned_log_opens_no_other_file(tmp_path: Path, ingest: Any, stored: Any, name: str) -> None:
    days = [datetime.date(2024, 1, day) for day in (1, 2, 3)]
    for i, day in enumerate(days):
        (tmp_path / "log" / f"day={day}").mkdir(parents=True)
        save(FRAME.assign(user=FRAME["user"] + 10 * i), tmp_path / "log" / f"day={day}" / name)
    whole = (tmp_path / "log" / "day=2024-01-01" / name).read_bytes()
    (tmp_path / "log" / "day=2024-01-01" / name).write_bytes(b"\x00 no rows")
    source = {"path": f"log/day=*/{name}", "day_column": "day"}
    first = ingest(source, only=[days[1]])
    assert (first.days_written, first.rows, first.days_elsewhere) == ((days[1],), 4, 0)
    assert stored()["user"].tolist() == [13, 11, 12, 11]
    with pytest.raises((DataError, ConfigError)):
        ingest(source)
    (tmp_path / "log" / "day=2024-01-01" / name).write_bytes(whole)
    again = ingest(source)
    assert (again.days_skipped, again.days_written) == ((days[1],), (days[0], days[2]))
    with pytest.raises(
        EmptyDatasetError, match="day 2024-01-09: expected a day of the source, 2024-01-01 to 2024-01-03"
    ):
        ingest(source, only=[datetime.date(2024, 1, 9)])


def test_a_folder_gives_the_day_alone_and_in_any_format(tmp_path: Path, ingest: Any, stored: Any) -> None:
    for place in ("hour=1/ds=20240101", "hour=2/ds=20240102"):
        (tmp_path / place).mkdir(parents=True)
        save(FRAME.assign(hour=7), tmp_path / place / "a.parquet")
    ingest({"path": "hour=*/ds=*/a.parquet", "day_column": "ds", "date_format": "%Y%m%d"})
    frame = stored()
    assert frame["day"].astype(str).tolist() == ["2024-01-01"] * 4 + ["2024-01-02"] * 4
    assert set(frame["hour"]) == {7}  # the files have it


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


def test_text_in_csv_files_is_stored_as_it_is_written(tmp_path: Path, ingest: Any, stored: Any) -> None:
    """Also if it looks like a time: a day with one other value would store another text for the same category."""
    lines = ["a,b,c,d,e,label", "10:30,007,12e4,2024-1-5,1:2,0", "9:05,42,ab12,2024-01-06,n/a,1"]
    for number, text in enumerate(lines[1:]):
        (tmp_path / f"{number}.csv").write_text(f"{lines[0]}\n{text}\n")
    ingest({"path": "*.csv", "day": "2024-01-01"}, sparse=["a"])
    frame = stored()
    assert [
        ",".join(map(str, row)) for row in frame[["a", "b", "c", "d", "e", "label"]].itertuples(index=False)
    ] == lines[1:]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["2024-02-01", "2024-02-29"], [datetime.date(2024, 2, 1), datetime.date(2024, 2, 29)]),
        (["2024-02-01 10:30", "2024-02-02T23:59:59.5"],
         [pd.Timestamp("2024-02-01 10:30"), pd.Timestamp("2024-02-02 23:59:59.5")]),
        (["2024-02-01T23:30:00-05:00", "2024-02-01T23:30Z"],
         [pd.Timestamp("2024-02-02 04:30", tz="UTC"), pd.Timestamp("2024-02-01 23:30", tz="UTC")]),
        (["2024-02-01", "2024-02-30"], None),
        (["2024-02-01", "later"], None),
        (["2024-02-01", "2024-02-01 10:30"], None),
        (["2024-02-01 10:30", "2024-02-01 10:30Z"], None),
        (["02/13/2024", "02/14/2024"], None),
        (["2024-2-5", "2024-2-6"], None),
        (["24-02-05", "24-02-06"], None),
        (["epoch", "infinity"], None),
    ],
)  # fmt: skip
def test_only_iso_dates_of_csv_files_are_dates(
    tmp_path: Path, ingest: Any, stored: Any, texts: list[str], expected: list[Any] | None
) -> None:
    (tmp_path / "a.csv").write_text(
        "user,at,label\n" + "".join(f"{i},{text},0\n" for i, text in enumerate(["", *texts]))
    )
    ingest({"path": "a.csv", "day": "2024-01-01"})
    assert stored()["at"].tolist()[1:] == (texts if expected is None else expected)


def test_a_late_value_that_is_no_date_keeps_the_column_text(tmp_path: Path, ingest: Any, stored: Any) -> None:
    lines = [f"{i},2024-01-01,0" for i in range(3_000)]
    (tmp_path / "a.csv").write_text("\n".join(["user,at,label", *lines, "3000,soon,1", ""]))
    ingest({"path": "a.csv", "day": "2024-01-01"})
    assert stored()["at"].tolist() == ["2024-01-01"] * 3_000 + ["soon"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_days_in_another_format_need_to_be_told(tmp_path: Path, ingest: Any, stored: Any, kind: str) -> None:
    """Of one file a day DuckDB would read 02/10/2024 as the 2nd of October and 02/13/2024 as the 13th of February."""
    for day in range(10, 15):
        save(pd.DataFrame({"user": [day], "date": f"02/{day}/2024", "label": [0]}), tmp_path / f"{day}.{kind}")
    source = {"path": f"*.{kind}", "day_column": "date"}
    error: pytest.ExceptionInfo[ContractError]
    with pytest.raises(DataError) as error:
        ingest(source)
    assert str(error.value) == (
        "source.day_column 'date': expected a date in every row, got no date in 5 rows, such as '02/10/2024' in "
        f"'10.{kind}'. Write ISO dates, times in UTC, or set source.date_format; or filter those rows out."
    )
    with pytest.raises(DataError) as error:
        ingest({**source, "date_format": "%d/%m/%Y"})
    assert str(error.value) == (
        f"column 'date' of '13.{kind}': expected times as source.date_format says, '%d/%m/%Y', got '02/13/2024'. "
        "Correct the value, or the format."
    )
    with pytest.raises(ConfigError) as error:
        ingest({**source, "date_format": "%d/%Q"})
    assert str(error.value) == (
        "source.date_format: expected formats as of strptime, such as '%m/%d/%Y', got '%d/%Q'. Correct the format."
    )
    result = ingest({**source, "date_format": "%m/%d/%Y"})
    assert result.days_written == tuple(datetime.date(2024, 2, day) for day in range(10, 15))
    assert [day.day for day in stored()["day"]] == stored()["user"].tolist()


def test_a_format_reads_days_that_look_like_numbers(tmp_path: Path, ingest: Any) -> None:
    save(pd.DataFrame({"user": [1, 2], "date": [20240131, 20240201], "label": [0, 1]}), tmp_path / "a.csv")
    result = ingest({"path": "a.csv", "day_column": "date", "date_format": ["%Y%m%d", "%m/%d/%Y"]})
    assert result.days_written == (datetime.date(2024, 1, 31), datetime.date(2024, 2, 1))


def test_a_format_that_looks_like_iso_wins(tmp_path: Path, ingest: Any) -> None:
    (tmp_path / "a.csv").write_text("user,date,label\n1,2024-02-01,0\n2,2024-03-01,1\n")
    result = ingest({"path": "a.csv", "day_column": "date", "date_format": "%Y-%d-%m"})
    assert result.days_written == (datetime.date(2024, 1, 2), datetime.date(2024, 1, 3))


def test_quotes_after_the_first_rows(tmp_path: Path, ingest: Any, stored: Any) -> None:
    rows = [["plain", "0"]] * 30_000 + [['he said ""hi"", twice', "1"]]
    (tmp_path / "a.csv").write_text(
        "word,label\n" + "".join(f'"{a}",{b}\n' if b == "1" else f"{a},{b}\n" for a, b in rows)
    )
    (tmp_path / "b.csv").write_text("label;word\n1;x,y\n")
    ingest({"path": "a.csv", "day": "2024-01-01"}, sparse=["word"])
    assert stored()["word"].tolist()[-2:] == ["plain", 'he said "hi", twice']
    ingest({"path": "*.csv", "day": "2024-01-01"}, sparse=["word"])  # files may differ in their delimiters
    assert stored()["word"].tolist()[-2:] == ['he said "hi", twice', "x,y"]


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


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda content: content[:-20], "file 'd2.parquet'"),
    "half": (lambda content: content[: len(content) // 2], "file 'd2.parquet'"),
    "empty": (lambda content: b"", "file 'd2.parquet'"),
    "another format": (lambda content: b"user,label\n1,0\n", "file 'd2.parquet'"),
    "a page of zeros": (
        lambda content: content[:100] + bytes(1_900) + content[2_000:],
        "column 'user' of 'd2.parquet'",
    ),
    "a page's header": (lambda content: content[:4] + b"\xff" * 36 + content[40:], "column 'user' of 'd2.parquet'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("read_as", ["rows", "side table", "outcomes"])
def test_the_damaged_one_of_several_files_is_named(
    tmp_path: Path, ingest: Any, put: Any, damage: str, read_as: str
) -> None:
    rows = range(3_000)
    for day in (1, 2, 3):
        at = pa.array([datetime.datetime(2025, 1, day)] * 3_000, pa.timestamp("us"))
        label = {} if read_as == "side table" else {"label": [row % 2 for row in rows], "at": at}
        put(f"d{day}.parquet", user=[row + 3_000 * day for row in rows], **label)
    change, place = DAMAGES[damage]
    damaged = tmp_path / "d2.parquet"
    damaged.write_bytes(change(damaged.read_bytes()))
    source: dict[str, Any] = {"path": "d*.parquet", "day_column": "at"}
    if read_as != "rows":
        put(
            "rows.parquet",
            user=[1],
            at=[datetime.datetime(2025, 1, 1)],
            **({"label": [0]} if "side" in read_as else {}),
        )
        source["path"] = "rows.parquet"
    if read_as == "side table":
        source["lookups"] = [{"path": "d*.parquet", "on": ["user"]}]
    if read_as == "outcomes":
        source["outcomes"] = {
            "path": "d*.parquet",
            "on": "user",
            "feature_time": "at",
            "outcome_time": "at",
            "window_seconds": 86_400,
        }
    with pytest.raises(
        DataError, match=rf"^{place}: expected Parquet that can be read, got .*\. Fetch or write the file"
    ):
        ingest(source)


@pytest.mark.parametrize("line", ["0\tnot a number" + "\t" * 38, "0\t1\t2"])
def test_broken_lines_stop_the_ingest_before_anything_is_written(
    tmp_path: Path, ingest: Any, warehouse: Any, line: str
) -> None:
    (tmp_path / "a.txt").write_text("1" + "\t" * 39 + "\n" + line + "\n")
    with pytest.raises(DataError) as error:
        ingest({"path": "a.txt", "format": "criteo", "day": "2014-06-01"}, sparse=["cat_*"])
    assert str(error.value).startswith("CSV file 'a.txt': expected readable values, got line 2: ")
    assert str(error.value).endswith(". Correct the file, or set source.format.")
    assert not list((tmp_path / "home").rglob("*.parquet"))
    assert not list((tmp_path / "home" / "tmp").iterdir())


def test_a_truncated_file_among_others(tmp_path: Path, ingest: Any, put: Any) -> None:
    for name in ("a.parquet", "b.parquet"):
        put(name, user=list(range(1_000)), label=[0] * 1_000)
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"b\.parquet"):
        ingest({"path": "*.parquet", "day": "2024-01-01"})


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_file_name_is_not_a_pattern(tmp_path: Path, ingest: Any, stored: Any, kind: str) -> None:
    names = ["x/clicks2", "x/clicks[2]", "x/a", "x/*", "x/?", "y[x]/a", "[x]/a"]
    for user, name in enumerate(names):
        path = tmp_path / f"{name}.{kind}"
        path.parent.mkdir(exist_ok=True)
        save(pd.DataFrame({"user": [user], "label": [user % 2]}), path)
        save(pd.DataFrame({"user": [user], "age": [user + 50]}), tmp_path / f"side{name[2:].replace('/', '')}.{kind}")
    save(pd.DataFrame({"user": range(7), "age": range(50, 57)}), tmp_path / f"side[2].{kind}")
    ingest(
        {"path": [f"{name}.{kind}" for name in names], "day": "2024-01-01",
         "lookups": [{"path": f"side[[]2].{kind}", "on": ["user"]}]}
    )  # fmt: skip
    frame = stored()
    assert sorted(frame["user"]) == list(range(7))
    assert (frame["age"] == frame["user"] + 50).all()


# Side tables


def test_lookups_add_columns_and_count_what_has_no_match(ingest: Any, stored: Any, put: Any, tmp_path: Path) -> None:
    rows = pd.DataFrame(
        {"user": [1, 2, None, 9, 1], "store": ["a", "b", "a", "a", "c"], "shelf": [1, 1, 2, 1, 1]}
    ).assign(label=[0, 1, 0, 1, 1])
    rows["user"] = rows["user"].astype("Int64")
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


@pytest.mark.parametrize("zone", [None, "Asia/Tokyo"])
def test_a_side_table_with_times_gives_what_held_at_the_time_of_a_row(
    ingest: Any, stored: Any, tmp_path: Path, zone: str | None
) -> None:
    """As pandas' merge_asof does, from the same moment on, less the delay."""
    random, start = np.random.default_rng(4), pd.Timestamp("2024-01-01")
    hours = pd.to_timedelta(np.sort(random.integers(0, 24, 400)), unit="h")
    rows = pd.DataFrame({"user": random.integers(0, 9, 400), "at": start + hours, "label": random.integers(0, 2, 400)})
    users = pd.DataFrame({"user": np.repeat(np.arange(7), 8), "since": np.tile(np.arange(8) * 3, 7)})
    users = users.assign(since=start + pd.to_timedelta(users["since"], unit="h"), tier=random.integers(0, 99, 56))
    expected = pd.merge_asof(
        rows.assign(border=rows["at"] - pd.Timedelta("2h")), users.sort_values("since"), left_on="border",
        right_on="since", by="user",
    )  # fmt: skip
    there = users if zone is None else users.assign(since=users["since"].dt.tz_localize("UTC").dt.tz_convert(zone))
    save(rows, tmp_path / "rows.parquet")
    save(there.sample(frac=1.0, random_state=1), tmp_path / "users.parquet")
    lookup = {"path": "users.parquet", "on": ["user"], "valid_from": "since", "as_of": "at", "delay_seconds": 7_200}
    result = ingest({"path": "rows.parquet", "day_column": "at", "lookups": [lookup]}, dense=["tier"])
    got = stored()
    assert got["at"].tolist() == rows["at"].tolist()
    assert "since" not in got
    np.testing.assert_array_equal(got["tier"].to_numpy(float), expected["tier"].to_numpy(float))
    assert dict(result.unmatched) == {"users.parquet": int(expected["tier"].isna().sum())}
    assert 0 < expected["tier"].isna().sum() < 300


def test_a_date_of_a_side_table_is_the_end_of_its_day(ingest: Any, stored: Any, put: Any) -> None:
    days = [datetime.date(2024, 1, day) for day in (1, 2, 3)]
    put("rows.parquet", user=[1, 1, 1], day=days, label=[0, 1, 0])
    put("users.parquet", user=[1, 1], since=days[:2], tier=[1, 2])
    lookup = {"path": "users.parquet", "on": ["user"], "valid_from": "since", "as_of": "day"}
    ingest({"path": "rows.parquet", "day_column": "day", "lookups": [lookup]}, dense=["tier"])
    assert stored().sort_values("day")["tier"].tolist()[1:] == [1, 2]
    assert stored().sort_values("day")["tier"].isna().tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        ({"valid_from": "since", "as_of": "at"}, "as_of 'at': expected timestamps or dates, got BIGINT."),
        ({"valid_from": "sinse", "as_of": "at"}, "expected column 'sinse' in the side table, got none of that name."),
        ({"valid_from": "since"}, "expected `as_of` together with `valid_from`, got one of them."),
        ({"delay_seconds": 9}, "expected `as_of` with `delay_seconds`, got none."),
    ],
)
def test_times_that_cannot_be_compared_are_refused(ingest: Any, put: Any, times: Any, sentence: str) -> None:
    put("rows.parquet", user=[1], at=[1], label=[0])
    put("side.parquet", user=[1], since=[datetime.date(2024, 1, 1)], tier=[1])
    lookup = {"path": "side.parquet", "on": ["user"], **times}
    with pytest.raises((ConfigError, ValidationError)) as error:
        ingest({"path": "rows.parquet", "day": "2024-01-01", "lookups": [lookup]})
    assert sentence in str(error.value)


@pytest.mark.parametrize("at_once", [700, 4_000, 10_000, 1 << 23])
def test_rows_keep_their_order_with_any_join(
    ingest: Any, stored: Any, put: Any, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """DuckDB would stream a side table that is larger than the rows, in the order of the side table."""
    monkeypatch.setattr("pipeline.extraction.writing.PORTION_VALUES", at_once)
    monkeypatch.setattr("pipeline.extraction.writing.PORTION_ROWS", 1)
    keys = [(i * 7_919) % 50_000 for i in range(3_000)]
    lists = [[key] * (key % 9) for key in keys]
    sizes = {"a1": 100, "a[1]": 1_900, "b'?": 1_000}  # patterns of DuckDB, in the order of their names
    end = 0
    for name, rows in sizes.items():
        begin, end = end, end + rows
        days = [datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)] * (rows // 2)
        put(
            f"rows/{name}.parquet",
            user=keys[begin:end],
            label=[0, 0, 1, 1] * (rows // 4),
            at=days,
            ids=lists[begin:end],
        )
    put("users.parquet", user=list(range(50_000)), age=[user % 90 for user in range(50_000)])
    ingest({"path": "rows/*", "day_column": "at", "lookups": [{"path": "users.parquet", "on": ["user"]}]})
    frame = stored()
    assert frame["user"].tolist() == keys[::2] + keys[1::2]
    assert frame["age"].tolist() == [user % 90 for user in frame["user"]]
    assert [[*one] for one in frame["ids"]] == lists[::2] + lists[1::2]


def test_batches_of_joined_rows_end_where_they_always_did() -> None:
    """They decide where files end, and so the order of training rows: these are the ends after DuckDB's own sort."""
    order = np.random.default_rng(1).permutation(240_000)
    files = order // 120_000 + 1
    mixed = pa.table({"value": order, "__number": files, "__row": order % 120_000})
    kept = pa.concat_tables([mixed.slice(begin, 70_001) for begin in range(0, 240_000, 70_001)])  # as DuckDB may cut
    for rows in (kept, kept.take(np.argsort(order))):
        batches = in_file_order(rows).to_batches(65_536)
        assert [len(batch) for batch in batches] == [65_536, 57_344, 65_536, 51_584]
        assert pa.Table.from_batches(batches)["value"].to_pylist() == list(range(240_000))
    assert in_file_order(rows.slice(0, 0)).equals(rows.slice(0, 0).select(["value"]))


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
            {"user": [1], "Price": [1], "label": [0]},
            ConfigError,
            "source.lookups 'side.parquet': expected columns that the rows do not have, got Price, label in both. "
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


BIG = 2**53
"""From here on a DOUBLE no longer tells neighbouring integers apart."""
MIXED = {
    "float and integer": (pa.array([float(BIG), None]), pa.array([BIG, BIG + 1]), "DOUBLE", "BIGINT"),
    "integer and float": (pa.array([BIG, BIG + 1]), pa.array([float(BIG), 0.0]), "BIGINT", "DOUBLE"),
    "floats": (pa.array([1.0, 2.0]), pa.array([1.0, 2.0]), "DOUBLE", "DOUBLE"),
    "integer and text": (pa.array([7, 8]), pa.array(["7", "007"]), "BIGINT", "VARCHAR"),
    "text and date": (pa.array(["2024-01-01", "2024-1-1"]), pa.array([DAY, None]), "VARCHAR", "DATE"),
    "date and timestamp": (
        pa.array([DAY, DAY]), pa.array([datetime.datetime(2024, 1, 1), None], pa.timestamp("us")), "DATE", "TIMESTAMP",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_keys_of_different_kinds_are_not_joined(ingest: Any, put: Any, warehouse: Any, case: str) -> None:
    keys, side, first, second = MIXED[case]
    put("rows.parquet", key=keys, user=[1, 2], label=[0, 1])
    put("side.parquet", key=side, age=[10, 11])
    with pytest.raises(ConfigError) as error:
        ingest({"path": "rows.parquet", "day": "2024-01-01", "lookups": [{"path": "side.parquet", "on": ["key"]}]})
    assert str(error.value) == (
        "source.lookups 'side.parquet', key 'key': expected integers, text, dates or timestamps in both tables, "
        f"got {first} in the rows, {second} in the side table. Write the key with one type in all files. Use integers "
        "for ids: a column of pandas with missing ids needs the type Int64."
    )
    assert not warehouse.has_table("events")


@pytest.mark.parametrize(
    ("keys", "side"),
    [
        (pa.array([1, 2], pa.int32()), pa.array([2, 1], pa.uint64())),
        (pa.array([BIG + 1, 2]), pa.array([decimal.Decimal(2), decimal.Decimal(BIG + 1)], pa.decimal128(38, 0))),
        (pa.array(["b", "a"]), pa.array(["a", "b"]).dictionary_encode()),
        (pa.array([DAY, None]), pa.array([datetime.date(2024, 1, 2), DAY])),
    ],
    ids=["widths", "decimals", "text", "dates"],
)
def test_keys_of_one_kind_match_exactly(ingest: Any, put: Any, stored: Any, keys: pa.Array, side: pa.Array) -> None:
    put("rows.parquet", key=keys, user=[1, 2], label=[0, 1])
    put("side.parquet", key=side, age=[11, 10])
    ingest({"path": "rows.parquet", "day": "2024-01-01", "lookups": [{"path": "side.parquet", "on": ["key"]}]})
    assert stored()["age"].tolist()[0] == 10
    assert len(stored()) == 2


@pytest.mark.slow
def test_a_wide_file_of_text_takes_little_memory(tmp_path: Path) -> None:
    """DuckDB's memory for one query over all columns grew with their square."""
    columns = {f"c{number}": ["x", "2024-01-01"] for number in range(250)}
    save(pd.DataFrame(columns | {"day": ["2024-01-01"] * 2}), tmp_path / "wide.csv")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = _peak_bytes()
    wide, limits = tmp_path / "wide.csv", {"memory_limit": "512MB"}
    with (
        readable_files({wide: "csv"}, tmp_path / "copies", limits=limits) as read,
        connect([tmp_path / "copies"], tmp_path, "512MB") as connection,
    ):
        create_view(connection, "wide", [read[wide]])
        assert column_types(connection, "wide")["day"] == "DATE"
    assert _peak_bytes() - before < 200 << 20


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_names_of_columns_that_are_not_utf8_are_refused(tmp_path: Path, ingest: Any) -> None:
    pq.write_table(pa.table({"word": [1], "label": [0]}), tmp_path / "a.parquet", store_schema=False)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"word", b"w\xffrd"))
    with pytest.raises(DataError, match=r"^names of columns of 'a\.parquet': expected text in UTF-8, got other"):
        ingest({"path": "a.parquet", "day": "2024-01-01"})

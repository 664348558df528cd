"""Files as other programs write them: each row and value is read, or one sentence says why not."""

import bz2
import datetime
import gzip
import json
import lzma
from collections.abc import Callable
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.formats.reading import copy_typed, count_rows_of, read_files, readable_files
from pipeline.data.formats.types import FILE
from pipeline.errors import DataError
from storage.query import connect

Read = Callable[..., dict[str, list[Any]]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads files of tmp_path together: column -> values."""

    def run(*names: str, **options: Any) -> dict[str, list[Any]]:
        home = tmp_path / "home"
        with ExitStack() as stack:
            files = stack.enter_context(readable_files({tmp_path / name: "auto" for name in names}, home))
            connection = stack.enter_context(connect([tmp_path, home], home / "spill", threads=1))
            rows = read_files(connection, [files[tmp_path / name] for name in names], **options)
            found = dict(zip(rows.columns, zip(*rows.fetchall(), strict=True), strict=True))
        assert list(home.iterdir()) == [home / "spill"]  # copies are gone
        return {name: [*values] for name, values in found.items() if name != FILE}

    return run


@pytest.mark.parametrize("first", ["#1001", "#sale", "//", "%x", "--", "!", ";x", "'a", '""""', "@"])
def test_no_line_is_a_comment(tmp_path: Path, read: Read, first: str) -> None:
    lines = [f"{first},{number}" if number % 2 else f"a{number},{number}" for number in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["word,n", *lines, ""]))
    assert read("a.csv")["n"] == list(range(30))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n3,4\na,b,c\n5,6,7\n", "line 4: Expected Number of Columns: 2 Found: 3"),
        ("a,b\n1,2\n3\n", "line 3: Expected Number of Columns: 2 Found: 1"),
        ('a,b\n1,2\n3,"x\n', "line 3: Value with unterminated quote found"),
        ("a,b\n1,2,3\n", "line 2: Expected Number of Columns: 2 Found: 3 in '1,2,3'"),
        ('a,b\n1,"2\n2"\n1,2,3\n', "line 3: Expected Number of Columns: 2 Found: 3 in '1,2,3'"),
        ("a,b\n1,2\n3,4,\n", "Expected 2 columns, got 3: 3,4,"),
        ('a,b\n1,"2\n2"\n3,4,,\n', "Expected 2 columns, got 4: 3,4,,"),
        ("a;b\n1;2;\n3;4;\n", "Expected 2 columns, got 3: 1;2;"),
        ("a;b,c\n1;2\n3\n", "line 3: Expected Number of Columns: 2 Found: 1"),
        ("a,a\n1,2\n", "'a' twice"),
        ("id,ID\n1,2\n", "'id' and 'ID'"),
        ("a,b\r\n1,2\n3,4\r\n5,6\n", "lines that end in several ways, such as \\r\\n and \\n"),
        ('a,b\n"x,1\ny,2\n', "line 2: Value with unterminated quote found"),
        ("a,b\n1,2\n\x1a", "line 3: Expected Number of Columns: 2 Found: 1"),
        ("\na\n1\n", "a name in the first line, got an empty line"),
    ],
)
def test_lines_that_do_not_fit_are_named(tmp_path: Path, read: Read, text: str, said: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError) as error:
        read("a.csv")
    assert "CSV file 'a.csv'" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(("packer", "kind"), [(bz2, "bzip2"), (lzma, "xz"), (gzip, "gzip without the ending")])
def test_other_compression_is_named(tmp_path: Path, read: Read, packer: Any, kind: str) -> None:
    (tmp_path / "a.csv").write_bytes(packer.compress(b"a,b\n" + b"1,2\n" * 99))
    with pytest.raises(DataError, match=f"expected text, plain or by gzip or zstd, got {kind}"):
        read("a.csv")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["F", "T"], ["F", "T"]),
        (["yes", "no"], ["yes", "no"]),
        (["true", "false"], ["true", "false"]),
        (["0x1A", "26"], ["0x1A", "26"]),
        (["1.10", "1.9"], ["1.10", "1.9"]),
        (["1.10", "2.95"], [1.1, 2.95]),
        (["1.5", "2", "-0.25"], [1.5, 2.0, -0.25]),
        (["007", "42"], ["007", "42"]),
        (["+5", "6"], ["+5", "6"]),
        (["NA", "DE"], ["NA", "DE"]),
        (["null", "nan"], ["null", "nan"]),
        (["1e5", "2e5"], ["1e5", "2e5"]),
        (["1e-05", "0.5"], [1e-05, 0.5]),
        (["12345678901234567890123", "1"], ["12345678901234567890123", "1"]),
        (["0.1234567890123456789", "1"], ["0.1234567890123456789", "1"]),
        ([f"{2**64 - 1}", "5"], [2**64 - 1, 5]),
        ([f"{2**62}", "-5"], [2**62, -5]),
    ],
)
def test_text_becomes_a_number_only_where_nothing_is_lost(
    tmp_path: Path, read: Read, texts: list[str], expected: list[Any]
) -> None:
    for number, text in enumerate(texts):  # a file each: types are decided over all
        (tmp_path / f"{number}.csv").write_text(f"x,y\n{text},a\n,b\n")
    found = read(*(f"{number}.csv" for number in range(len(texts))))["x"]
    assert found == [one for value in expected for one in (value, None)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n\n1,x\n\n\n3,y\n\n", {"a": [1, 3], "b": ["x", "y"]}),
        ('a,b\n1,x\n3,"y"', {"a": [1, 3], "b": ["x", "y"]}),
        ("a,b\r1,x\r3,y\r", {"a": [1, 3], "b": ["x", "y"]}),
        ('a,b\n"1\n2",x\n"3\r\n4",y\n', {"a": ["1\n2", "3\r\n4"], "b": ["x", "y"]}),
        ('a,b\n"say ""hi""",x\n"""",y\n', {"a": ['say "hi"', '"'], "b": ["x", "y"]}),
        ('a,b\nx"y,x\nz"",y\n', {"a": ['x"y', 'z""'], "b": ["x", "y"]}),
        ('a,b\n"c:\\d\\",x\n\\N,y\n', {"a": ["c:\\d\\", "\\N"], "b": ["x", "y"]}),
        ("a;b\n1,5;x\n2,5;y\n", {"a": ["1,5", "2,5"], "b": ["x", "y"]}),
        ('\ufeff"a","b"\n1,x\n3,y\n', {"a": [1, 3], "b": ["x", "y"]}),
        pytest.param(f"a,b\n{'x' * 200_000},x\n", {"a": ["x" * 200_000], "b": ["x"]}, id="long"),
        ("a\n1\n\n2\n\n", {"a": [1, None, 2, None]}),
        ('"a\nx",b\n1,x\n', {"a\nx": [1], "b": ["x"]}),
    ],
)
def test_odd_csv_is_read_as_it_says(tmp_path: Path, read: Read, text: str, expected: dict[str, list[Any]]) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode())
    assert read("a.csv") == expected


def test_text_of_a_table_stays_text(tmp_path: Path, read: Read) -> None:
    (tmp_path / "a.csv").write_text("x,y,z\n5,5,inf\n6,6.5,2\n")
    assert read("a.csv", stored={"x": "VARCHAR", "y": "VARCHAR", "z": "DOUBLE"}) == {
        "x": ["5", "6"], "y": ["5", "6.5"], "z": [float("inf"), 2.0],
    }  # fmt: skip


LARGE = 2**60 + 1
DAY = datetime.date(2025, 1, 1)


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([5.0, None], [LARGE, 7, 5, None]),  # pandas writes whole numbers with nulls as fractions
        ([2.5, 1.0], None),
        ([float(2**60), 1.5], None),
    ],
)
def test_whole_numbers_stay_exact_whatever_another_file_says(
    tmp_path: Path, read: Read, form: str, second: list[Any], expected: list[Any] | None
) -> None:
    for name, values in (("1", [LARGE, 7]), ("2", second)):
        path = tmp_path / f"{name}.{form}"
        if form == "parquet":
            pq.write_table(pa.table({"x": values}), path)
        elif form == "csv":
            path.write_text("x,y\n" + "".join(f"{'' if one is None else one},a\n" for one in values))
        else:
            path.write_text("".join(json.dumps({"x": one}) + "\n" for one in values))
    if form == "csv":  # text says all
        found = read("1.csv", "2.csv")["x"]
        assert [None if one is None else Decimal(one) for one in found] == [None if one is None else Decimal(repr(one)) for one in [LARGE, 7, *second]]  # fmt: skip
    elif expected is None:
        with pytest.raises(
            DataError, match=rf"column 'x' of '2\.{form}'.* one of which is {LARGE}, got .* Write ids as"
        ):
            read(f"1.{form}", f"2.{form}")
    else:
        assert read(f"1.{form}", f"2.{form}")["x"] == expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.array([1], pa.int32()), pa.array([2**40]), [1, 2**40]),
        (pa.array([1], pa.int32()), pa.array([0.5]), [1.0, 0.5]),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([3]), [2**64 - 1, 3]),
        (pa.array([Decimal(2**62)], pa.decimal128(38, 0)), pa.array([3]), [2**62, 3]),
        (pa.array([Decimal(2**62)], pa.decimal128(38, 2)), pa.array([2**62 + 1]), [2**62, 2**62 + 1]),
        (pa.array([2**24], pa.float32()), pa.array([2**60]), [2**24, 2**60]),
        (pa.array(["a"]), pa.array([2**60]), ["a", f"{2**60}"]),
        (pa.array(["a"]), pa.array([5.0]), ["a", "5"]),
        (pa.array([[1, 2]]), pa.array([3]), [[1, 2], [3]]),
        (pa.array([[1, 2]]), pa.array([[2**60]]), [[1, 2], [2**60]]),
        (pa.array([True]), pa.array([3]), [1, 3]),
        (pa.nulls(1), pa.array([2**60]), [None, 2**60]),
        (pa.array([b"a"]), pa.array(["b"]), ["a", "b"]),
        (pa.array([None], pa.string()), pa.array([[2**60]]), [None, [2**60]]),  # without a value it has no type
        (pa.array([None], pa.float64()), pa.array([DAY]), [None, DAY]),
        (pa.array([None], pa.string()), pa.array([b"\xff"]), [None, b"\xff"]),
        (pa.array([[]], pa.list_(pa.string())), pa.array([[2**60]]), [[], [2**60]]),
    ],
)
def test_one_type_over_all_files(
    tmp_path: Path, read: Read, one: pa.Array, other: pa.Array, expected: list[Any]
) -> None:
    pq.write_table(pa.table({"x": one}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"y": ["b"], "x": other}), tmp_path / "2.parquet")
    assert read("1.parquet", "2.parquet") == {"x": expected, "y": [None, "b"]}
    assert read("2.parquet", "1.parquet") == {"x": expected[::-1], "y": ["b", None]}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (pa.array([2.0**24 + 2], pa.float32()), pa.array([2**60]), "whole numbers, as in other files"),
        (pa.array([0], pa.timestamp("us")), pa.array([0], pa.timestamp("us", "UTC")), "times without a zone"),
        (pa.array([b"\xff"]), pa.array(["b"]), "text in UTF-8"),
    ],
)
def test_types_that_exclude_each_other_are_refused(
    tmp_path: Path, read: Read, one: pa.Array, other: pa.Array, said: str
) -> None:
    pq.write_table(pa.table({"x": one}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"x": other}), tmp_path / "2.parquet")
    with pytest.raises(DataError, match=rf"^column 'x' of '[12]\.parquet': expected {said}"):
        read("1.parquet", "2.parquet")


def test_a_value_among_lists_is_a_list_of_one(tmp_path: Path, read: Read) -> None:
    lines = [{"x": [1, 2, 3], "s": ["a"]}, {"x": 4, "s": "b"}, {"x": None}, {"x": [], "s": []}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read("a.jsonl") == {"x": [[1, 2, 3], [4], None, []], "s": [["a"], ["b"], None, []]}


def test_ids_of_64_bits_and_lists_without_items_keep_their_values(tmp_path: Path, read: Read) -> None:
    most = 2**64 - 1
    (tmp_path / "a.jsonl").write_text(f'{{"x": {most}, "l": [{most}, 7], "e": []}}\n{{"x": 7, "l": null, "e": null}}\n')
    (tmp_path / "b.jsonl").write_text(f'{{"e": [{LARGE}]}}\n')
    found = {"x": [most, 7], "l": [[most, 7], None], "e": [[], None]}
    assert read("a.jsonl") == found
    assert read("a.jsonl", "b.jsonl") == {
        "x": [most, 7, None], "l": [[most, 7], None, None], "e": [[], None, [LARGE]],
    }  # fmt: skip
    copies = copy_typed([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path)
    assert pq.read_table(copies[0]).to_pydict() == found


def test_numbers_in_objects_refuse_no_file(tmp_path: Path, read: Read) -> None:
    """No feature reads them, and the ingest leaves them out."""
    (tmp_path / "a.jsonl").write_text(f'{{"x": 1, "o": {{"id": {LARGE}, "p": 0.5}}}}\n')
    assert read("a.jsonl")["x"] == [1]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"id": 1, "ID": 2}\n', "'ID' and 'id'"),
        ('{"user_id": 1}\n{"User_Id": 2}\n', "'User_Id' and 'user_id'"),
        ('{"cat_1": 1, "x": 2}\n{"CAT_1": 2}\n', "'CAT_1' and 'cat_1'"),
        ('{"cat_1_2": 1}\n{"cat_1": 2, "x": 3}\n{"CAT_1_2": 2}\n', "'CAT_1_2' and 'cat_1_2'"),
        ('{"ä": 1}\n{"Ä": 2}\n', "'Ä' and 'ä'"),
        ('{"x": 1}\n' * 30_000 + '{"X": 2}\n', "'X' and 'x'"),
        ('{"x": 1}\n' * 30_000 + "null\n", "one object a line, got another value, the first of which is object 30001"),
        ('{"x": [1]}\n' * 9 + "null\n", "one object a line, got another value, the first of which is object 10"),
        ('{"x": {"y": 1}}\n' * 9 + "null\n", "one object a line, got another value, the first of which is object 10"),
        ('{"x": 1}\n{}\n' + "null\n", "one object a line, got another value, the first of which is object 3"),
        ('{"x": 1}\n[1, 2]\n', "one object a line, got another value, the first of which is object 2"),
        ('{"": 1, "x": 2}\n', "keys that can be names, got an empty one"),
        (f'{{"x": {LARGE}}}\n{{"x": 0.5}}\n', f"whole numbers of 64 bits, as {LARGE} is, got 0.5"),
        (f'{{"x": [{LARGE}, 0.5]}}\n', "whole numbers of 64 bits"),
        (f'{{"x": {2**64 - 1}}}\n{{"x": -5}}\n', f"whole numbers of 64 bits, as {2**64 - 1} is, got -5"),
        (f'{{"x": [{2**64 - 1}, -5]}}\n', f"whole numbers of 64 bits, as {2**64 - 1} is, got -5"),
    ],
)
def test_objects_that_cannot_be_one_table_are_refused(tmp_path: Path, read: Read, lines: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(DataError) as error:
        read("a.jsonl")
    assert said in str(error.value)


LINES = b"".join(b"%d,%d\n" % (i, 7 * i) for i in range(1, 20_001))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(LINES)[:-500], "Compressed file ended before the end-of-stream marker was reached"),
        (gzip.compress(LINES)[:-8] + bytes(4) + gzip.compress(LINES)[-4:], "CRC check failed"),
        (gzip.compress(LINES) + b"garbage", "Compressed file ended before"),
        (LINES, r"Not a gzipped file \(b'1,'\)"),
        (gzip.compress(LINES + b"1,2,3\n"), "line 20001: Expected Number of Columns: 2 Found: 3"),
    ],
)
def test_a_damaged_compressed_file_is_named(tmp_path: Path, read: Read, content: bytes, said: str) -> None:
    (tmp_path / "a.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match=rf"^CSV file 'a\.csv\.gz': expected readable values, got {said}"):
        read("a.csv.gz")


def test_a_compressed_file_in_parts_or_padded_is_read_whole(tmp_path: Path, read: Read) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x\n1\n") + gzip.compress(b"2\n") + bytes(512))
    assert read("a.csv.gz")["x"] == [1, 2]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"x": 1}\n{oops\n', 2),
        ('{"x": 1}\n\n\n' * 5 + "{oops\n", 16),
        ('[\n {"x": 1},\n {"x": 2}\n]\n', 1),
        ('{\n "x": 1\n}\n', 1),
        ('{"x": 1}\n{"x": 1},\n', 2),
        ('{"x": 1} {"x": 2}\n', 1),
    ],
)
def test_a_line_that_is_no_json_is_told_with_its_number(tmp_path: Path, read: Read, text: str, line: int) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    said = rf"^JSON file 'a\.jsonl\.gz': expected one object a line, got no JSON in line {line}\. Write one"
    with pytest.raises(DataError, match=said):
        read("a.jsonl.gz")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
def test_the_mark_of_utf8_is_no_text(tmp_path: Path, read: Read, name: str) -> None:
    """Windows' tools begin a file with it."""
    content = '\ufeff{"a": 1}\n{"a": 2}\n'.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read(name)["a"] == [1, 2]


def test_names_of_several_files_differ_in_more_than_case(tmp_path: Path, read: Read) -> None:
    (tmp_path / "a.csv").write_text("user,n\n1,2\n")
    (tmp_path / "b.jsonl").write_text('{"User": 1}\n')
    with pytest.raises(DataError, match="expected names that differ in more than their case, got 'user' and 'User'"):
        read("a.csv", "b.jsonl")
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="got 'x' twice"):
        read("c.parquet")


def test_formats_may_be_mixed_and_files_may_be_empty(tmp_path: Path, read: Read) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfx;y\r\n1;a\r\n\r\n2;b\r\n"))
    (tmp_path / "b.csv").write_text("")
    (tmp_path / "c.jsonl").write_text('{"y": "c", "x": 3}\n\n')
    (tmp_path / "d.csv").write_text("x,y\n")
    pq.write_table(pa.table({"filename": ["f"]}), tmp_path / "e.parquet")
    assert read("a.csv.gz", "b.csv", "c.jsonl", "d.csv", "e.parquet") == {
        "x": [1, 2, 3, None], "y": ["a", "b", "c", None], "filename": [None, None, None, "f"],
    }  # fmt: skip


def test_rows_are_counted_by_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text('x,y\n1,"two\nlines"\n2,b\n')
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n{"x": 2}\n{"x": 3}')
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "c.parquet")
    files = {tmp_path / name: "auto" for name in ("a.csv", "b.jsonl", "c.parquet")}
    with readable_files(files, tmp_path / "home") as read:  # type: ignore[arg-type]
        assert [count_rows_of(read[file], {}) for file in files] == [2, 3, 2]
    lossy = duckdb.DuckDBPyConnection.read_csv

    class Lossy:
        """A reader that drops a row without a word."""

        def __init__(self, connection: Any) -> None:
            self.connection = connection

        def __getattr__(self, name: str) -> Any:
            return getattr(self.connection, name)

        def __enter__(self) -> "Lossy":
            return self

        def __exit__(self, *error: object) -> None:
            self.connection.close()

        def cursor(self) -> "Lossy":
            return Lossy(self.connection.cursor())

        def read_csv(self, *args: Any, **options: Any) -> Any:
            return lossy(self.connection, *args, **options).limit(1)

    monkeypatch.setattr(
        "pipeline.data.formats.reading.connect", lambda *args, **options: Lossy(connect(*args, **options))
    )
    with (
        pytest.raises(DataError, match=r"file 'a\.csv': expected 2 rows, as its lines say, got 1"),
        readable_files({tmp_path / "a.csv": "csv"}, tmp_path / "home"),
    ):
        pass


def test_copies_have_the_types_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"x,y\n{2**64 - 1},NA\n")
    (tmp_path / "b.csv").write_text("x,y\n5,\n")
    copies = copy_typed([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path)
    assert [pq.read_table(copy).to_pydict() for copy in copies] == [
        {"x": [2**64 - 1], "y": ["NA"]}, {"x": [5], "y": [None]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "read_as"),
    [
        ([7, -3], [7, -3]),
        ([2**63 - 1, -(2**63)], [2**63 - 1, -(2**63)]),
        ([2**53 + 1, "2.0", -1], None),
        ([[7, -3], [-(2**62) - 1]], [[7, -3], [-(2**62) - 1]]),
        ([[7, -3], 2**62 + 1], [[7, -3], [2**62 + 1]]),
        ([[7], 2**64 - 1], [[7], [2**64 - 1]]),
        ([[7], None, -1], [[7], None, [-1]]),
        ([5.0, -(2**53) - 1], [5, -(2**53) - 1]),
        ([2**64 - 1, -1], None),
        ([[2**64 - 1], -1], None),
    ],
)
@pytest.mark.parametrize("beside", [[1, 2], [2**64 - 1, 5]])
def test_json_has_whole_numbers_of_both_signs(
    tmp_path: Path, read: Read, values: list[Any], read_as: list[Any] | None, beside: list[int]
) -> None:
    lines = [json.dumps({"a": a, "b": b}) for a, b in zip(values, [*beside, 0], strict=False)]
    (tmp_path / "a.json").write_text("\n".join(lines))
    if read_as is None and isinstance(values[1], int):
        with pytest.raises(DataError, match=r"column 'a' of .*: expected whole numbers of 64 bits, as \d+ is, got -1"):
            read("a.json")
        return
    found = read("a.json")
    assert found["a"] == (read_as or [str(value) for value in values])
    assert found["b"] == [*beside, 0][: len(values)]


def test_times_in_nanoseconds_with_a_zone_are_times(tmp_path: Path, read: Read) -> None:
    """pandas writes them. DuckDB has a type of their own for them, and few functions."""
    time = datetime.datetime(2024, 1, 31, 23, 30, tzinfo=datetime.UTC)
    for name, kind in (("a", pa.timestamp("ns", "Europe/Berlin")), ("b", pa.timestamp("ms", "UTC"))):
        columns = {"t": pa.array([time, None], kind), "l": pa.array([[time], []], pa.list_(kind))}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    found = read("a.parquet", "b.parquet")
    assert found == {"t": [time, None] * 2, "l": [[time], []] * 2}
    assert {value.utcoffset() for value in found["t"] if value} == {datetime.timedelta()}


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_column_of_the_name_that_numbers_rows_is_refused(tmp_path: Path, read: Read, name: str) -> None:
    """Files that DuckDB wrote may have it. It was left out without a word, or an error of DuckDB's."""
    if name == "a.csv":
        (tmp_path / name).write_text("x,file_row_number\n1,0\n")
    else:
        pq.write_table(pa.table({"x": [1], "File_Row_Number": [0]}), tmp_path / name)
    with pytest.raises(DataError, match=rf"file '{name}': expected columns of other names than file_row_number"):
        read(name)

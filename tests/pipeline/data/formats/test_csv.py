"""Rows of CSV are counted as a parser counts them."""

from pathlib import Path

import pytest

from pipeline.data.formats import csv
from pipeline.data.formats.csv import Dialect, count_csv


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("a,b\n", 0), ("a,b", 0), ("a,b\n1,2", 1), ("a,b\n1,2\n3,4\n", 2), ("a,b\r\n1,2\r\n3,4\r\n", 2), ("a,b\r1,2\r3,4", 2),
        ("\n\na,b\n1,2\n", 1), ("a,b\n\n1,2\n\n\n", 1), ('a,b\n"1\n2",3\n', 1), ('a,b\n1,"x""\n\ny"\n', 1),
        ("\ufeffa,b\n1,2\n", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("block", [1, 2, 3, 1 << 24])
def test_lines_without_quotes_are_counted_as_the_parser_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, rows: int, block: int
) -> None:
    path, dialect = tmp_path / "a.csv", Dialect(",", ("a", "b"))
    path.write_bytes(text.encode())
    with monkeypatch.context() as patch:
        patch.setattr(csv, "_count_plain_lines", lambda plain, dialect: None)
        assert count_csv(path, dialect) == rows
    monkeypatch.setattr(csv, "BLOCK_BYTES", block if csv._count_plain_lines(path, dialect) else 1 << 24)
    assert count_csv(path, dialect) == rows


@pytest.mark.parametrize("line", ["3", "3,4,", "3,4,5", " "])
@pytest.mark.parametrize("block", [1, 1 << 24])
def test_a_line_of_another_number_of_values_is_no_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, block: int
) -> None:
    (tmp_path / "a.csv").write_text(f"a,b\n1,2\n{line}\n5,6\n")
    monkeypatch.setattr(csv, "BLOCK_BYTES", block)
    assert csv._count_plain_lines(tmp_path / "a.csv", Dialect(",", ("a", "b"))) is None

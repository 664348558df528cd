"""`find_decimal` finds the columns that the SQL test finds. SQL prints each number and compares the texts."""

from pathlib import Path
from random import Random

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.formats import types
from pipeline.data.formats.numbers import find_decimal

ODD = (
    "1.10", "1.1", "-0", "-0.0", "0.0", "00.5", ".5", "5.", "1e5", "1e-05", "1e-5", "1E5", "+1.5", " 1.5", "1.5\n", "nan",
    "inf", "-inf", "1_0.5", "0x1A", "0.1234567890123456789", "0.30000000000000004", "0.3000000000000000", "1e999", "1.5e300",
    "123456789012345", "1234567890123456", "9007199254740993.5", "1234567890123456.0", "1e+16", "4.9e-324", "2.5e-310", "", "é",
    "1.7976931348623157e+308", "100000000000000.06", "999999999999999.9", "0.00010000000000000001",
)  # fmt: skip


def number(random: Random) -> str:
    value = random.choice([random.random(), random.gauss(0, 1), random.random() * 10.0 ** random.randint(-12, 20)])
    return random.choice(
        [repr(value), repr(value), f"{value:.3f}", f"{value:.17g}", f"{round(value, 2)}", f"{value:e}"]
    )


@pytest.mark.parametrize("seed", range(20))
def test_decimal_text_is_what_sql_says(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    columns: dict[str, list[str | None]] = {text: [text] for text in ODD}
    for place in range(60):
        many = [number(random) if place % 3 else repr(random.random() * 10.0 ** -(place % 7)) for _ in range(300)]
        many[random.randrange(300)] = random.choice([*ODD, "0.25"])
        columns[f"many_{place}"] = [random.choice([text, text, None]) for text in many]
    columns |= {"none": [None]}
    for name, texts in columns.items():
        columns[name] = texts + [None] * (300 - len(texts))
    files = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    table = pa.table({f"c{place}": pa.array(texts, pa.string()) for place, texts in enumerate(columns.values())})
    pq.write_table(table[:150], files[0], row_group_size=64)
    pq.write_table(table[150:], files[1])
    with duckdb.connect() as connection:
        found = types._test(connection.from_arrow(table), [(name, "DOUBLE") for name in table.column_names])[0]
    expected = {name for (name, _), fits in found.items() if fits}
    assert find_decimal(dict.fromkeys(table.column_names, files), 2) == expected
    assert expected
    assert len(expected) < len(columns)

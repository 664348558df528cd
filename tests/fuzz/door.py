"""Tables that other programs write: what is read must be what was put in, or refused.

Nothing here knows how a column's type is chosen. A value may change its type, and never what it says: numbers stay
equal, no two texts become one, and a row is neither lost nor made.
"""

import csv
import datetime
import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.formats.files import SourceFile
from pipeline.data.formats.reading import read_files, readable_files
from pipeline.data.formats.types import FILE
from pipeline.errors import ContractError
from storage.query import connect
from tests.fuzz.harness import Case, require

ODD = (
    "#1001", "# a", "//", "%x", ";", "|", "NA", "null", "NULL", "nan", "N/A", "None", "-", "yes", "no", "T", "F", "true",
    "0x1A", "007", "1.10", "1.1", "1.9", "+5", "1e5", "12e4", "5e10", "1_000", "1,5", " 5", "5 ", ".5", "5.", "-0", "0.0",
    "2024-1-5", "10:30", "a,b", 'say "hi"', "two\nlines", "tab\there", "ü€😀", "\\", "\\N", "'", "inf", "Infinity", "1.0",
)  # fmt: skip
"""Texts that readers change, drop or take for something else."""
Values = list[Any]


def _ids(random: Random) -> Callable[[], Any]:
    most = random.choice([9, 2**31, 2**53 - 1, 2**62, 2**63 - 1])
    return lambda: random.randint(0, most)


def _texts(random: Random) -> Callable[[], Any]:
    chosen = random.sample(ODD, random.randint(1, 5))
    return lambda: random.choice(chosen)


def _numerals(random: Random) -> Callable[[], Any]:
    places = random.choice([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2, 17)])
    return lambda: (
        f"{random.randint(-50, 2000)}"
        + "".join(f".{random.randint(0, 10**count - 1):0{count}d}" for count in [random.choice(places)] if count)
    )


KINDS: dict[str, Callable[[Random], Callable[[], Any]]] = {
    "id": _ids,
    "fraction": lambda random: lambda: random.randint(-1000, 1000) / 8,
    "whole": lambda random: lambda: float(random.randint(0, 2 ** random.choice([3, 20, 53]))),
    "text": _texts,
    "numeral": _numerals,
    "day": lambda random: lambda: f"{datetime.date(2024, 1, 1) + datetime.timedelta(random.randint(0, 400))}",
    "list": lambda random: lambda: [random.randint(0, 2**62) for _ in range(random.randint(0, 3))],
}
"""Kind of a column -> what makes a value."""


def _write_csv(path: Path, columns: dict[str, Values], random: Random) -> None:
    """As pandas, DuckDB or Python's module write it: text as it is, nothing for null."""
    rows = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
    buffer = io.StringIO()
    end, mark = random.choice(["\n", "\r\n"]), random.choice(",;\t|")
    if random.random() < 0.5:
        rows.to_csv(buffer, index=False, sep=mark, lineterminator=end)
    else:
        quoting = random.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        writer = csv.writer(buffer, delimiter=mark, lineterminator=end, quoting=quoting)
        writer.writerow(columns)
        writer.writerows(["" if one is None else one for one in row] for row in zip(*columns.values(), strict=True))
    content = buffer.getvalue().encode("utf-8-sig" if random.random() < 0.2 else "utf-8")
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)


def _write_json(path: Path, columns: dict[str, Values], random: Random) -> None:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    bare = random.random() < 0.5
    lines = [{name: one for name, one in row.items() if one is not None or not bare} for row in rows]
    path.write_text("".join(json.dumps(line, ensure_ascii=random.random() < 0.5) + "\n" for line in lines))


def _write_parquet(path: Path, columns: dict[str, Values], random: Random) -> None:
    table = pa.table({name: _array(values, random) for name, values in columns.items()})
    if random.random() < 0.3:
        duckdb.from_arrow(table).write_parquet(str(path), compression=random.choice(["snappy", "zstd"]))
    else:
        pq.write_table(table, path, compression=random.choice(["snappy", "gzip", "none"]), row_group_size=7)


def _array(values: Values, random: Random) -> pa.Array:
    """Gives values one of the types that writers give them."""
    some = [one for one in values if one is not None]
    if some and all(isinstance(one, int) for one in some):
        kinds = [pa.int64(), pa.uint64(), pa.decimal128(38, 0), pa.decimal128(38, 2)]
        kinds += [pa.int32()] if max(some) < 2**31 else []
        kinds += [pa.float64()] if max(some) <= 2**53 else []
        kind = random.choice(kinds)
        return pa.array(
            [None if one is None else Decimal(one) if pa.types.is_decimal(kind) else one for one in values], kind
        )
    if some and all(isinstance(one, str) for one in some) and random.random() < 0.3:
        return pa.array([None if one is None else one.encode() for one in values], pa.binary())
    return pa.array(values)


def _write_avro(path: Path, columns: dict[str, Values], random: Random) -> None:
    import fastavro

    kinds: dict[type, Any] = {int: "long", float: "double", str: "string", list: {"type": "array", "items": "long"}}
    first = {name: next((one for one in values if one is not None), "") for name, values in columns.items()}
    fields = [{"name": name, "type": ["null", kinds[type(first[name])]]} for name in columns]
    schema = {"type": "record", "name": "row", "fields": fields}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), rows, codec=random.choice(["null", "deflate"]))


WRITERS: dict[str, Callable[[Path, dict[str, Values], Random], None]] = {
    "csv": _write_csv,
    "csv.gz": _write_csv,
    "jsonl": _write_json,
    "parquet": _write_parquet,
    **({"avro": _write_avro} if find_spec("fastavro") else {}),
}


@contextmanager
def door(folder: Path) -> Iterator[Case]:
    """Files of one table: of several formats, with other types and orders of columns, and columns that some lack."""

    def case(random: Random) -> None:
        place = folder / "case"
        place.mkdir()
        try:
            _play(random, place)
        finally:
            for path in sorted(place.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            place.rmdir()

    yield case


def _play(random: Random, place: Path) -> None:
    kinds = {f"c{number}": random.choice([*KINDS, "mixed"]) for number in range(random.randint(1, 4))}
    makers = {name: KINDS[kind](random) for name, kind in kinds.items() if kind != "mixed"}
    files: list[SourceFile] = []
    written: list[dict[str, Values]] = []
    for number in range(random.randint(1, 3)):
        form = random.choice([*WRITERS])
        rows = random.choice([1, 2, 5, 30])
        names = [name for name in kinds if random.random() < 0.9 and not (kinds[name] == "list" and "csv" in form)]
        random.shuffle(names)
        share = random.choice([0.0, 0.2])
        own = {name: KINDS[random.choice(["id", "fraction", "whole"])](random) for name in kinds}
        columns = {
            name: [None if random.random() < share else makers.get(name, own[name])() for _ in range(rows)]
            for name in names
        }
        columns["row"] = [f"r{number}-{one}" for one in range(rows)]
        path = place / f"{number}.{form}"
        WRITERS[form](path, columns, random)
        files.append(path)
        written.append(columns)
    try:
        found = _read(files, place / "home")
    except ContractError:
        require("mixed" in kinds.values(), "files whose columns have one kind each were refused")
        raise
    expected = {row: position for position, row in enumerate(one for columns in written for one in columns["row"])}
    require(found["row"] == [*expected], "rows are lost, doubled or in another order")
    for name in kinds:
        values = [one for columns in written for one in columns.get(name, [None] * len(columns["row"]))]
        if name not in found:
            require(all(one in (None, []) for one in values), f"column {name} is gone")
            continue
        _compare(name, kinds[name], values, found[name])


def _read(files: Sequence[SourceFile], home: Path) -> dict[str, Values]:
    with (
        readable_files(dict.fromkeys(files, "auto"), home, limits={"threads": 1}) as read,
        connect([home, *(Path(f"{one.read}") for one in read.values())], home / "spill", threads=1) as connection,
    ):
        rows = read_files(connection, [read[file] for file in files])
        found = dict(zip(rows.columns, zip(*rows.fetchall(), strict=True), strict=True))
    return {name: [*values] for name, values in found.items() if name != FILE}


def _compare(name: str, kind: str, written: Values, found: Values) -> None:
    """Requires that every value says what was written, and that different ones stay different."""
    pairs = list(zip(written, found, strict=True))
    for before, after in pairs:
        if before is None or before == "":
            require(after is None, f"{kind} {name}: null became {after!r}")
            continue
        require(after is not None, f"{kind} {name}: {before!r} became null")
        require(_says_the_same(before, after), f"{kind} {name}: {before!r} became {after!r}")
    if kind in ("text", "numeral", "id"):
        before = {f"{one}" for one in written if one is not None and one != ""}
        after = {f"{one!r}" for one in found if one is not None}
        require(len(after) >= len(before), f"{kind} {name}: {len(before)} values became {len(after)}")


def _says_the_same(before: Any, after: Any) -> bool:
    if isinstance(before, list):
        return [*after] == before
    if isinstance(before, str):
        if isinstance(after, str):
            return before == after
        if isinstance(after, datetime.date):
            return f"{after}" == before
        return not isinstance(after, bool) and float(before) == float(after) and Decimal(before) == Decimal(f"{after}")
    if isinstance(after, str):
        return Decimal(after) == Decimal(f"{before}")
    return not isinstance(after, bool) and Decimal(f"{before}") == Decimal(f"{after}")

"""Tables that other programs write, ingested and read as a training reads them: what was put in, or a refusal.

Nothing here knows how a column's type is chosen. A value may change its type, and never what it says: numbers stay
equal, no two texts become one, and a row is neither lost, nor made, nor moved.

An ingest costs the same for one column as for thirty. So a case ingests several tables side by side, in files of
their own: they share no column, and each is read as it would be alone.
"""

import datetime
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from pipeline.data.formats import json, types
from pipeline.data.formats.files import stamp
from pipeline.data.joined.raw import RawRows
from pipeline.errors import ContractError
from pipeline.extraction.config import IngestConfig, LabelColumns, SourceConfig
from pipeline.extraction.extract import extract
from pipeline.extraction.opening import SourceContext
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse
from tests.fuzz.harness import Case, require
from tests.fuzz.writers import WRITERS, Table, can_write

TABLES = 8
"""Tables of a case."""
FLAGS = (("yes", "no"), ("T", "F"), ("t", "f"), ("true", "false"))
ODD = (
    ("#1001", "# a", "//", "%x", ";", "|", "--", "!"), ("NA", "null", "NULL", "nan", "N/A", "None", "-", "\\N", "#N/A"),
    *FLAGS, ("TRUE", "0"), ("0x1A", "26"), ("007", "7"),
    ("1.10", "1.1", "1.9"), ("+5", "5"), ("1e5", "100000"), ("12e4", "5e10"), ("1_000", "1000"), ("1,5", "2,5"),
    (" 5", "5 ", "5"), (".5", "5."), ("-0", "0.0", "0"), ("2024-1-5", "2024-01-05"), ("10:30", "10:30:00"),
    ("a,b", 'say "hi"', "two\nlines", "tab\there", "a;b"), ("ü€😀", "\\", "'", "é", "e\u0301"),
    ("inf", "Infinity", "1.0"), ("12345678901234567890123", "1"), ("row", "day", "label"),
)  # fmt: skip
"""Texts that readers change, drop or take for something else, together with those that they then equal."""
Make = Callable[[], Any]


def _ids(random: Random) -> Make:
    most = random.choice([9, 2**31, 2**53 - 1, 2**62, 2**63 - 1, 2**64 - 1])
    near = random.random() < 0.5  # ids that lose their difference if they are rounded
    return lambda: most - random.randint(0, 9) if near else random.randint(0, most)


def _signed(random: Random) -> Make:
    most = random.choice([9, 2**31, 2**53 - 1, 2**62])
    return lambda: random.choice([-1, 1]) * random.randint(0, most)


def _real(random: Random) -> Make:
    sizes = random.choice([(0, 0), (-3, 6), (-30, 30), (-300, 300)])
    places = random.choice([None, 2, 5])

    def make() -> float:
        value = random.gauss(0, 1) * 10.0 ** random.randint(*sizes)
        return random.choice([value, value, 0.0, -0.0]) if places is None else round(value, places)

    return make


def _list(random: Random) -> Make:
    """Lists of fractions, of numbers of both signs, or of texts."""
    make = random.choice([_real, _signed, _texts])(random)
    return lambda: [make() for _ in range(random.randint(0, 3))]


def _texts(random: Random) -> Make:
    groups = random.sample(FLAGS, 1) if random.random() < 0.2 else random.sample(ODD, random.choice([1, 2, 3, 5]))
    chosen = [one for group in groups for one in group]
    return lambda: random.choice(chosen)


def _numerals(random: Random) -> Make:
    places = random.choice([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2, 17)])
    return lambda: (
        f"{random.randint(-50, 2000)}"
        + "".join(f".{random.randint(0, 10**count - 1):0{count}d}" for count in [random.choice(places)] if count)
    )


def _times(random: Random) -> Make:
    years = random.choice([(2024, 2025), (1700, 2200), (1, 9999)])
    return lambda: datetime.datetime(random.randint(*years), random.randint(1, 12), 5, 23, 59, random.randint(0, 59))


def _nested(random: Random) -> Make:
    number = lambda: random.randint(0, 9)  # noqa: E731
    return random.choice(
        [lambda: {"a": number()}, lambda: {"": number()}, lambda: [[number()]], lambda: b"\xff%d" % number()]
    )


KINDS: dict[str, Callable[[Random], Make]] = {
    "id": _ids,
    "signed": _signed,
    "fraction": lambda random: lambda: random.randint(-1000, 1000) / 8,
    "real": _real,
    "whole": lambda random: lambda: float(random.randint(0, 2 ** random.choice([3, 20, 53]))),
    "text": _texts,
    "numeral": _numerals,
    "day": lambda random: lambda: f"{datetime.date(2024, 1, 1) + datetime.timedelta(random.randint(0, 400))}",
    "time": _times,
    "list": lambda random: lambda: [random.randint(-(2**62), 2**62) for _ in range(random.randint(0, 3))],
    "others": _list,
    "nested": _nested,
}
"""Kind of a column -> what makes a value."""
MIXED = ("id", "fraction", "whole", "text")
"""Kinds that the files of a mixed column may have."""
ANEW = ("id", "mixed")
"""Kinds whose maker is chosen anew for each file."""


class Written(NamedTuple):
    """Tables as they were written."""

    kinds: dict[str, str]
    """Column -> its kind."""
    files: dict[Path, Table]


@contextmanager
def door(folder: Path) -> Iterator[Case]:
    """Files of several tables: of all formats, with other types and orders of columns, and columns that some lack."""
    warehouse, numbers = Warehouse(WarehouseConfig(), folder / "home"), iter(range(10**9))

    def case(random: Random) -> None:
        place = folder / "case"
        place.mkdir()
        try:
            name = f"t{next(numbers)}"
            play = random.choices([_play, _play_mixed, _play_damaged], [8, 1, 1])[0]
            play(random, place, warehouse, name)
        finally:
            shutil.rmtree(place)
            for path in (folder / "home" / "dlrm").glob(f"{name}*"):
                shutil.rmtree(path)

    with _few_are_many():
        yield case


@contextmanager
def nights(folder: Path) -> Iterator[Case]:
    """Some files of a table today, the others tomorrow: what an ingest remembers of the first changes nothing."""

    def case(random: Random) -> None:
        place = folder / "case"
        place.mkdir()
        try:
            _play_nights(random, place)
        finally:
            shutil.rmtree(place)

    with _few_are_many():
        yield case


@contextmanager
def _few_are_many() -> Iterator[None]:
    """Has files of a few rows read as those of many."""
    few = ((types, "FIRST_ROWS", 3), (json, "FIRST_ROWS", 3), (json, "SMALL_BYTES", 0))
    before = [getattr(module, name) for module, name, _ in few]
    for module, name, value in few:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(few, before, strict=True):
            setattr(module, name, value)


def _play_nights(random: Random, place: Path) -> None:
    kinds = random.choice([[*KINDS, "id", "text"], ["mixed", *MIXED]])
    made = [_make(random, place, f"{number}", kinds) for number in range(2)]
    written = Written({**made[0].kinds, **made[1].kinds}, {**made[0].files, **made[1].files})
    first = set(random.sample(sorted(written.files), random.randint(1, max(1, len(written.files) - 1))))
    schema, found = _features(random, written), dict[str, Any]()
    for path in (path for path in written.files if path not in first):
        path.rename(path.with_name(f"_{path.name}"))  # hidden until tomorrow
    for home in ("remembers", "reads"):
        found[home] = [_night(place, home, LabelColumns())]
    for path in (path for path in written.files if path not in first):
        path.with_name(f"_{path.name}").rename(path)
    shutil.rmtree(place / "reads" / "inventory", ignore_errors=True)
    for home in ("remembers", "reads"):
        found[home].append(_night(place, home, schema))
    if found["remembers"] != found["reads"]:
        require(not isinstance(found["reads"][1], dict), f"{found['reads'][1]} became {found['remembers'][1]}")
        require(not isinstance(found["remembers"][1], dict), f"refused: {found['reads'][1]}; not if remembered")


def _night(place: Path, home: str, schema: FeatureSchema | LabelColumns) -> Table | str:
    """Ingests the files that are there. Returns the table in the order of its rows, or why not."""
    warehouse = Warehouse(WarehouseConfig(), place / home)
    source = SourceConfig.model_validate({"path": "in/**/*", "day_column": "day"})
    context = SourceContext(source, schema, warehouse, "nights", place, place / "logs")
    checks = dict.fromkeys(("one_label", "changed_type"), "off")
    try:
        result = extract(context, IngestConfig.model_validate({"checks": checks, "profile": False}))
    except ContractError as error:
        return f"{error}"
    columns = sorted(warehouse.schema(result.snapshot).names)
    reader = warehouse.reader(result.snapshot, columns)
    parts = [reader.read(fragment) for fragment in reader.fragments()]
    return {one: [f"{value!r}" for part in parts for value in part[one].to_pylist()] for one in columns}


def _play(random: Random, place: Path, warehouse: Warehouse, name: str) -> None:
    """Tables whose columns have one kind each: none may be refused."""
    tables = [_make(random, place, f"{number}", [*KINDS, "id", "id", "text", "text"]) for number in range(TABLES)]
    written = Written(
        {name: kind for one in tables for name, kind in one.kinds.items()},
        {path: table for one in tables for path, table in one.files.items()},
    )
    _hide(random, place)
    try:
        found = _ingest(random, written, place, warehouse, name)
        joined = _read_joined(random.choice(tables), warehouse)
    except ContractError as error:
        require(False, f"files whose columns have one kind each were refused: {error}")
    _compare_all(written, found)
    _compare_all(*joined)


def _play_mixed(random: Random, place: Path, warehouse: Warehouse, name: str) -> None:
    """A table that may be refused, because files disagree about a column."""
    written = _make(random, place, "0", ["mixed", *MIXED])
    _compare_all(written, _ingest(random, written, place, warehouse, name))


def _play_damaged(random: Random, place: Path, warehouse: Warehouse, name: str) -> None:
    """A table that must be refused, because a file is damaged."""
    written = _make(random, place, "0", MIXED, [random.choice(["csv", "parquet"])])
    _damage(random, next(iter(written.files)))
    _ingest(random, written, place, warehouse, name)
    require(False, "a damaged file was read")


def _make(
    random: Random, place: Path, number: str, kinds: Sequence[str], forms: Sequence[str] = (*WRITERS, "parquet")
) -> Written:
    """Writes a table: one to three files in folders of their own, whose rows have a name, a day and a label."""
    chosen = {f"c{number}_{one}": random.choice(kinds) for one in range(random.randint(1, 4))}
    makers = {name: KINDS[kind](random) for name, kind in chosen.items() if kind not in ANEW}
    files: dict[Path, Table] = {}
    mark = random.choice("rr#")
    one = (random.choice(forms), random.getrandbits(32)) if random.random() < 0.5 else None
    for part in range(random.randint(1, 3)):
        form, seed = one or (random.choice(forms), random.getrandbits(32))
        rows, share = random.choice([1, 2, 5, 30]), random.choice([0.0, 0.2])
        table: Table = {}
        for name in random.sample([*chosen], len(chosen)):
            kind = chosen[name]
            make = makers.get(name) or KINDS[random.choice(MIXED) if kind == "mixed" else kind](random)
            values = [None if random.random() < share else make() for _ in range(rows)]
            if random.random() < 0.9 and can_write(form, values):
                table[name] = values
        days = [f"2024-01-0{random.randint(1, 5)}" for _ in range(rows)]
        own: Table = {
            "row": [f"{mark}{number}-{part}-{one}" for one in range(rows)],
            "day": days,
            "label": [one % 2 for one in range(rows)],
        }
        table = {**table, **own} if random.random() < 0.5 else {**own, **table}
        path = place / f"in{random.choice(['', '/deep', '/day=x'])}" / f"{number}-{part}.{form}"
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[form](path, table, Random(seed))  # one program writes all files, or several do
        files[path] = table
    return Written(chosen, files)


def _hide(random: Random, place: Path) -> None:
    """Adds a file that a running job has not finished."""
    form, hidden = random.choice(["csv", "jsonl", "parquet"]), random.choice(["_temporary/a", "deep/.a", ".b/c", "_a"])
    path = place / "in" / f"{hidden}.{form}"
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[form](path, {"row": ["hidden"], "day": ["2024-01-01"], "label": [1]}, random)


def _damage(random: Random, path: Path) -> None:
    """Damages a file so that a reader must refuse it: two more lines of CSV, or a bit of a page with a checksum."""
    if path.suffix == ".csv":
        content: str | bytearray = path.read_text(encoding="utf-8-sig")
        header = content.splitlines()[0]
        mark = next(one for one in header if one in ",;\t|")
        path.write_text(f"{content}{header}{mark}more\n" + mark.join(["5"] * (header.count(mark) + 2)) + "\n")
        return
    pq.write_table(pq.read_table(path), path, compression="none", use_dictionary=False, write_page_checksum=True)
    metadata = pq.ParquetFile(path).metadata
    last = metadata.row_group(0).column(metadata.schema.names.index("row"))
    content = bytearray(path.read_bytes())
    content[last.data_page_offset + last.total_compressed_size - 1] ^= 1 << random.randint(0, 2)  # another digit
    path.write_bytes(content)


def _ingest(random: Random, written: Written, place: Path, warehouse: Warehouse, name: str) -> Table:
    """Ingests all files, and reads the table as a training does. Returns column -> values, in the order of the files."""
    source = SourceConfig.model_validate({"path": "in/**/*", "day_column": "day"})
    context = SourceContext(source, _features(random, written), warehouse, name, place, place / "logs")
    config = IngestConfig.model_validate({"checks": {"one_label": "off"}, "profile": random.random() < 0.1})
    told: list[str] = []
    result = extract(context, config, warn=told.append)
    rows = sum(len(table["row"]) for table in written.files.values())
    require(result.rows == rows and not result.quarantined, f"{result.rows} rows of {rows}, {result.quarantined}")
    days = Counter(day for table in written.files.values() for day in table["day"])
    require({f"{day}": one.written for day, one in result.by_day.items()} == days, "other days")
    left = {name for name, kind in written.kinds.items() if kind == "nested"}
    columns = warehouse.schema(result.snapshot).names
    valued = {name for name in left for table in written.files.values() if any(table.get(name, ()))}
    require(not valued & {*columns}, "columns that cannot be stored are there")
    require(all(any(one in text for text in told) for one in valued), "columns are left out without a word")
    reader = warehouse.reader(result.snapshot, columns)
    parts = [reader.read(fragment) for fragment in reader.fragments()]
    found: Table = {one: [value for part in parts for value in part[one].to_pylist()] for one in columns}
    return found


def _features(random: Random, written: Written) -> FeatureSchema | LabelColumns:
    """Declares some columns as features: numbers as dense ones, ids and texts as sparse ones."""
    there = {
        name
        for table in written.files.values()
        for name, values in table.items()
        if any(one not in (None, []) for one in values)
    }
    kinds = {name: kind for name, kind in written.kinds.items() if name in there and random.random() < 0.5}
    dense = [name for name, kind in kinds.items() if kind in ("fraction", "whole", "real")]
    sparse = [name for name, kind in kinds.items() if kind in ("id", "text", "list", "day", "numeral")]
    if not dense or not sparse:
        return LabelColumns()
    hashed = [{"kind": "sigrid_hash", "size": 100}]
    declared = {
        "dense": [{"columns": dense, "transforms": [{"kind": "fill_null"}]}],
        "sparse": [{"columns": sparse, "transforms": hashed}],
    }
    return FeatureSchema.model_validate(declared)


def _read_joined(written: Written, warehouse: Warehouse) -> tuple[Written, Table]:
    """Reads a table as the files of a feature source."""
    files = sorted(written.files)
    rows = RawRows(warehouse, "joined", [f"{path}" for path in files], [stamp(path) for path in files])
    names = [name for name in rows.raw.names if written.kinds.get(name) != "nested"]
    batches = [*rows.batches(names)]
    return written, {name: [one for batch in batches for one in batch[name].to_pylist()] for name in names}


def _compare_all(written: Written, found: Table) -> None:
    """Requires the rows and values that were written."""
    tables = [written.files[path] for path in sorted(written.files)]
    rows = [one for table in tables for one in table["row"]]
    days = [one for table in tables for one in table["day"]]
    require(sorted(found["row"]) == sorted(rows), "rows are lost or doubled")
    expected = [row for _, row in sorted(zip(days, rows, strict=True), key=lambda pair: pair[0])]
    require(found["row"] in (rows, expected), "rows are in another order")
    place = {row: number for number, row in enumerate(found["row"])}
    require(all(f"{found['day'][place[row]]}" == day for row, day in zip(rows, days, strict=True)), "other days")
    for name, kind in written.kinds.items():
        pairs = [
            (one, found[name][place[row]] if name in found else None)
            for table in tables
            for row, one in zip(table["row"], table.get(name, [None] * len(table["row"])), strict=True)
        ]
        if kind != "nested":
            _compare(name, kind, pairs, name in found)


def _compare(name: str, kind: str, pairs: Sequence[tuple[Any, Any]], there: bool) -> None:
    """Requires that every value says what was written, and that different ones stay different."""
    if not there:
        require(all(one in (None, [], "") for one, _ in pairs), f"column {name} is gone")
        return
    for before, after in pairs:
        if before is None or before == "":
            require(after is None, f"{kind} {name}: null became {after!r}")
            continue
        require(after is not None, f"{kind} {name}: {before!r} became null")
        require(_says_the_same(before, after), f"{kind} {name}: {before!r} became {after!r}")
    if kind in ("text", "numeral", "id", "signed"):
        before = {re.sub(r"^-(?=0$)|\.0+$", "", f"{one}") for one, _ in pairs if one is not None and one != ""}
        after = {f"{one!r}" for _, one in pairs if one is not None}
        require(len(after) >= len(before), f"{kind} {name}: {len(before)} values became {len(after)}")


def _says_the_same(before: Any, after: Any) -> bool:
    if isinstance(before, list):  # a column of single values alone stays one of them
        return (after if isinstance(after, list) else [after]) == before
    if isinstance(before, datetime.datetime):
        return before == (datetime.datetime.fromisoformat(after) if isinstance(after, str) else after)
    if isinstance(before, str):
        if isinstance(after, str):
            return before == after
        if isinstance(after, datetime.date):
            return f"{after}" == before
        return not isinstance(after, bool) and float(before) == float(after) and Decimal(before) == Decimal(f"{after}")
    if isinstance(after, str):
        return Decimal(after) == Decimal(f"{before}")
    if isinstance(before, int) and before >= 2**63 and isinstance(after, int) and after < 0:
        after += 2**64  # an id keeps its 64 bits
    return not isinstance(after, bool) and Decimal(f"{before}") == Decimal(f"{after}")

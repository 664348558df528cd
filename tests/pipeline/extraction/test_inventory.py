"""An ingest that remembers the files of its source does what one does that reads them all."""

import datetime
import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from pipeline.errors import DataError
from pipeline.extraction.config import EventTable, IngestConfig, LabelColumns, SourceConfig
from pipeline.extraction.extract import IngestResult, extract, source_days
from pipeline.extraction.inventory import FileDay, RowFile, reached
from pipeline.extraction.opening import SourceContext
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse

START = datetime.datetime(2024, 1, 1)
DAY = datetime.timedelta(1)
CHECKS = dict.fromkeys(
    ("losses", "unmatched", "one_label", "constant", "vanished", "changed_type", "coverage", "label_rate"), "off"
)
ENDINGS = ("parquet", "csv", "csv.gz", "jsonl")
SOURCES: Mapping[str, dict[str, Any]] = {
    "samples": {"path": "rows/*", "day_column": "time", "unlabelled": "skip"},
    "logs": {
        "path": "rows/*", "day_column": "time",
        "outcomes": {"path": "outcomes/*", "on": "id", "feature_time": "time", "outcome_time": "time",
                     "window_seconds": 2 * 86_400},
    },
}  # fmt: skip
EVENTS = EventTable(path="rows/*", key=("user",), time="time", unique=("id",))


class World:
    """Files that change from step to step."""

    def __init__(self, root: Path, kind: str, seed: int) -> None:
        self.root, self.kind, self.chance = root, kind, random.Random(seed)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.outcomes: dict[str, list[dict[str, Any]]] = {}
        self.days = self.next = self.made = 0

    def put(self, folder: str, name: str, rows: list[dict[str, Any]]) -> None:
        path = self.root / folder / name
        path.parent.mkdir(exist_ok=True)
        frame = pd.DataFrame(rows)
        if name.endswith("parquet"):
            frame.to_parquet(path)
        elif "csv" in name:
            frame.to_csv(path, index=False)
        else:
            frame.assign(time=frame["time"].map(str)).to_json(path, orient="records", lines=True)

    def add(self) -> None:
        """A new file of the next day, with some rows of days before and some that repeat others."""
        self.days += self.chance.choice([1, 1, 1, 3, 9])
        rows: list[dict[str, Any]] = []
        known = [row["id"] for one in self.rows.values() for row in one if not row["id"] % 10]
        for _ in range(self.chance.randrange(1, 9)):
            moment = START + self.days * DAY + self.chance.choice([0, 0, 0, 0, -1, -3, -8]) * DAY
            moment += datetime.timedelta(seconds=self.chance.randrange(80_000))
            self.next += 10
            row = {
                "id": self.next,
                "time": moment,
                "user": self.chance.randrange(5),
                "x": self.chance.randrange(99) / 4,
            }
            if not any(other["time"].date() == moment.date() for other in rows):
                row |= {"id": self.next + 1, "label": "1"}  # a good row of each day, which none repeats
            elif self.kind == "samples":
                row["label"] = self.chance.choice(["0", "1", "1", "bad", ""])
            elif known and self.chance.random() < 0.4:
                row["id"] = self.chance.choice(known)
            if self.kind != "samples":
                row.pop("label", None)
            rows.append(row)
        self.made += 1
        name = f"{self.made:03}.{self.chance.choice(ENDINGS)}"
        self.rows[name] = rows
        self.put("rows", name, rows)

    def act(self) -> None:
        """Outcomes of earlier impressions, some of them late."""
        known = [row for one in self.rows.values() for row in one]
        chosen = self.chance.sample(known, min(len(known), 4))
        delays = [datetime.timedelta(hours=self.chance.randrange(-2, 60)) for _ in chosen]
        rows = [{"id": row["id"], "time": row["time"] + delay} for row, delay in zip(chosen, delays, strict=True)]
        name = f"{len(self.outcomes):03}.{self.chance.choice(ENDINGS)}"
        self.outcomes[name] = rows
        self.put("outcomes", name, rows)

    def change(self) -> None:
        """A file with one more row, or none: it is removed."""
        name = self.chance.choice(sorted(self.rows))
        if len(self.rows) > 1 and self.chance.random() < 0.5:
            (self.root / "rows" / name).unlink()
            del self.rows[name]
            return
        self.next += 10
        self.rows[name].append({**self.rows[name][0], "id": self.next, "x": 0.5})
        self.put("rows", name, self.rows[name])

    def step(self) -> None:
        self.add()
        if self.kind == "logs":
            self.act()
        if self.chance.random() < 0.4:
            self.change()

    def repeated(self) -> Counter[datetime.date]:
        """Day -> its rows whose id a row had that lies at most seven days before them."""
        times = defaultdict(list)
        for rows in self.rows.values():
            for row in rows:
                times[row["id"]].append(row["time"])
        pairs = (pair for one in times.values() for pair in pairwise(sorted(one)))
        return Counter(later.date() for earlier, later in pairs if later - earlier <= 7 * DAY)

    def counts(self) -> Counter[datetime.date]:
        """Day -> its rows."""
        return Counter(row["time"].date() for rows in self.rows.values() for row in rows)


def _context(root: Path, kind: str, home: Path) -> SourceContext:
    warehouse, schema = Warehouse(WarehouseConfig(), home), LabelColumns()
    if kind == "events":
        return SourceContext(EVENTS.source, schema, warehouse, "rows", root, home / "logs", events=EVENTS)
    source = SourceConfig.model_validate(SOURCES[kind])
    return SourceContext(source, schema, warehouse, "rows", root, home / "logs")


def _ingest(context: SourceContext, warn: Callable[[str], None] = lambda sentence: None) -> IngestResult:
    config = IngestConfig.model_validate({"max_quarantined_share": 0.99, "profile": False, "checks": CHECKS})
    return extract(context, config, warn=warn)


def _content(warehouse: Warehouse, table: str) -> list[tuple[Any, ...]]:
    if not warehouse.has_table(table):
        return []
    snapshot = warehouse.current(table)
    names = sorted(set(warehouse.schema(snapshot).names) - {"source_row"})
    reader = warehouse.reader(snapshot, names)
    rows = [tuple(row.values()) for one in reader.fragments() for row in reader.read(one).select(names).to_pylist()]
    return sorted(rows, key=str)


def _day_of(row: tuple[Any, ...]) -> datetime.date:
    return next(one for one in row if type(one) is datetime.date)


def _inventories(home: Path) -> list[Path]:
    return [*(home / "inventory").glob("*.json.gz")]


def _same(context: SourceContext, other: SourceContext, results: tuple[IngestResult, IngestResult]) -> None:
    for table in ("rows", "rows_quarantine"):
        assert _content(context.warehouse, table) == _content(other.warehouse, table)
    assert context.warehouse.day_identities("rows") == other.warehouse.day_identities("rows")
    first, second = (
        one.model_dump(exclude={"seconds": True, "snapshot": True, "files": {"opened"}, "outcomes": True})
        for one in results
    )
    assert first == second


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12))])
@pytest.mark.parametrize("kind", ["samples", "logs", "events"])
def test_a_remembered_source_gives_the_same_table_as_one_that_is_read_whole(
    tmp_path: Path, kind: str, seed: int
) -> None:
    world = World(tmp_path, kind, seed)
    remembering, reading = (_context(tmp_path, kind, tmp_path / home) for home in ("remembering", "reading"))
    world.step()
    for _ in range(8):
        world.step()
        for path in _inventories(tmp_path / "reading"):
            path.unlink()
        results = _ingest(remembering), _ingest(reading)
        _same(remembering, reading, results)
        counts = world.counts()
        assert source_days(remembering) == sorted(counts)
    fresh = _context(tmp_path, kind, tmp_path / "fresh")
    _ingest(fresh)
    for table in ("rows", "rows_quarantine"):
        there = [row for row in _content(remembering.warehouse, table) if _day_of(row) in counts]
        assert there == _content(fresh.warehouse, table)
    if kind == "samples":
        return
    table = "rows" if kind == "events" else "rows_quarantine"
    found = Counter(_day_of(row) for row in _content(remembering.warehouse, table))
    expected = counts - world.repeated() if kind == "events" else world.repeated()
    assert {day: count for day, count in found.items() if day in counts} == expected


def _write_day(root: Path, day: int, kind: str = "samples", **columns: Any) -> None:
    moment = START + day * DAY + datetime.timedelta(hours=1, minutes=7)
    rows = [{"id": 10 * day + n, "time": moment, "user": n, "label": n % 2, **columns} for n in range(4)]
    (root / "rows").mkdir(exist_ok=True)
    frame = pd.DataFrame(rows)
    if kind == "logs":
        (root / "outcomes").mkdir(exist_ok=True)
        frame[["id", "time"]].assign(time=moment + DAY / 2).to_parquet(root / "outcomes" / f"{day:03}.parquet")
        frame = frame.drop(columns="label")
    frame.to_csv(root / "rows" / f"{day:03}.csv", index=False)


@pytest.mark.parametrize("kind, near", [("samples", 0), ("logs", 9), ("events", 8)])
def test_one_more_day_opens_its_own_files_and_those_near_to_it(tmp_path: Path, kind: str, near: int) -> None:
    for day in range(20):
        _write_day(tmp_path, day, kind)
    context = _context(tmp_path, kind, tmp_path / "home")
    first = _ingest(context)
    assert first.files is not None
    assert first.files.opened == (40 if kind == "logs" else 20)
    again = _ingest(context)
    assert again.files is not None
    assert (again.files.opened, again.files.total.rows, len(again.days_skipped)) == (0, 80, 20)
    _write_day(tmp_path, 20, kind)
    more = _ingest(context)
    assert more.files is not None
    assert datetime.date(2024, 1, 21) in more.days_written
    assert 1 <= more.files.opened <= 1 + near + (near + 1 if kind == "logs" else 0)
    assert more.files.total.rows == 84


@pytest.mark.parametrize("damage", ["lost", "cut", "not zipped", "other version", "half"])
def test_the_inventory_is_a_cache(tmp_path: Path, damage: str) -> None:
    for day in range(3):
        _write_day(tmp_path, day, "logs")
    context, other = (_context(tmp_path, "logs", tmp_path / home) for home in ("home", "other"))
    _ingest(context), _ingest(other)
    (path,) = _inventories(tmp_path / "home")
    if damage == "lost":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "not zipped":
        path.write_bytes(b"{}")
    else:
        found = json.loads(gzip.decompress(path.read_bytes()))
        if damage == "half":
            del found["rows"][min(found["rows"])], found["outcomes"][max(found["outcomes"])]
        else:
            found = {"files": found["rows"]}
        path.write_bytes(gzip.compress(json.dumps(found).encode()))
    _write_day(tmp_path, 3, "logs")
    _same(context, other, (_ingest(context), _ingest(other)))


def test_all_files_are_read_if_a_new_one_has_another_type_in_a_column_that_decides(tmp_path: Path) -> None:
    for day in range(3):
        _write_day(tmp_path, day)
    context = _context(tmp_path, "samples", tmp_path / "home")
    _ingest(context)
    _write_day(tmp_path, 3, label="yes")
    (tmp_path / "rows" / "003.csv").write_text(
        "id,time,user,label\n1,2024-01-04 01:00:00,1,1\n1,2024-01-04 01:00:00,1,yes\n"
    )
    said: list[str] = []
    result = _ingest(context, said.append)
    assert result.files is not None
    assert result.files.opened == 4
    assert result.quarantined == {"label is not a number": 1}
    assert [sentence for sentence in said if "all files are read" in sentence and "label" in sentence]


def test_a_new_file_without_a_column_has_nulls_of_its_type(tmp_path: Path) -> None:
    _write_day(tmp_path, 0, x=0.5, word="a")
    context = _context(tmp_path, "samples", tmp_path / "home")
    _ingest(context)
    (tmp_path / "rows" / "001.csv").write_text("id,time,user,label,word\n1,2024-01-02 01:00:00,1,1,\n")
    result = _ingest(context)
    assert result.files is not None
    assert result.files.opened == 1
    frame = pd.DataFrame(
        [row for row in _content(context.warehouse, "rows") if datetime.date(2024, 1, 2) in row],
        columns=sorted(context.warehouse.schema(context.warehouse.current("rows")).names),
    )
    assert frame[["word", "x"]].isna().all().all()


def test_force_reads_all_files_again(tmp_path: Path) -> None:
    for day in range(3):
        _write_day(tmp_path, day)
    context = _context(tmp_path, "samples", tmp_path / "home")
    _ingest(context)
    config = IngestConfig.model_validate({"checks": CHECKS})
    result = extract(context, config, force=True)
    assert result.files is not None
    assert (result.files.opened, len(result.days_written)) == (3, 3)


def _put(root: Path, name: str, **columns: list[Any]) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(columns).to_parquet(path)


def _at(day: float) -> datetime.datetime:
    return START + day * DAY + datetime.timedelta(hours=1, minutes=7)


def test_an_outcome_counts_for_the_impression_before_it_alone_if_a_key_comes_again(tmp_path: Path) -> None:
    """The first of the two has no outcome in its window, whichever days are written together."""
    days = {0: [1, 2], 20: [1, 3]}
    contexts = [_context(tmp_path, "logs", tmp_path / home) for home in ("nightly", "bulk")]
    for day, ids in days.items():
        _put(tmp_path, f"rows/{day:02}.parquet", id=ids, time=[_at(day)] * 2, user=[1, 2])
        _put(
            tmp_path,
            f"outcomes/{day:02}.parquet",
            id=[3, 2, 1][: 3 if day else 2],
            time=[_at(day + 0.1)] * (3 if day else 2),
        )
        _ingest(contexts[0])
    _ingest(contexts[1])
    first, second = (_content(context.warehouse, "rows") for context in contexts)
    assert first == second
    names = sorted(contexts[0].warehouse.schema(contexts[0].warehouse.current("rows")).names)
    labels = {(row[names.index("day")], row[names.index("id")]): row[names.index("label")] for row in first}
    assert labels == {
        (datetime.date(2024, 1, 1), 1): 0, (datetime.date(2024, 1, 1), 2): 1,
        (datetime.date(2024, 1, 21), 1): 1, (datetime.date(2024, 1, 21), 3): 1,
    }  # fmt: skip


def test_an_outcome_log_may_lag_with_an_empty_file(tmp_path: Path) -> None:
    for day in range(3):
        _write_day(tmp_path, day, "logs")
    context = _context(tmp_path, "logs", tmp_path / "home")
    _ingest(context)
    _put(tmp_path, "rows/006.parquet", id=[900], time=[_at(6)], user=[1])
    (tmp_path / "outcomes" / "006.jsonl").touch()
    assert datetime.date(2024, 1, 7) in _ingest(context).days_written


def test_a_day_without_a_rare_action_is_no_wrong_name(tmp_path: Path) -> None:
    outcomes = {
        **SOURCES["logs"]["outcomes"],
        "labels": {"label": {"action": "click"}, "bought": {"action": "buy"}},
    }
    source = SourceConfig.model_validate({**SOURCES["logs"], "outcomes": outcomes})
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "home")
    context = SourceContext(source, LabelColumns(), warehouse, "rows", tmp_path, tmp_path / "logs")
    for day in (0, 1, 20, 21):
        ids = [10 * day + number for number in range(8)]
        _put(tmp_path, f"rows/{day:02}.parquet", id=ids, time=[_at(day)] * 8, user=ids)
        actions = ["buy" if day < 2 and number == 1 else "click" for number in range(7)]
        _put(tmp_path, f"outcomes/{day:02}.parquet", id=ids[:7], time=[_at(day + 0.1)] * 7, action=actions)
        result = extract(context, IngestConfig.model_validate({"checks": {"one_label": "off", "losses": "off"}}))
        assert result.days_written


@pytest.mark.parametrize("key", [[1.0, 2.0], [1.0, None]])
def test_a_file_that_only_fits_together_with_the_others_is_read_with_them(tmp_path: Path, key: list[Any]) -> None:
    """pandas writes whole numbers with a missing one as fractions."""
    source = SourceConfig.model_validate({**SOURCES["samples"], "lookups": [{"path": "users.parquet", "on": ["user"]}]})
    context = SourceContext(
        source, LabelColumns(), Warehouse(WarehouseConfig(), tmp_path / "home"), "rows", tmp_path, tmp_path / "logs"
    )
    _put(tmp_path, "users.parquet", user=[1, 2], age=[30, 40])
    _put(tmp_path, "rows/0.parquet", time=[_at(0)] * 2, user=[1, 2], label=[0, 1])
    _ingest(context)
    _put(tmp_path, "rows/1.parquet", time=[_at(1)] * 2, user=key, label=[0, 1])
    assert _ingest(context).days_written == (datetime.date(2024, 1, 2),)


def test_the_first_days_of_a_table_have_the_types_of_all_files(tmp_path: Path) -> None:
    _put(tmp_path, "rows/0.parquet", time=[_at(0)] * 2, x=[1, 2], label=[0, 1])
    _put(tmp_path, "rows/1.parquet", time=[_at(1)] * 2, x=[1.5, 2.0], label=[0, 1])
    context = _context(tmp_path, "samples", tmp_path / "home")
    config = IngestConfig.model_validate({"checks": CHECKS})
    for day in source_days(context):
        assert extract(context, config, [day]).days_written == (day,)


def test_what_a_corrected_file_had_is_forgotten(tmp_path: Path) -> None:
    context = _context(tmp_path, "samples", tmp_path / "home")
    _put(tmp_path, "rows/0.parquet", time=[_at(0)] * 2, x=["n/a", "2"], prce=[1, 2], label=["a", "b"])
    with pytest.raises(DataError, match="labels of 1 day"):
        _ingest(context)
    _put(tmp_path, "rows/0.parquet", time=[_at(0)] * 2, x=[1, 2], price=[1, 2], label=[0, 1])
    _ingest(context)
    schema = context.warehouse.schema(context.warehouse.current("rows"))
    assert "prce" not in schema.names
    assert pa.types.is_integer(schema.field("x").type)


def test_truth_values_in_a_new_file_are_numbers_if_they_are_in_the_others(tmp_path: Path) -> None:
    context = _context(tmp_path, "samples", tmp_path / "home")
    for day, x in enumerate(([1, 5], [True, False])):
        _put(tmp_path, f"rows/{day}.parquet", time=[_at(day)] * 2, x=x, label=[0, 1])
        assert len(_ingest(context).days_written) == 1


def test_one_day_of_events_in_folders_knows_what_the_others_repeat(tmp_path: Path) -> None:
    events = EVENTS.model_copy(update={"path": "rows/*/*"})
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "home")
    context = SourceContext(
        events.source, LabelColumns(), warehouse, "rows", tmp_path, tmp_path / "logs", events=events
    )
    _put(tmp_path, "rows/time=2024-01-01/a.parquet", id=[1, 2], time=[_at(0)] * 2, user=[1, 2])
    _put(tmp_path, "rows/time=2024-01-02/a.parquet", id=[2, 3], time=[_at(1)] * 2, user=[1, 2])
    config = IngestConfig.model_validate({"checks": CHECKS})
    for only in ([], [datetime.date(2024, 1, 2)], []):
        extract(context, config, only)
        assert len(_content(warehouse, "rows")) == 3


def test_an_inventory_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "inventory").write_text("in the way")
    _write_day(tmp_path, 0)
    assert _ingest(_context(tmp_path, "samples", tmp_path / "home")).rows == 4


def test_near_files_are_found_in_the_order_of_their_times() -> None:
    """As by looking at each pair."""
    chance = random.Random(3)
    day = datetime.date(2024, 1, 1)

    def span() -> tuple[int, int]:
        first = chance.randrange(1_000)
        return first, first + chance.randrange(20)

    for _ in range(50):
        times = {f"{number}": span() for number in range(30)}
        files = {name: RowFile(1, 1, 1, {day: FileDay(1, 0, begin=one[0], end=one[1])}) for name, one in times.items()}
        spans, before, after = [span() for _ in range(chance.randrange(5))], chance.randrange(30), chance.randrange(30)
        expected = {
            name for name, (begin, end) in times.items()
            if any(end >= first - before and begin <= last + after for first, last in spans)
        }  # fmt: skip
        assert reached(files, spans, before, after).keys() == expected

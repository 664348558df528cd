"""Features as of a row's time: against a loop over rows and DuckDB's ASOF join, and never from the row's future."""

import datetime
import shutil
import tempfile
from pathlib import Path
from typing import Any

import duckdb
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from pyiceberg.types import LongType

from pipeline.data.joined import sorting
from pipeline.data.joined.reader import SORTED, SourceColumns, filter_schema, joined_schema, open_reader
from pipeline.data.joined.sorting import SortedLayout, open_sorted
from pipeline.data.joined.source import FeatureSource, PinnedSource, SourceRows, contents_by_day, pin_sources
from pipeline.data.selection import Selection
from pipeline.data.stored import to_micros
from pipeline.errors import ConfigError, ContractError, DataError
from pipeline.transforms.joins import EventWindow, FeatureJoin, History
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse
from tests.pipeline.data.joined.logs import DAYS, START, by_day, cut, events, sample_rows
from tests.pipeline.data.joined.tables import read, stored


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(WarehouseConfig(row_group_rows=100, file_rows=300), tmp_path / "home")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("on", "options"),
    [
        (["user"], {"last": 5}),
        (["user"], {"last": 1, "delay_seconds": 3_600}),
        (["user", "shop"], {"last": 1_000, "delay_seconds": 600}),
        (["user"], {"last": 3, "where": "action = 'finish'"}),
    ],
)
def test_histories_are_the_last_events_before_each_row(seed, on, options, tmp_path, warehouse):
    """Of equal times, in the order of the files. A filter of events counts before the length."""
    random = np.random.default_rng(seed)
    rows, log = sample_rows(random), events(random)
    snapshot = stored(warehouse, rows)
    half = int(random.integers(1, log.num_rows))
    for name, part in (("a", log[:half]), ("b", log[half:])):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=70)
    history = History(path="?.parquet", on=on, time="time", as_of="at", columns=["item"], prefix="seen_", **options)
    joined = pin_sources([history], tmp_path, warehouse)
    found = read(open_reader(warehouse, snapshot, ["row", "seen_item"], None, joined))
    expected = cut(
        rows, log, on, options.get("delay_seconds", 0), options["last"], "finish" if "where" in options else None
    )
    assert found.column("seen_item").type == pa.large_list(pa.int32())
    assert found.column("seen_item").to_pylist() == expected
    assert sum(map(len, expected)) > 100
    assert [] in expected


@pytest.mark.parametrize("delay", [0, 7_200])
def test_values_as_of_a_row_are_those_of_an_asof_join(delay, tmp_path, warehouse):
    random = np.random.default_rng(delay)
    rows, versions = sample_rows(random), events(random)
    kept = duckdb.sql("SELECT DISTINCT ON (user, shop, time) * FROM versions ORDER BY user, shop, time, item")
    versions = kept.to_arrow_table()
    pq.write_table(versions, tmp_path / "users.parquet")
    snapshot = stored(warehouse, rows)
    source = FeatureJoin(path="users.parquet", on=["user", "shop"], valid_from="time", as_of="at", delay_seconds=delay)
    joined = pin_sources([source], tmp_path, warehouse)
    text = "action = 'skip' and row > 3"
    filter_schema(warehouse, snapshot, joined, text)
    found = read(open_reader(warehouse, snapshot, ["row", "item"], None, joined))
    filtered = read(open_reader(warehouse, snapshot, ["row"], Selection(days=(), filter=text).expression(), joined))
    expected = duckdb.sql(
        f"SELECT s.row, v.item, v.action FROM rows s ASOF LEFT JOIN versions v ON s.user = v.user AND s.shop = v.shop"
        f" AND v.time <= s.at - INTERVAL {delay} SECONDS ORDER BY s.row"
    ).to_arrow_table()
    assert found.column("item").to_pylist() == expected.column("item").to_pylist()
    assert expected.column("item").null_count < 500
    skipped = [row["row"] for row in expected.to_pylist() if row["action"] == "skip" and row["row"] > 3]
    assert filtered.column("row").to_pylist() == skipped


@pytest.mark.parametrize(("delay", "action"), [(0, None), (1_800, "finish")])
def test_windows_are_those_of_a_join_by_time(delay, action, tmp_path, warehouse):
    """In DuckDB: each row with every event of its key in the window. A window begins with an event at its start."""
    random = np.random.default_rng(delay)
    rows, log = sample_rows(random), events(random)
    watched = pa.array(random.normal(size=len(log)), mask=random.random(len(log)) < 0.3)
    log = log.append_column("watched", watched).append_column("liked", pa.array(random.random(len(log)) < 0.4))
    for i in range(3):
        pq.write_table(log[i::3] if i else log[:0], tmp_path / f"{i}.parquet")
    pq.write_table(log[::3], tmp_path / "3.parquet")
    snapshot = stored(warehouse, rows)
    window = EventWindow(
        path="?.parquet", on=["user", "shop"], time="time", as_of="at", delay_seconds=delay, prefix="w_",
        where=None if action is None else f"action = '{action}'", seconds=[3_600, 86_400],
        take=["count", "sum", "mean"], columns=["item", "watched", "liked"],
    )  # fmt: skip
    joined = pin_sources([window], tmp_path, warehouse)
    made = ", ".join(
        f"count(e.time) FILTER ({inside}) w_count_{seconds}, "
        + ", ".join(
            f"coalesce(sum({column}) FILTER ({inside}), 0) w_{column}_sum_{seconds}, "
            f"avg({column}) FILTER ({inside}) w_{column}_mean_{seconds}"
            for column in ("item", "watched", "liked::INT")
        ).replace("liked::INT_", "liked_")
        for seconds in (3_600, 86_400)
        for inside in [f"WHERE e.time >= s.at - INTERVAL {delay + seconds} SECONDS"]
    )
    kept = "" if action is None else f" AND e.action = '{action}'"
    expected = duckdb.sql(
        f"SELECT s.row, {made} FROM rows s LEFT JOIN log e ON s.user = e.user AND s.shop = e.shop{kept}"
        f" AND e.time < s.at - INTERVAL {delay} SECONDS GROUP BY s.row ORDER BY s.row"
    ).to_arrow_table()
    names = joined_schema(warehouse, snapshot, joined).names[rows.num_columns :]
    assert sorted(names) == sorted(expected.column_names[1:])
    found = read(open_reader(warehouse, snapshot, names, None, joined))
    assert found.column("w_count_86400").type == pa.int64()
    for name in names:
        numbers = [column.cast(pa.float64()).to_numpy() for column in (found.column(name), expected.column(name))]
        np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-12, atol=1e-12, err_msg=name)
    assert 50 < sum(found.column("w_count_3600").to_pylist()) < sum(found.column("w_count_86400").to_pylist())
    some = names[3:5]  # a model reads only some
    again = read(open_reader(warehouse, snapshot, some, None, joined))
    assert again == found.select(some)


@pytest.mark.nightly
def test_a_table_of_the_warehouse_is_a_log_and_later_events_are_not_in_its_snapshot(warehouse):
    random = np.random.default_rng(5)
    rows, log = sample_rows(random), events(random)
    snapshot = stored(warehouse, rows)
    dated = by_day(log)
    stored(warehouse, dated, "watched")
    history = History(table="watched", on="user", time="time", as_of="at", columns=["item"], last=4)
    joined = pin_sources([history], Path(), warehouse)
    expected = cut(rows, dated, ["user"], 0, 4)
    late = dated.slice(0, 300)
    stored(warehouse, pa.concat_tables([dated, late]), "watched")
    assert read(open_reader(warehouse, snapshot, ["item"], None, joined)).column("item").to_pylist() == expected
    newer = pin_sources([history], Path(), warehouse)
    assert read(open_reader(warehouse, snapshot, ["item"], None, newer)).column("item").to_pylist() != expected


def test_another_version_of_the_code_sorts_anew(tmp_path, warehouse, monkeypatch):
    snapshot = stored(warehouse, sample_rows(np.random.default_rng(1)))
    pq.write_table(events(np.random.default_rng(2)), tmp_path / "log.parquet")
    history = History(
        path="log.parquet", on=["user"], time="time", as_of="at", last=3, prefix="seen_", columns=["item"]
    )
    joined = pin_sources([history], tmp_path, warehouse)

    def folder():
        reader = open_reader(warehouse, snapshot, ["row", "seen_item"], None, joined)
        read(reader)
        return reader.sides[0].sorted_folder

    first = folder()
    assert folder() == first
    monkeypatch.setattr(sorting, "CODE", "another")
    assert folder() != first
    assert len(list(first.parents[1].glob(f"*/*/{sorting.MANIFEST}"))) == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("delay", [0, 86_400])
@pytest.mark.parametrize("changed", range(DAYS))
def test_the_content_of_a_day_is_what_its_rows_can_see_of_a_log(changed, delay, warehouse):
    """Against the values themselves: where the content is the same, so are they."""
    random = np.random.default_rng(changed)
    rows, log = sample_rows(random), by_day(events(random))
    day = START.date() + datetime.timedelta(days=changed)
    snapshot = stored(warehouse, rows)
    history = History(
        table="watched", on="user", time="time", as_of="at", last=4, columns=["item"], delay_seconds=delay
    )
    days = rows.column("day").unique().to_pylist()

    def pin(log: pa.Table) -> tuple[dict[datetime.date, str], dict[datetime.date, pa.Table]]:
        stored(warehouse, log, "watched")
        joined = pin_sources([history], Path(), warehouse)
        read_rows = read(open_reader(warehouse, snapshot, ["day", "item"], None, joined))
        found = {day: read_rows.filter(pc.equal(read_rows.column("day"), day)) for day in days}
        return contents_by_day(joined[0], warehouse, snapshot, days), found

    contents, values = pin(log)
    more = by_day(events(random))
    others, values_now = pin(more.filter(pc.equal(more.column("day"), day)))  # the other days of the log stay
    assert [one for one in days if contents[one] == others[one]] == [
        one for one in days if one < day + datetime.timedelta(seconds=delay)
    ]
    for one in days:
        assert contents[one] != others[one] or values[one] == values_now[one]
    assert values != values_now or changed == DAYS - 1


LAYOUT = SortedLayout([pa.int64()], [pa.int64()], unique=False)
Event = tuple[int, int, int]
"""User, second and item."""


@pytest.mark.nightly
@settings(max_examples=25, deadline=None)  # each sorts two logs
@given(
    early=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 9)), max_size=30),
    late=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 9)), max_size=30),
    other=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 9)), max_size=30),
    at=st.integers(5, 60),
    delay=st.integers(0, 5),
)
def test_no_event_at_or_after_the_border_changes_a_row(early, late, other, at, delay):
    """Whatever is added, changed or removed there."""
    border = at - delay
    before = [event for event in early if event[1] < border]

    def history(more: list[Event]) -> list[int]:
        every = before + [event for event in more if event[1] >= border]
        users, seconds, items = ([event[i] for event in every] for i in range(3))
        micros = pa.array([1_000_000 * one for one in seconds], pa.int64())
        rows = SourceRows([pa.array(users, pa.int64())], micros, [pa.array(items, pa.int64())])
        with tempfile.TemporaryDirectory() as folder:
            index = open_sorted(lambda _: iter([("all", rows)]), {"all": "1"}, LAYOUT, Path(folder) / "sorted", "log")
        row = [pa.array([1], pa.int64())], pa.array([1_000_000 * at], pa.int64())
        found = index.find(*row, 1_000_000 * delay, until=False)
        return index.values[0].to_pylist()[found.first[0] : found.end[0]]

    expected = [item for user, _, item in sorted(before, key=lambda event: event[1]) if user == 1]
    assert history(late) == history(other) == expected


def test_a_day_in_a_log_has_happened_at_its_end(tmp_path, warehouse):
    """A date says that something happened on a day, not when. So no row of that day knows it."""
    day = START.date()
    rows = pa.table({"day": [day, day + datetime.timedelta(days=1)], "user": [1, 1]})
    rows = rows.append_column("at", rows.column("day").cast(pa.timestamp("us")))
    noon = rows.set_column(2, "at", pc.add(rows.column("at"), pa.scalar(43_200_000_000, pa.duration("us"))))
    pq.write_table(pa.table({"user": [1], "on": [day], "item": [7]}), tmp_path / "log.parquet")
    last = History(path="log.parquet", on="user", time="on", as_of="at", columns="item", prefix="seen_")
    value = FeatureJoin(path="log.parquet", on="user", valid_from="on", as_of="at", columns="item")
    joined = pin_sources([last, value], tmp_path, warehouse)
    for name, samples in (("t", rows), ("t", noon), ("dated", rows.set_column(2, "at", rows.column("day")))):
        found = read(open_reader(warehouse, stored(warehouse, samples, name), ["item", "seen_item"], None, joined))
        assert found.to_pydict() == {"item": [None, 7], "seen_item": [[], [7]]}


def test_filters_compare_values_as_the_warehouse_stores_them(tmp_path, warehouse):
    """Nanoseconds, zones, small floats and large integers of other writers, and the time itself."""
    moment = START.replace(tzinfo=None)
    log = pa.table(
        {
            "user": [1, 1, 1],
            "time": pa.array([moment + datetime.timedelta(hours=i) for i in range(3)], pa.timestamp("ns")),
            "zoned": pa.array([START + datetime.timedelta(hours=i) for i in range(3)], pa.timestamp("s", "Asia/Tokyo")),
            "share": pa.array([0.25, 0.5, 0.75], pa.float16()),
            "item": pa.array([5, 6, 2**63 + 7], pa.uint64()),
        }
    )
    pq.write_table(log, tmp_path / "log.parquet")
    rows = pa.table({"day": [START.date()], "user": [1], "at": [moment + datetime.timedelta(hours=9)]})
    snapshot = stored(warehouse, rows)
    kept = {
        "share >= 0.5": [7 - 2**63, 6], "time < '2025-03-01T02:00:00'": [6, 5], "item > 0": [6, 5],
        "zoned > '2025-03-01T00:30:00+00:00' and share < 0.7": [6],
    }  # fmt: skip
    for text, expected in kept.items():
        history = History(path="log.parquet", on="user", time="time", as_of="at", columns="item", where=text)
        joined = pin_sources([history], tmp_path, warehouse)
        found = read(open_reader(warehouse, snapshot, ["item"], None, joined))
        assert found.column("item").to_pylist() == [expected], text


def test_times_of_every_kind_are_compared_in_utc():
    moment = datetime.datetime(2025, 3, 1, 12, tzinfo=datetime.UTC)
    micros = int(moment.timestamp() * 1_000_000)
    berlin = pa.array([moment], pa.timestamp("s", "Europe/Berlin"))
    naive = pa.array([moment.replace(tzinfo=None)], pa.timestamp("ms"))
    assert to_micros("t", berlin).to_pylist() == to_micros("t", naive).to_pylist() == [micros]
    assert to_micros("t", pa.array([moment.date()])).to_pylist() == [micros - 43_200_000_000]
    with pytest.raises(DataError, match="expected times within 290,000 years of 1970"):
        to_micros("t", pa.array([2**50], pa.timestamp("s")))
    parts = pa.array([-1_500, -1_000, 0, 1, 1_000, None], pa.timestamp("ns"))
    assert to_micros("t", parts).to_pylist() == [-1, -1, 0, 1, 1, None]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a time that is none": ({"time": "item"}, "time 'item': expected timestamps or dates, got uint16"),
    "rows without the time": ({"as_of": "when"}, "as_of 'when': expected a column of the table"),
    "rows with another time": ({"as_of": "row"}, "as_of 'row': expected timestamps or dates, got int64"),
    "a filter of unknown columns": (
        {"where": "acton = 'skip'"},
        "where, column 'acton': expected a column of the table",
    ),
    "a filter of another type": ({"where": "action = 3"}, "filter 'action = 3': expected"),
    "a log without the time": ({"time": "tme"}, "column 'tme': expected a column of the table"),
    "a column without values": ({"columns": ["none"]}, "column 'none': expected a value in some row"),
    "lists of lists": ({"columns": ["parts"]}, "column 'parts': expected a number, id or text of each event"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_history_is_refused(case, tmp_path, warehouse):
    change, sentence = REFUSED[case]
    random = np.random.default_rng(1)
    snapshot, log = stored(warehouse, sample_rows(random)), events(random)
    log = log.append_column("parts", pa.array([[1]] * len(log))).append_column("none", pa.nulls(len(log)))
    pq.write_table(log, tmp_path / "log.parquet")
    given = {"path": "log.parquet", "on": "user", "time": "time", "as_of": "at", "columns": ["item"]} | change
    with pytest.raises(ContractError) as error:
        joined_schema(warehouse, snapshot, pin_sources([History(**given)], tmp_path, warehouse))
    assert sentence in str(error.value)


def test_a_key_with_two_values_from_one_moment_is_refused(tmp_path, warehouse):
    moment = datetime.datetime(2025, 3, 1, 12)
    users = pa.table({"user": [1, 2, 1], "since": [moment] * 3, "tier": [1, 2, 3]})
    pq.write_table(users, tmp_path / "users.parquet")
    snapshot = stored(warehouse, sample_rows(np.random.default_rng(1)))
    source = FeatureJoin(path="users.parquet", on="user", valid_from="since", as_of="at")
    with pytest.raises(DataError) as error:
        read(open_reader(warehouse, snapshot, ["tier"], None, pin_sources([source], tmp_path, warehouse)))
    assert str(error.value) == (
        "features.joined 'users.parquet': expected each key once in each microsecond, got key 1 more than once at 2025-03-01 "
        "12:00:00. Remove duplicates."
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"as_of": "at"}, "`as_of` together with `valid_from`, got one of them"),
        ({"as_of": "at", "valid_from": "since", "day_column": "day"}, "`day_column` or `as_of`, got both"),
        ({"delay_seconds": 5}, "`as_of` with `delay_seconds`, got none"),
    ],
)
def test_times_that_do_not_fit_together_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        FeatureJoin(path="users.parquet", on="user", **options)


def test_windows_need_columns_to_sum_and_these_need_numbers(tmp_path, warehouse):
    given: dict[str, Any] = {"path": "log.parquet", "on": "user", "time": "time", "as_of": "at", "seconds": [60]}
    for options in ({"take": ["sum"]}, {"columns": ["item"]}):
        with pytest.raises(ConfigError, match="expected `columns` with take sum or mean"):
            EventWindow(**given, **options)
    counts = PinnedSource(source=EventWindow(**given))  # without columns
    assert PinnedSource.model_validate_json(counts.model_dump_json()) == counts
    random = np.random.default_rng(1)
    snapshot = stored(warehouse, sample_rows(random))
    pq.write_table(events(random), tmp_path / "log.parquet")
    joined = pin_sources([EventWindow(**given, take=["mean"], columns=["action"])], tmp_path, warehouse)
    with pytest.raises(ConfigError, match=r"column 'action': expected a number of each event, got large_string"):
        joined_schema(warehouse, snapshot, joined)


def look_up(source: History, root: Path, warehouse: Warehouse) -> tuple[list[Any], list[Any]]:
    """The history of user 1, with the sorted files that are there, and without any."""
    found = []
    for _ in range(2):
        side = SourceColumns(FeatureSource(pin_sources([source], root, warehouse)[0], warehouse), ["seen_item"])
        at = pa.array([START.replace(tzinfo=None) + datetime.timedelta(30)])
        found.append(side.look_up({"user": pa.array([1]), "at": at}, START.date())[0].to_pylist()[0])
        shutil.rmtree(warehouse.home / SORTED)
    return found[0], found[1]


@pytest.mark.parametrize("change", ["time", "where", "key", "item"])
def test_a_new_file_that_changes_the_types_of_others_sorts_them_anew(change, tmp_path, warehouse):
    days = [START.date() + datetime.timedelta(number) for number in range(4)]
    moments = [datetime.datetime.combine(day, datetime.time()) for day in days]
    first = {"user": [1] * 4, "time": moments, "item": [0, 1, 2, 3], "kind": [1] * 4}
    new = {"user": [1], "time": [moments[1] + datetime.timedelta(hours=12)], "item": [55], "kind": [1]}
    if change == "time":
        first["time"] = days  # each has happened at its end
    if change == "where":
        new["kind"] = ["01"]
    if change == "key":
        first["user"] = pa.array([1] * 4, pa.int32())
    if change == "item":
        new["item"] = ["fifty-five"]
    history = History(
        path="*.parquet", on="user", time="time", as_of="at", columns="item", prefix="seen_", last=9,
        where="kind = '01'" if change == "where" else "kind = 1",
    )  # fmt: skip
    pq.write_table(pa.table(first), tmp_path / "a.parquet")
    side = SourceColumns(FeatureSource(pin_sources([history], tmp_path, warehouse)[0], warehouse), ["seen_item"])
    side.load_day(None)
    pq.write_table(pa.table(new), tmp_path / "b.parquet")
    kept, anew = look_up(history, tmp_path, warehouse)
    assert kept == anew
    assert {"time": [3, 2, 55, 1, 0], "where": [55], "item": ["3", "2", "fifty-five", "1", "0"]}.get(
        change, [3, 2, 55, 1, 0]
    ) == anew


def test_a_column_that_was_dropped_and_added_again_is_sorted_anew(tmp_path, warehouse):
    log = by_day(events(np.random.default_rng(1)))
    log = log.set_column(log.schema.get_field_index("user"), "user", pa.array([1] * len(log)))
    stored(warehouse, log, "watched")
    history = History(table="watched", on="user", time="time", as_of="at", columns=["item"], prefix="seen_", last=9)
    before, _ = look_up(history, tmp_path, warehouse)
    side = SourceColumns(FeatureSource(pin_sources([history], tmp_path, warehouse)[0], warehouse), ["seen_item"])
    side.load_day(None)
    for change in (lambda one: one.delete_column("item"), lambda one: one.add_column("item", LongType())):
        with warehouse.table("watched").update_schema() as update:
            change(update)
    last = log.slice(0, 1)
    day = START.date() + datetime.timedelta(25)
    last = last.set_column(last.schema.get_field_index("day"), "day", pa.array([day]))
    last = last.set_column(last.schema.get_field_index("item"), "item", pa.array([901]))
    stored(warehouse, last, "watched")
    kept, anew = look_up(history, tmp_path, warehouse)
    assert kept == anew
    assert kept != before
    assert set(kept) <= {None, 901}

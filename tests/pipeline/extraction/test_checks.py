"""Each rule: a day that breaks only this rule, a normal day, and what happens to such days."""

import datetime
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import measurement
from pipeline.data.measurement import measure
from pipeline.data.profile import SCHEMA, profiles
from pipeline.errors import ConfigError, DataError, EmptyDatasetError
from pipeline.extraction import extract
from pipeline.extraction.checks import CheckResult, KnownDays, band, check
from pipeline.extraction.config import ChecksConfig, Rule
from pipeline.jobs.ingest.plots import day_figure
from storage.reader import DAY
from storage.warehouse import Warehouse
from tests.homes import read_rows

DAYS = [datetime.date(2025, 3, 1) + datetime.timedelta(days=i) for i in range(6)]
LAST = DAYS[-1]


def rows(day: datetime.date, count: int = 1_000, seed: int | None = None) -> pa.Table:
    """A normal day. Equal seeds give equal rows."""
    draw = np.random.default_rng(day.toordinal() if seed is None else seed)
    return pa.table(
        {
            "date": pa.array([day] * count),
            "key": draw.permutation(count),
            "label": (draw.random(count) < 0.2).astype(np.int64),
            "price": pa.array(draw.lognormal(size=count), mask=draw.random(count) < 0.1),
            "user": draw.zipf(1.5, count) % 1_000,
            "items": pa.array([draw.integers(0, 50, n) for n in draw.poisson(3.0, count)], pa.list_(pa.int64())),
            "old": draw.random(count),
            "new": pa.nulls(count, pa.float64()),
        }
    )


def put(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values))


def nulled(share: float, name: str, table: pa.Table) -> pa.Table:
    mask = np.arange(len(table)) < share * len(table)
    return put(
        table,
        name,
        pa.array(table[name].to_pylist(), table[name].type).filter(pa.array(~mask)).to_pylist()
        + [None] * int(mask.sum()),
    )


BREAKS: dict[Rule, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "rows": (lambda table: table.slice(0, 450), "day 2025-03-06, rule rows: expected 500 to 1500 as on the 5 days before it, got 450"),
    "label_rate": (lambda table: put(table, "label", [1] * 500 + [0] * 500), "day 2025-03-06, rule label_rate: expected 0."),
    "coverage": (partial(nulled, 0.4, "price"), "day 2025-03-06, rule coverage, column 'price': expected "),
    "length": (lambda table: put(table, "items", [[i % 50, (i + 9) % 50, (7 * i) % 50, (3 * i) % 50, (11 * i) % 50] if i % 20 else [] for i in range(1_000)]), "day 2025-03-06, rule length, column 'items': expected 2."),
    "vanished": (lambda table: table.drop_columns(["old"]), "day 2025-03-06, rule vanished, column 'old': expected values, as on the 5 days before it, got no such column"),
    "appeared": (lambda table: put(table, "new", np.ones(len(table))), "day 2025-03-06, rule appeared, column 'new': expected no values, as on the 5 days before it, got values"),
    "changed_type": (lambda table: put(table, "user", [f"u{i}" for i in table["user"].to_pylist()]), "day 2025-03-06, rule changed_type, column 'user': expected id, as on the 5 days before it, got text"),
    "duplicates": (lambda table: put(table, "key", [7] * 3 + list(range(10, 1_007))), "day 2025-03-06, rule duplicates: expected at most 0 rows with a repeated key, got 2 of 1000"),
    "drift": (lambda table: put(table, "old", 10.0 * table["old"].to_numpy()), "day 2025-03-06, rule drift, column 'old': expected values spread as on the 5 days before it: an index of at most 0."),
}  # fmt: skip


def measured(tables: list[pa.Table]) -> pa.Table:
    named = [table.rename_columns([DAY, *table.column_names[1:]]) for table in tables]
    return pa.concat_tables([measure(table.schema, table.to_batches(), {"label"}) for table in named])


@pytest.fixture(scope="module")
def before() -> pa.Table:
    """Statistics of five normal days."""
    return measured([rows(day) for day in DAYS[:-1]])


def describe(checked: CheckResult) -> list[str]:
    return [f"{one.where}: expected {one.expected}, got {one.got}" for one in checked.findings]


def test_every_rule_has_a_day_that_breaks_it() -> None:
    elsewhere = {"losses", "future", "one_label", "unmatched", "constant"}
    assert set(get_args(Rule)) - elsewhere == BREAKS.keys(), "see test_data_loss.py and test_absolute.py"


@pytest.mark.parametrize("rule", BREAKS)
def test_a_day_that_breaks_one_rule(rule: Rule, before: pa.Table) -> None:
    change, expected = BREAKS[rule]
    new = measured([change(rows(LAST))])
    repeated = {LAST: 2} if rule == "duplicates" else {}
    profile, checked = check(new, before, ChecksConfig(), "label", KnownDays(duplicates=repeated))
    assert [finding.rule for finding in checked.findings] == [rule]
    assert describe(checked)[0].startswith(expected)
    outcome = ChecksConfig().outcome(rule)
    assert checked.counts() == {outcome: 1}
    assert (profile.schema, profile.num_rows) == (SCHEMA, new.num_rows)
    off = ChecksConfig.model_validate({rule: "off"})
    assert check(new, before, off, "label", KnownDays(duplicates=repeated))[1].counts() == {"ok": 1}


def test_a_normal_day_breaks_no_rule(before: pa.Table) -> None:
    checked = check(measured([rows(LAST)]), before, ChecksConfig(), "label", KnownDays())[1]
    assert (checked.findings, checked.counts(), checked.held_back) == ((), {"ok": 1}, set())
    assert [day.outcome for day in checked.days] == ["stored"] * 5 + ["ok"]


def test_with_few_days_before_it_a_day_is_not_compared(before: pa.Table) -> None:
    new = measured([BREAKS["rows"][0](rows(LAST))])
    two = before.filter(pa.compute.greater_equal(before[DAY], pa.scalar(DAYS[3])))
    assert check(new, two, ChecksConfig(), "label", KnownDays())[1].findings == ()
    assert len(check(new, two, ChecksConfig(minimum_days=2), "label", KnownDays())[1].findings) == 1


def test_columns_can_be_skipped(before: pa.Table) -> None:
    new = measured([BREAKS["coverage"][0](rows(LAST))])
    assert check(new, before, ChecksConfig(skip=("pri*",)), "label", KnownDays())[1].findings == ()


def test_later_days_are_not_compared_with_held_back_days(before: pa.Table) -> None:
    """Four days with half the rows: each is held back, the last one too."""
    days = [LAST + datetime.timedelta(days=i) for i in range(4)]
    new = measured([rows(day, count=450) for day in days])
    held = check(new, before, ChecksConfig(rows="quarantine", trailing_days=3), "label", KnownDays())[1]
    assert held.held_back == set(days)
    warned = check(new, before, ChecksConfig(rows="warn", trailing_days=3), "label", KnownDays())[1]
    assert [finding.day for finding in warned.findings] == days[:2]


@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 60), seed=st.integers(0, 2**32), days=st.integers(2, 8))
def test_identical_days_break_no_rule(count: int, seed: int, days: int) -> None:
    one = measured([rows(DAYS[0], count, seed)])
    same = [
        one.set_column(0, DAY, pa.array([DAYS[0] + datetime.timedelta(days=i)] * len(one), pa.date32()))
        for i in range(days)
    ]
    strict = ChecksConfig(
        minimum_days=1,
        one_label="off",
        spread=0.1,
        coverage_change=0,
        length_change=0,
        label_rate_change=0,
        rows_change=0,
        drift_limit=1e-9,
    )
    assert check(pa.concat_tables(same), SCHEMA.empty_table(), strict, "label", KnownDays())[1].findings == ()


def test_a_band_is_as_wide_as_the_widest_of_its_reasons() -> None:
    past = [1.0, 2.0, 3.0, 4.0, 100.0]
    assert band(past, 0.0, 0.0, 2.0) == pytest.approx((3 - 2 * 1.4826, 3 + 2 * 1.4826))
    assert band(past, 2.5, 0.0, 0.1) == (0.5, 5.5)
    assert band([3.0, 3.0, 5.0], 0.0, 1.0, 10.0) == (0.0, 13.0)


# Through the ingest


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Writes each day to a file of its own. The last one is changed."""

    def write(change: Callable[[pa.Table], pa.Table] = lambda table: table) -> dict[str, Any]:
        for day in DAYS:
            path = tmp_path / f"{day}.parquet"
            if day == LAST or not path.exists():  # rewriting a file would make its day new
                pq.write_table(change(rows(day)) if day == LAST else rows(day), path)
        return {"path": "*.parquet", "day_column": "date"}

    return write


def days_of(warehouse: Warehouse, table: str = "events") -> dict[datetime.date, int]:
    return warehouse.day_rows(warehouse.current(table))


def test_statistics_are_stored_with_their_days(ingest: Any, source: Any, warehouse: Warehouse) -> None:
    result = ingest(source(), dense=["price"])
    assert result.checked.counts() == {"ok": 6}
    found = profiles(warehouse, "events", [LAST])
    kinds = dict(zip(found["column"].to_pylist(), found["kind"].to_pylist(), strict=True))
    assert kinds == {"date": "other", "key": "id", "label": "number", "price": "number", "user": "id", "items": "ids", "old": "number", "new": "number"}  # fmt: skip
    assert set(profiles(warehouse, "events")[DAY].to_pylist()) == set(DAYS)
    put_again = source(lambda table: table.slice(0, 700))
    ingest(put_again, profile=False, dense=["price"], checks={"losses": "off"})
    assert profiles(warehouse, "events", [LAST]).num_rows == 0
    assert profiles(warehouse, "events").num_rows == 40


def test_a_day_that_fails_is_not_written_and_the_sentence_says_why(
    ingest: Any, source: Any, warehouse: Warehouse
) -> None:
    with pytest.raises(DataError) as error:
        ingest(source(BREAKS["rows"][0]), checks={"rows": "fail"})
    assert str(error.value) == (
        "day 2025-03-06, rule rows: expected 500 to 1500 as on the 5 days before it, got 450. "
        "Correct the source, or set ingest.checks.rows to quarantine, warn or off."
    )
    assert not warehouse.has_table("events")
    assert ingest(source(), checks={"rows": "fail"}).rows == 6_000


def test_a_quarantined_day_is_held_back_until_the_rule_is_relaxed(
    ingest: Any, source: Any, warehouse: Warehouse
) -> None:
    changed = source(BREAKS["rows"][0])
    first = ingest(changed, checks={"rows": "quarantine"})
    assert (first.days_held, first.rows, first.days_written) == ((LAST,), 5_000, tuple(DAYS[:-1]))
    assert (days_of(warehouse), days_of(warehouse, "events_held")) == (dict.fromkeys(DAYS[:-1], 1_000), {LAST: 450})
    assert profiles(warehouse, "events", [LAST]).num_rows == 0
    again = ingest(changed, checks={"rows": "quarantine"})
    assert (again.days_held, again.days_written, again.days_skipped) == ((LAST,), (), tuple(DAYS[:-1]))
    assert again.snapshot == first.snapshot
    forced = ingest(changed, checks={"rows": "quarantine"}, force=True)
    assert forced.days_held == (LAST,), "force admits days that lose something, not other broken rules"
    held = warehouse.current("events_held")
    stricter = ingest(changed, checks={"rows": "quarantine", "drift": "quarantine"})
    assert (stricter.days_held, stricter.days_written) == ((LAST,), ()), "it is checked again"
    assert warehouse.current("events_held") != held
    let_in = ingest(changed, checks={"rows": "warn"})
    assert (let_in.days_held, let_in.days_written, let_in.rows) == ((), (LAST,), 450)
    assert (days_of(warehouse)[LAST], days_of(warehouse, "events_held")) == (450, {})


def test_a_corrected_day_leaves_the_held_back_ones(ingest: Any, source: Any, warehouse: Warehouse) -> None:
    ingest(source(BREAKS["rows"][0]), checks={"rows": "quarantine"})
    assert ingest(source(), checks={"rows": "quarantine"}).days_written == (LAST,)
    assert (days_of(warehouse)[LAST], days_of(warehouse, "events_held")) == (1_000, {})


def test_an_older_version_of_a_held_back_day_stays(ingest: Any, source: Any, warehouse: Warehouse) -> None:
    ingest(source())
    result = ingest(source(BREAKS["rows"][0]), checks={"rows": "quarantine"})
    assert result.days_held == (LAST,)
    assert days_of(warehouse)[LAST] == 1_000
    assert ingest(source(BREAKS["rows"][0]), checks={"rows": "quarantine"}).days_held == (LAST,)


def test_duplicates_are_counted_by_the_key(ingest: Any, source: Any, warehouse: Warehouse) -> None:
    changed = source(BREAKS["duplicates"][0])
    assert ingest(changed).checked.findings == (), "no key, no rule"
    result = ingest(changed, checks={"key": "key"}, force=True)
    assert describe(result.checked) == [BREAKS["duplicates"][1]]
    with pytest.raises(ConfigError, match=r"ingest.checks.key: expected a column of the rows, got 'kye'"):
        ingest(changed, checks={"key": "kye"}, force=True)


def test_where_no_day_passes_there_is_no_table(ingest: Any, source: Any) -> None:
    with pytest.raises(EmptyDatasetError) as error:
        ingest(source(), checks={"duplicates": "quarantine", "key": "label"})
    assert str(error.value) == (
        "table 'events': expected a day that keeps the rules of ingest.checks, got 6 day(s), all held back in "
        "table 'events_held'. Correct the source, or relax the rule and run again."
    )


def test_the_figure_shows_days_and_findings(before: pa.Table, tmp_path: Path) -> None:
    new = measured([BREAKS["coverage"][0](rows(LAST, count=1_600))])
    checked = check(new, before, ChecksConfig(), "label", KnownDays())[1]
    assert {finding.rule for finding in checked.findings} >= {"rows", "coverage"}
    figure = day_figure("New days", checked)
    assert [axes.get_ylabel() for axes in figure.axes] == ["rows", "label rate", "coverage, % of rows"]
    assert "price" in [text.get_text() for text in figure.axes[2].get_legend().get_texts()]
    figure.savefig(tmp_path / "figure.png")


def test_statistics_lost_between_two_commits_are_measured_by_the_next_ingest(
    ingest: Any, source: Any, warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of = source()
    with monkeypatch.context() as killed:
        killed.setattr(extract, "store_profile", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ingest(rows_of, dense=["price"])
    assert profiles(warehouse, "events").num_rows == 0
    again = ingest(rows_of, dense=["price"])
    assert (again.days_written, profiles(warehouse, "events").num_rows) == ((), 48)
    taken = Mock()
    monkeypatch.setattr(measurement, "measure_days", taken)
    ingest(rows_of, dense=["price"])
    taken.assert_not_called()


def shares_of_a_year(kind: str, draw: np.random.Generator) -> Any:
    """Shares of the 16 buckets on each of 365 ordinary days."""
    usual, weekend = draw.dirichlet(np.full(16, 2.0)), draw.dirichlet(np.full(16, 2.0))
    days = np.arange(365)[:, None]
    made = {
        "alike": np.zeros((365, 16)),
        "weekends": np.where(days % 7 >= 5, np.log(weekend / usual), 0.0),
        "seasons": 0.8 * np.sin(2.0 * np.pi * (days / 365 + np.arange(16) / 16)),
        "restless": 0.45 * draw.normal(size=(365, 16)),
    }[kind]
    shares = usual * np.exp(made)
    return shares / shares.sum(axis=1, keepdims=True)


def judged_year(kind: str, change: bool, columns: int = 4) -> tuple[int, CheckResult]:
    """A year of columns. With a change, their values are spread otherwise from the last day on."""
    rows: list[dict[str, Any]] = []
    for number in range(columns):
        draw = np.random.default_rng([7, number])
        for at, share in enumerate(shares_of_a_year(kind, draw)):
            counts = draw.multinomial(
                5_000, np.sort(share)[::-1] ** 4 / (share**4).sum() if change and at == 364 else share
            )
            day = datetime.date(2025, 1, 1) + datetime.timedelta(days=at)
            rows.append({DAY: day, "column": f"c{number}", "kind": "text", "rows": 5_000, "present": 5_000, "distinct": 900, "histogram": counts.tolist()})  # fmt: skip
    table = pa.Table.from_pylist(rows, SCHEMA).sort_by([(DAY, "ascending"), ("column", "ascending")])
    result = check(table, SCHEMA.empty_table(), ChecksConfig(), None, KnownDays())[1]
    return sum(finding.rule == "drift" for finding in result.findings), result


@pytest.mark.parametrize("kind", ["alike", "weekends", "seasons", "restless"])
def test_a_column_of_ordinary_days_drifts_at_most_twice_a_year(kind: str) -> None:
    """Weekends alone gave 104 findings a year where every index above the limit counted."""
    assert judged_year(kind, False)[0] <= 2 * 4


@pytest.mark.parametrize("kind", ["alike", "weekends", "seasons"])
def test_a_change_is_found_among_ordinary_days(kind: str) -> None:
    last = [one for one in judged_year(kind, True)[1].findings if one.day == datetime.date(2025, 12, 31)]
    assert {one.rule for one in last} == {"drift"}
    assert len(last) >= 3


def test_the_drift_of_columns_that_no_feature_reads_is_not_judged() -> None:
    early, late = [100] * 8 + [0] * 8, [0] * 8 + [100] * 8
    made = [
        {DAY: day, "column": name, "kind": "id", "rows": 800, "present": 800, "distinct": 90, "histogram": late if day == LAST else early}
        for day in DAYS
        for name in ("cat_user", "other")
    ]  # fmt: skip
    table = pa.Table.from_pylist(made, SCHEMA)
    found = [
        check(table, SCHEMA.empty_table(), ChecksConfig(), None, KnownDays(features=read))[1]
        for read in (("cat_*",), ("*",), ())
    ]
    assert [[one.column for one in result.findings] for result in found] == [
        ["cat_user"],
        ["cat_user", "other"],
        ["cat_user", "other"],
    ]


MISFITS: dict[str, tuple[list[Any], list[Any], list[Any], str]] = {
    "text": ([1, 2**60], [None, "u1"], [3, -4], "whole numbers"),
    "fractions": ([1, 2], [1.5, None], [3.0, None], "whole numbers"),
    "numbers": ([0.1, 2.0], ["1,5", "2"], [7, 2**40], "numbers up to 2^53"),
    "words": ([True, False], ["yes", "no"], [False, None], "truth values"),
    "lists": ([[1], [2, 3]], [["a"], []], [[2**60], None], "lists of whole numbers"),
    "list of one": ([1, 2], [[1], [2, 3]], [3, 4], "whole numbers"),
    "no list": ([[1], [2, 3]], ["1|2", None], [[4], []], "lists of whole numbers"),
    "days": ([datetime.date(2025, 1, 1)] * 2, ["n/a", None], [datetime.date(1, 1, 1), None], "dates"),
    "times": ([datetime.datetime(2025, 1, 1, 5)] * 2, ["soon", None], [datetime.datetime(2025, 1, 1, 0, 0, 0, 1), None], "times without a zone"),
    "zoned": ([datetime.datetime(2025, 1, 1, 5, tzinfo=datetime.UTC)] * 2, ["soon", None], [datetime.datetime(2025, 1, 1, 0, 0, 0, 1, datetime.UTC), None], "times with a zone"),
    "many days": ([datetime.date(2025, 1, 1)] * 2, [datetime.datetime(2025, 1, 1, 5), None], [datetime.date(1, 1, 1), None], "dates"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["parquet", "csv"])
@pytest.mark.parametrize("kind", MISFITS)
def test_a_day_is_held_for_a_value_that_the_table_cannot_have(
    ingest: Any, warehouse: Warehouse, tmp_path: Path, kind: str, form: str
) -> None:
    """Rows of one ingest have one type. Its good days keep their values and are written, and so is each later one."""
    before, odd, good, expected = MISFITS[kind]
    if form == "csv" and (isinstance(before[0], list) or kind in ("list of one", "words")):
        pytest.skip("no types of CSV")
    source, off = (
        {"path": f"*.{form}", "day_column": "date"},
        dict.fromkeys(("one_label", "drift", "vanished", "constant"), "off"),
    )

    def write(day: datetime.date, values: list[Any]) -> None:
        table = pa.table({"date": [f"{day}"] * 2, "label": [0, 1], "user": [1, 2], "x": values})
        if form == "csv":
            pa.csv.write_csv(table, tmp_path / f"{day}.csv")
        else:
            pq.write_table(table, tmp_path / f"{day}.parquet")

    write(DAYS[0], before)
    ingest(source, ["user", "x"], checks=off)
    write(DAYS[1], odd)
    write(DAYS[2], good)
    with pytest.raises(DataError) as error:
        ingest(source, ["user", "x"], checks=off)
    assert (
        f"day {DAYS[1]}, rule changed_type, column 'x': expected {expected}, as in table 'events', got "
        in f"{error.value}"
    )
    assert f" in '{DAYS[1]}.{form}'" in f"{error.value}"
    assert "(1 more)" not in f"{error.value}"
    held = ingest(source, ["user", "x"], checks=off | {"changed_type": "quarantine"})
    assert (held.days_written, held.days_held) == (tuple(DAYS[2:3]), tuple(DAYS[1:2]))
    write(DAYS[3], good)
    later = ingest(source, ["user", "x"], checks=off | {"changed_type": "quarantine"})
    assert (later.days_written, later.days_held) == (tuple(DAYS[3:4]), tuple(DAYS[1:2]))
    assert read_rows(warehouse, "events", ["x"])["x"].to_pylist() == [*before, *good, *good]
    write(DAYS[1], good)
    assert ingest(source, ["user", "x"], checks=off).days_written == tuple(DAYS[1:2])


def test_the_table_of_held_days_keeps_its_types(ingest: Any, warehouse: Warehouse, tmp_path: Path) -> None:
    """A day of text in a column of numbers was the first in it, and no day of numbers could follow."""
    source, checks = {"path": "*.parquet", "day_column": "date"}, {"one_label": "off", "changed_type": "quarantine", "future": "quarantine"}  # fmt: skip
    far = datetime.date(2099, 1, 1)
    for day, values in ((DAYS[0], [1, 2]), (DAYS[1], ["a", "b"]), (far, [3, 4])):
        table = pa.table({"date": [f"{day}"] * 2, "label": [0, 1], "user": values})
        pq.write_table(table, tmp_path / f"{day}.parquet")
        result = ingest(source, checks=checks)
    assert result.days_held == (DAYS[1], far)
    assert read_rows(warehouse, "events_held", ["user"])["user"].to_pylist() == [None, None, 3, 4]

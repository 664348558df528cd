"""The catalog of a table with known usage and contents of its columns."""

import datetime

import pyarrow as pa
import pytest

from pipeline.catalog.entries import Entry, build_entries
from pipeline.catalog.events import Event
from pipeline.catalog.retire import find_candidates
from pipeline.catalog.text import feature_rows, format_table
from pipeline.catalog.usage import ColumnImportance, Run, Usage, Version, importance_by_column
from pipeline.data.profile import SCHEMA as PROFILE
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.layout.columns import Footers
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

DAY = datetime.date(2024, 1, 1)
NOW = datetime.datetime(2024, 6, 1, tzinfo=datetime.UTC)
ROWS = 50


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Warehouse, pa.Schema]:
    """Columns that are used, all null, never read, useless, and so on."""
    warehouse = Warehouse(WarehouseConfig(), tmp_path_factory.mktemp("warehouse"))
    rows = pa.table(
        {
            "day": pa.array([DAY] * ROWS, pa.date32()),
            "label": [0, 1] * (ROWS // 2),
            "used": [float(i) for i in range(ROWS)],
            "null": pa.nulls(ROWS, pa.list_(pa.int64())),
            "unread": [f"text {i}" * 20 for i in range(ROWS)],
            "worthless": list(range(ROWS)),
            "tried": pa.nulls(ROWS, pa.float64()),
            "key": list(range(ROWS)),
        }
    )
    replace_days(warehouse, "t", {DAY: "i"}, rows.schema, rows.to_batches(), ROWS)
    return warehouse, rows.schema


def run(days_ago: int, *columns: str, **high: float) -> Run:
    importance = {
        name: ColumnImportance(ne_loss=bound / 2, low=-bound, high=bound, droppable=bound < 0.001)
        for name, bound in high.items()
    }
    at = NOW - datetime.timedelta(days=days_ago)
    return Run(run_id=f"{days_ago}", name=f"run {days_ago}", at=at, columns=frozenset(columns), importance=importance)


USED = ("used", "null", "worthless")
USAGE = Usage(
    runs=(
        run(1, *USED, used=0.1, worthless=0.0001),
        run(2, *USED, used=0.1, worthless=0.0002),
        run(3, *USED),
        run(50, *USED, "unread", used=0.1, worthless=0.5),
    ),
    versions=(Version(model="m", version=1, columns=frozenset({"used"})),),
)


def catalogue(table: tuple[Warehouse, pa.Schema], usage: Usage = USAGE, profile: pa.Table | None = None) -> list[Entry]:
    warehouse, schema = table
    footers = Footers(warehouse.table("t"), warehouse.current("t"))
    log = [Event(at=NOW, feature="tried", state="beta", by="me"), Event(at=NOW, feature="plan", state="beta", by="me")]
    empty = footers.without_values(schema.names).columns
    measured = PROFILE.empty_table() if profile is None else profile
    return build_entries(schema, ("day", "label"), log, usage, footers.columns(), measured, empty)


def test_candidates_are_unused_empty_or_useless_and_ordered_by_size(table):
    found = find_candidates(catalogue(table), USAGE, {"key"}, 30, NOW)
    assert next(one.name for one in found) == "unread"
    by_name = {one.name: one for one in found}
    assert by_name["unread"].reasons == ("no run of the last 30 days reads it: last read on 2024-04-12",)
    assert by_name["null"].reasons == ("0.00% of the rows have a value",)
    assert set(by_name) == {"unread", "null"}  # worthless was worth something in one of the last three that measured it
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)


def test_a_feature_is_useless_if_it_was_in_each_of_the_last_measured_runs(table):
    usage = USAGE.model_copy(update={"runs": USAGE.runs[:3]})
    found = {one.name: one.reasons for one in find_candidates(catalogue(table, usage), usage, (), 30, NOW)}
    assert found["worthless"] == ("NE rises by at most 0.00020 without it in 2 run(s)",)
    assert "used" not in found
    assert "tried" not in found  # beta
    assert found["key"] == ("no run of the last 30 days reads it: never read",)


def test_a_feature_is_not_unused_if_nobody_trains_or_it_is_served_or_new(table):
    old = Usage(runs=(run(90, "used"),))
    assert {one.name for one in find_candidates(catalogue(table, old), old, (), 30, NOW)} == {"null"}
    champion = Version(model="m", version=2, aliases=("champion",), columns=frozenset({"unread"}))
    served = USAGE.model_copy(update={"versions": (champion,)})
    assert "unread" not in {one.name for one in find_candidates(catalogue(table, served), served, (), 30, NOW)}
    early = datetime.datetime.combine(DAY, datetime.time(), datetime.UTC) + datetime.timedelta(days=3)
    fresh = Usage(runs=(Run(run_id="1", name="r", at=early, columns=frozenset({"used"})),))
    assert {one.name for one in find_candidates(catalogue(table, fresh), fresh, (), 30, early)} == {"null"}


def test_an_entry_combines_log_runs_and_profile(table):
    days = [DAY, DAY + datetime.timedelta(days=1)]
    rows = [
        {"day": day, "column": "worthless", "kind": "id", "rows": 10, "present": present, "mean_length": length,
         "distinct": present, "drift": drift}
        for day, present, length, drift in [(days[0], 4, 1.0, None), (days[1], 8, 4.0, 0.25)]
    ]  # fmt: skip
    found = {one.name: one for one in catalogue(table, profile=pa.Table.from_pylist(rows, PROFILE))}
    assert set(found) == {"used", "null", "unread", "worthless", "tried", "key", "plan"}
    one = found["worthless"]
    assert (one.kind, one.state, one.since, one.runs, one.last_run) == ("id", "active", DAY, 4, "run 1")
    assert (one.coverage, one.mean_length, one.distinct, one.drift) == (0.6, 3.0, 8, 0.25)
    assert one.importance is not None
    assert one.importance.high == 0.0001
    assert [day.present for day in one.days] == [4, 8]
    assert found["used"].models == ("m version 1",)
    assert not found["used"].served
    assert (found["used"].kind, found["null"].kind, found["unread"].kind) == ("number", "ids", "text")
    assert (found["tried"].state, found["tried"].coverage) == ("beta", 0.0)
    assert (found["plan"].stored, found["plan"].bytes, found["plan"].kind) == (False, 0, "other")
    lines = format_table(feature_rows(list(found.values()))).splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("feature ")


def test_a_column_is_as_important_as_the_best_of_its_features():
    schema = pa.schema([("x", pa.float64()), ("y", pa.int64()), ("label", pa.int64())])
    hashed = {"kind": "sigrid_hash", "size": 9}
    plan = build_plan(
        FeatureSchema.model_validate(
            {
                "derived": [{"kind": "cartesian", "inputs": ["y", "y"], "output": "yy"}],
                "dense": [{"columns": "x"}],
                "sparse": [
                    {"columns": "y", "transforms": [hashed]},
                    {"columns": "yy", "transforms": [hashed]},
                    {"columns": "x", "name": "x_bucket", "transforms": [{"kind": "bucketize", "borders": [1.0]}]},
                ],
            }
        ),
        schema,
    )
    assert {name: plan.columns_of(name) for name in plan.features} == {
        "x": {"x"}, "y": {"y"}, "yy": {"y"}, "x_bucket": {"x"},
    }  # fmt: skip
    importance = [(name, ColumnImportance(ne_loss=loss, low=0, high=1, droppable=False)) for name, loss in [("x", 0.1), ("x_bucket", 0.3), ("y", 0.2), ("yy", 0.1)]]  # fmt: skip
    assert {name: one.ne_loss for name, one in importance_by_column(plan, importance).items()} == {"x": 0.3, "y": 0.2}

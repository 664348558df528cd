"""With a cache, cold, warm or damaged, a dataset gives the rows and counts that it gives without one."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.joined.reader import joined_schema
from pipeline.data.joined.source import pin_sources
from pipeline.data.selection import HASH_STEPS
from pipeline.preprocessing.cache.store import COLUMNS, ENTRY
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.drain import DrainResult, drain
from pipeline.preprocessing.epoch.memory import PrivateWriter
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.master import CACHE_WARNINGS
from pipeline.preprocessing.worker import Worker
from pipeline.transforms.joins import FeatureJoin
from pipeline.transforms.ops.dense import Clamp, FillNull, Log, Standardise
from pipeline.transforms.ops.discrete import Bucketize
from pipeline.transforms.ops.sampling import Sampling
from pipeline.transforms.ops.sparse import FirstX, SigridHash
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import DenseGroup, FeatureSchema, SparseGroup
from storage.errors import CorruptFileError
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse
from tests.pipeline.conftest import DAYS, make_day
from tests.pipeline.preprocessing.reference import BATCH_ROWS, CONFIG, SEED, column_of, corrupt, files_of
from tests.storage.foreign import delete_rows, delete_values

Maker = Callable[[Path, list[pa.Table]], DataSpec]
COLUMN_COUNT = 6
"""Three numbers, two lists and the label."""


@pytest.fixture
def spec(make_warehouse: Maker, days: list[pa.Table], tmp_path: Path) -> DataSpec:
    """Two days, 16 row groups, with a cache of its own."""
    return make_warehouse(tmp_path / "home", days[:2]).model_copy(update={"cache_bytes": 1 << 30})


def plain(spec: DataSpec) -> DataSpec:
    return spec.model_copy(update={"cache_bytes": None})


def run(spec: DataSpec, folder: Path, **config: Any) -> DrainResult:
    given = {"executor": "inline", "workers": 1} | config
    return drain(spec, CONFIG.model_copy(update=given), BATCH_ROWS, SEED, folder / "service", 1)


def result(done: DrainResult) -> tuple[str, int, dict[str, int]]:
    return done.order_hash, done.rows, done.counts


def entries(spec: DataSpec) -> list[Path]:
    return sorted((Path(spec.home) / COLUMNS).rglob(f"*{ENTRY}"))


def warehouse_of(spec: DataSpec) -> Warehouse:
    return Warehouse(spec.warehouse, Path(spec.home))


def chosen(spec: DataSpec, **selection: Any) -> DataSpec:
    return spec.model_copy(update={"selection": spec.selection.model_copy(update=selection)})


def current(spec: DataSpec) -> DataSpec:
    return spec.model_copy(update={"snapshot": warehouse_of(spec).current("t")})


SELECTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "filter": {"filter": "num_b >= 1.5"},
    "filter of a feature": {"filter": "cat_user in (1, 2, 3, 5, 8) or num_a < 0"},
    "hash": {"hash_keys": ("cat_user",), "hash_range": (0, HASH_STEPS // 2)},
    "sampling": {"sampling": Sampling(inputs=("row",), rate=0.4)},
    "sampling without keys": {"sampling": Sampling(inputs=("list_items",), rate=0.6)},
    "empty": {"filter": "num_b > 1000000"},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_cold_warm_and_half_warm_epochs_are_equal(spec: DataSpec, tmp_path: Path, selection: str) -> None:
    spec = chosen(spec, **SELECTIONS[selection])
    without, cold, warm = run(plain(spec), tmp_path), run(spec, tmp_path), run(spec, tmp_path)
    groups = len(entries(spec))
    assert (without.rows > 0) == (selection != "empty")
    assert without.cache == {}
    assert (cold.bytes_read, cold.reads) == (without.bytes_read, without.reads)
    assert (warm.bytes_read, warm.reads, warm.op_seconds) == (0, 0, {})
    for path in entries(spec)[::2]:
        path.unlink()
    half = run(spec, tmp_path)
    assert result(without) == result(cold) == result(warm) == result(half)
    if selection == "empty":
        assert half.bytes_read == cold.bytes_read == 0  # statistics tell
    else:
        assert 0 < half.bytes_read < cold.bytes_read
    made = COLUMN_COUNT * groups
    assert [(one.cache.get("hits"), one.cache.get("misses")) for one in (cold, warm)] == [(0, made), (made, 0)]
    assert half.cache["hits"] + half.cache["misses"] == made
    assert cold.cache["bytes_written"] > warm.cache["bytes_read"]
    assert (warm.cache["bytes_read"] > 0) == (selection != "empty")


@pytest.mark.parametrize("config", [{"executor": "process"}, {"executor": "process", "transport": "network"}])
def test_workers_share_a_cache(spec: DataSpec, tmp_path: Path, config: dict[str, Any]) -> None:
    given = {"workers": 2, "transport": "memory"} | config
    without, cold, warm = (run(one, tmp_path, **given) for one in (plain(spec), spec, spec))
    assert result(without) == result(cold) == result(warm)
    assert (warm.bytes_read, warm.cache["misses"]) == (0, 0)


def test_weights_and_sessions_are_kept(make_warehouse: Maker, days: list[pa.Table], tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    more = [
        day.append_column("importance", pa.array(random.choice([0.5, 1.0, 5.0], day.num_rows))).append_column(
            "session", pa.array([f"s{i // 3}" if i % 7 else None for i in range(day.num_rows)])
        )
        for day in days[:2]
    ]
    made = make_warehouse(tmp_path / "home", more)
    spec = made.model_copy(update={"cache_bytes": 1 << 30, "weight": "importance", "session": "session"})
    without, cold, warm = run(plain(spec), tmp_path), run(spec, tmp_path), run(spec, tmp_path)
    assert result(without) == result(cold) == result(warm)
    assert (warm.bytes_read, warm.cache["misses"]) == (0, 0)
    unweighted = spec.model_copy(update={"weight": None, "session": None})
    assert result(run(unweighted, tmp_path)) == result(run(plain(unweighted), tmp_path)) != result(warm)
    again = spec.model_copy(update={"deduplicate": ("list_items",)})
    assert run(again, tmp_path).cache == {}  # a list that rows share depends on the rows around it
    assert run(again, tmp_path).order_hash == warm.order_hash


def test_a_rewritten_day_is_read_anew(spec: DataSpec, days: list[pa.Table], tmp_path: Path) -> None:
    before = run(spec, tmp_path)
    other = column_of(days[1], "num_b", 5, 77.0)
    replace_days(warehouse_of(spec), "t", {DAYS[1]: "again"}, other.schema, [*other.to_batches()], other.num_rows)
    after = run(current(spec), tmp_path)
    assert result(after) == result(run(plain(current(spec)), tmp_path)) != result(before)
    assert after.cache["hits"] > 0  # of the other day
    assert after.cache["misses"] > 0
    assert result(run(spec, tmp_path)) == result(before)  # the old snapshot is still what it was


@pytest.mark.parametrize("how", ["file", "vector", "values"])
def test_rows_that_another_engine_deletes_are_left_out(spec: DataSpec, tmp_path: Path, how: Any) -> None:
    before = run(spec, tmp_path)
    table = warehouse_of(spec).table("t")
    file = next(iter(table.scan().plan_files())).file
    if how == "values":
        delete_values(table, pa.table({"cat_user": [1, 2]}), file.partition)
    else:
        delete_rows(table, {file.file_path: [3, 4, 150]}, file.partition, how)
    after = run(current(spec), tmp_path)
    assert result(after) == result(run(plain(current(spec)), tmp_path))
    assert after.rows < before.rows
    assert after.cache["misses"] > 0
    assert run(current(spec), tmp_path).bytes_read == 0
    assert result(run(spec, tmp_path)) == result(before)


def test_a_replaced_file_of_the_same_name_is_read(spec: DataSpec, tmp_path: Path) -> None:
    before = run(spec, tmp_path)
    path = files_of(spec)[0]
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    corrupt(path)
    os.utime(path, ns=times)
    assert result(run(spec, tmp_path)) == result(before)  # what was made before it broke is right
    os.utime(path, ns=(times[0], times[1] + 1))
    with pytest.raises(CorruptFileError):
        run(spec, tmp_path)
    lost = run(spec, tmp_path, on_corrupt="quarantine")
    assert result(lost) == result(run(plain(spec), tmp_path, on_corrupt="quarantine"))
    assert lost.quarantined_rows == 100


def test_a_missing_file_is_the_error_that_it_is_without_a_cache(spec: DataSpec, tmp_path: Path) -> None:
    run(spec, tmp_path)
    worker = Worker(spec)
    fragment = worker.fragments()[0]
    files_of(spec)[0].unlink()
    errors = []
    for one in (worker, Worker(plain(spec))):
        with pytest.raises(Exception) as raised:
            one.transform_split(Split(fragments=(fragment,)), PrivateWriter())
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


def test_damaged_entries_are_made_again_with_one_warning(spec: DataSpec, tmp_path: Path) -> None:
    before = run(spec, tmp_path)
    for path in entries(spec)[:3]:
        path.write_bytes(path.read_bytes()[:-9] + b"?" * 9)
    said: list[str] = []
    config = CONFIG.model_copy(update={"executor": "process", "workers": 1})
    after = drain(spec, config, BATCH_ROWS, SEED, tmp_path / "service", 1, said.append)
    assert result(after) == result(before)
    assert after.cache["damaged"] == 3
    assert [text for text in said if "cache" in text] == [CACHE_WARNINGS["damaged"]]
    assert run(spec, tmp_path).cache.get("damaged", 0) == 0


def test_a_cache_that_is_too_small_is_kept_small(spec: DataSpec, tmp_path: Path) -> None:
    without = run(plain(spec), tmp_path)
    run(spec, tmp_path)
    size = sum(path.stat().st_size for path in entries(spec))
    small = spec.model_copy(update={"cache_bytes": size // 3})
    for path in entries(spec)[::2]:
        path.unlink()
    for _ in range(3):
        done = run(small, tmp_path)
        assert result(done) == result(without)
        assert sum(path.stat().st_size for path in entries(spec)) <= size // 3
    assert done.cache["evicted"] > 0


# -- plans ------------------------------------------------------------------------------------------------------------


def schema_of(random: np.random.Generator) -> FeatureSchema:
    """Draws some of the features and ops."""
    numbers = [
        (), (FillNull(),), (Clamp(low=0.0, high=float(random.choice([2.0, 3.0]))), FillNull()),
        (Log(), Standardise(mean=0.5, std=float(random.choice([1.0, 2.0]))), FillNull()),
    ]  # fmt: skip
    lists: list[tuple[FirstX | SigridHash, ...]] = [(SigridHash(size=size),) for size in (83, 1 << 33)]
    lists += [(FirstX(limit=limit), SigridHash(size=83)) for limit in (1, 2)]

    def draw(options: Sequence[Any]) -> Any:
        return options[int(random.integers(len(options)))]

    dense = [DenseGroup(columns=(name,), transforms=draw(numbers)) for name in ("share", "num_a", "num_b")]
    sparse = [SparseGroup(columns=(name,), transforms=draw(lists)) for name in ("cat_user", "list_items", "row")]
    borders = sorted(random.choice(20, 3, replace=False).tolist())
    sparse.append(SparseGroup(columns=("num_a",), name="bucket_{column}", transforms=(Bucketize(borders=borders),)))
    kept = random.random(len(dense)) < 0.7, random.random(len(sparse)) < 0.7
    return FeatureSchema(
        dense=tuple(group for group, keep in zip(dense, kept[0], strict=True) if keep) or (dense[0],),
        sparse=tuple(group for group, keep in zip(sparse, kept[1], strict=True) if keep) or (sparse[0],),
    )


def arrays_of(spec: DataSpec) -> tuple[list[Any], Any]:
    """Returns the rows of some row groups in one form, whatever their chunks are, and the counts."""
    worker, writer = Worker(spec), PrivateWriter()
    rows, costs = worker.transform_split(Split(fragments=tuple(worker.fragments()[2:6])), writer)
    made, found, chunk = writer.finish(), list[Any](), 0
    while f"{chunk}.labels" in made:
        labels, starts, ids = (made[f"{chunk}.{name}"] for name in ("labels", "starts", "ids"))
        for row in range(len(labels)):
            places = range(row, len(starts) - 1, len(labels))
            lists = [ids[starts[place] : starts[place + 1]].tolist() for place in places]
            found.append((made[f"{chunk}.dense"][row].tobytes(), labels[row].item(), lists))
        chunk += 1
    assert len(found) == rows
    return found, costs.counts


@pytest.mark.slow
def test_plans_share_what_they_have_in_common(spec: DataSpec) -> None:
    """Thirty drawn plans and selections in one cache, which evicts: each gives what it gives alone."""
    random = np.random.default_rng(5)
    table = make_day(0).schema
    hits = misses = 0
    for number in range(30):
        plan = build_plan(schema_of(random), table)
        drawn = chosen(spec, **SELECTIONS[str(random.choice(["all", "all", "filter", "hash", "sampling"]))])
        drawn = drawn.model_copy(update={"plan": plan, "cache_bytes": 200_000 if number % 3 else 1 << 30})
        expected = arrays_of(plain(drawn))
        assert arrays_of(drawn) == expected
        worker = Worker(drawn)
        _, costs = worker.transform_split(Split(fragments=tuple(worker.fragments()[2:6])), PrivateWriter())
        assert costs.counts == expected[1]
        hits, misses = hits + costs.cache["hits"], misses + costs.cache["misses"]
    assert hits > misses >= 0


def test_a_changed_op_makes_one_column_again(spec: DataSpec, tmp_path: Path) -> None:
    run(spec, tmp_path)
    ops = tuple(op.model_copy(update={"mean": 9.0}) if op.output.startswith("num_a") and isinstance(op, Standardise)
                else op for op in spec.plan.ops)  # fmt: skip
    changed = spec.model_copy(update={"plan": spec.plan.model_copy(update={"ops": ops})})
    assert changed.plan.ops != spec.plan.ops
    done, groups = run(changed, tmp_path), len(entries(spec)) // 2
    assert (done.cache["hits"], done.cache["misses"]) == ((COLUMN_COUNT - 1) * groups, groups)
    assert result(done) == result(run(plain(changed), tmp_path))
    assert 0 < done.bytes_read < run(plain(changed), tmp_path).bytes_read / 2


# -- joined columns ---------------------------------------------------------------------------------------------------


def test_joined_columns_follow_their_source(spec: DataSpec, tmp_path: Path) -> None:
    warehouse, source = warehouse_of(spec), FeatureJoin(path="side.parquet", on="cat_user")
    features = FeatureSchema(
        dense=(DenseGroup(columns=("age",), transforms=(FillNull(),)), DenseGroup(columns=("num_b",), transforms=())),
        sparse=(SparseGroup(columns=("list_items",), transforms=(SigridHash(size=83),)),),
    )

    def joined(ages: list[float], row_filter: str | None) -> DataSpec:
        pq.write_table(pa.table({"cat_user": list(range(len(ages))), "age": ages}), tmp_path / "side.parquet")
        pinned = pin_sources([source], tmp_path, warehouse)
        plan = build_plan(features, joined_schema(warehouse, spec.snapshot, pinned))
        return chosen(spec, filter=row_filter).model_copy(update={"plan": plan, "joined": pinned})

    for row_filter in (None, "age > 10 and num_b > 0.5"):
        ages = [float(age) for age in range(30)]
        first = joined(ages, row_filter)
        before = run(plain(first), tmp_path)
        assert result(before) == result(run(first, tmp_path)) == result(run(first, tmp_path))
        assert run(first, tmp_path).bytes_read == 0
        second = joined([*ages[:-1], 50.0, 60.0], row_filter)
        after = run(second, tmp_path)
        assert result(after) == result(run(plain(second), tmp_path)) != result(before)
        assert (after.cache["hits"] > 0) == (row_filter is None)  # the filter compares the source


def test_a_column_of_the_same_name_is_another_one(spec: DataSpec, tmp_path: Path) -> None:
    """Dropped and added again, it is null in old files, whatever a cache holds of the old one."""
    before = run(spec, tmp_path)
    table = warehouse_of(spec).table("t")
    kind = table.schema().find_field("num_b").field_type
    with table.update_schema() as update:
        update.delete_column("num_b")
    with table.update_schema() as update:
        update.add_column("num_b", kind)
    table.append(table.scan(limit=1).to_arrow().cast(table.schema().as_arrow()))
    after = current(spec)
    assert result(run(after, tmp_path)) == result(run(plain(after), tmp_path))
    assert run(after, tmp_path).counts["fill_null num_b"] >= before.rows

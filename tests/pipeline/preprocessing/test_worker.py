"""One work item: rows read, filtered, transformed and laid out, and their batches against a plain loop."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pipeline.data.selection import HASH_STEPS
from pipeline.errors import DataError
from pipeline.preprocessing.dataset import DataSpec, count_rows, fit_plan
from pipeline.preprocessing.epoch.batches import BatchWork, BlockSlice
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.memory import Arrays, PrivateWriter
from pipeline.preprocessing.epoch.splits import Split, permute_rows
from pipeline.preprocessing.worker import Worker
from storage.config import TableConfig
from storage.errors import CorruptFileError
from storage.reader import Fragment
from storage.warehouse import Warehouse
from tests.pipeline.preprocessing.reference import column_of, corrupt, files_of

CHUNK = {"dense": ("float32", 2), "labels": ("float32", 1), "starts": ("int64", 1), "ids": ("int32", 1)}
Maker = Callable[[Path, list[pa.Table]], DataSpec]


def warehouse(spec: DataSpec) -> Warehouse:
    return Warehouse(spec.warehouse, Path(spec.home))


def chosen(spec: DataSpec, **selection: object) -> DataSpec:
    return spec.model_copy(update={"selection": spec.selection.model_copy(update=selection)})


def split_of(*fragments: Fragment) -> Split:
    return Split(fragments=fragments)


def rows_of(worker: Worker, *fragments: Fragment) -> Arrays:
    """Returns the chunks of a split as they are written."""
    writer = PrivateWriter()
    rows, _ = worker.transform_split(split_of(*fragments), writer)
    assert rows == sum(len(array) for name, array in writer.finish().items() if name.endswith(".labels"))
    return writer.finish()


def batches_of(worker: Worker, work: BatchWork, splits: Sequence[Arrays]) -> Arrays:
    writer = PrivateWriter()
    costs = worker.make_batches(work, splits, writer)
    assert costs.batch_seconds > 0.0
    return writer.finish()


def joined(memory: Arrays, name: str) -> np.ndarray:
    """Concatenates one array of all chunks."""
    chunks = [array for key, array in memory.items() if key.endswith(f".{name}")]
    return np.concatenate(chunks) if chunks else np.empty(0)


def lists_of(arrays: Arrays) -> list[list[list[int]]]:
    """Per row, per feature: its ids, from chunks with one feature after the other."""
    found = []
    for chunk in range(sum(name.endswith(".labels") for name in arrays)):
        starts, ids = arrays[f"{chunk}.starts"].tolist(), arrays[f"{chunk}.ids"].tolist()
        rows = len(arrays[f"{chunk}.labels"])
        lists = [ids[a:b] for a, b in pairwise(starts)]
        assert starts[-1] == len(ids)
        found += [[lists[f * rows + row] for f in range(len(lists) // rows)] for row in range(rows)]
    return found


def share_of(memory: Arrays, batch: int, rank: int, features: int) -> dict[str, object]:
    """Cuts out a rank's share as a client does, in plain Python."""
    row, rows, first, ids = memory["shares"][batch, rank].tolist()
    share: dict[str, object] = {
        name: memory[name][row : row + rows].tolist() for name in ("dense", "labels", "weights")
    }
    share["lengths"] = memory["lengths"][row * features : (row + rows) * features].reshape(features, rows).tolist()
    share["values"] = memory["values"][first : first + ids].tolist()
    return share


def test_rows_equal_the_source(data: DataSpec, days: list[pa.Table]) -> None:
    """Repeats the transforms with numpy on the written rows."""
    worker = Worker(data)
    writer = PrivateWriter()
    rows, costs = worker.transform_split(split_of(*worker.fragments()), writer)
    memory = writer.finish()
    source = pa.concat_tables(days)
    numbers = source.column("num_a").to_numpy(), source.column("num_b").to_numpy()
    scaled = [np.nan_to_num((x - np.nanmean(x)) / np.nanstd(x), nan=0.0) for x in numbers]
    np.testing.assert_allclose(
        joined(memory, "dense"), np.stack([source["share"].to_numpy(), *scaled], 1), rtol=1e-5, atol=1e-6
    )
    assert rows == source.num_rows
    assert joined(memory, "labels").tolist() == source["label"].to_pylist()
    lists = lists_of(memory)
    assert [row[0] for row in lists] == [[user] for user in source["cat_user"].to_pylist()]
    assert [len(row[1]) for row in lists] == pc.list_value_length(source["list_items"]).to_pylist()
    assert all(0 <= i < 83 for row in lists for i in row[1])
    assert costs.counts == Counter({"fill_null num_a": source["num_a"].null_count})
    assert 0 < costs.bytes_read < costs.bytes_stored
    assert min(costs.read_seconds, costs.transform_seconds, costs.batch_seconds) > 0.0
    assert {name: (memory[f"0.{name}"].dtype.name, memory[f"0.{name}"].ndim) for name in CHUNK} == CHUNK


def test_rows_of_a_split_are_those_of_its_parts(data: DataSpec) -> None:
    worker = Worker(data)
    fragments = worker.fragments()
    whole = rows_of(worker, *fragments)
    parts = [rows_of(worker, fragment) for fragment in fragments]
    for name in ("dense", "labels"):
        assert np.concatenate([joined(part, name) for part in parts]).tobytes() == joined(whole, name).tobytes()
    assert [row for part in parts for row in lists_of(part)] == lists_of(whole)


@pytest.mark.parametrize(
    ("rows", "kind"), [(None, "int32"), (2**31 - 1, "int32"), (2**31, "int64"), (2**40, "int64")], ids=str
)
def test_ids_are_wide_where_a_table_is_large(data: DataSpec, rows: int | None, kind: str) -> None:
    """int32 holds the ids of up to 2^31 - 1 rows."""
    plan = data.plan
    sparse = tuple(f if rows is None else replace(f, rows=rows) for f in plan.sparse)
    worker = Worker(data.model_copy(update={"plan": plan.model_copy(update={"sparse": sparse})}))
    narrow = Worker(data)
    fragments = worker.fragments()[:3]
    memory = rows_of(worker, *fragments)
    assert memory["0.ids"].dtype == kind
    assert lists_of(memory) == lists_of(rows_of(narrow, *fragments))
    work = work_of([BlockSlice(number=0, splits=(0,), start=0, stop=50)])
    made = batches_of(worker, work, [memory])
    same = batches_of(narrow, work, [rows_of(narrow, *fragments)])
    assert made["values"].dtype == np.int64
    assert made["values"].tolist() == same["values"].tolist()


# -- batches ----------------------------------------------------------------------------------------------------------


def work_of(*batches: Sequence[BlockSlice], world_size: int = 1, shuffled: bool = True) -> BatchWork:
    return BatchWork(
        seed=7, epoch=2, shuffled=shuffled, world_size=world_size, ranks=tuple(range(world_size)),
        batches=tuple(tuple(windows) for windows in batches),
    )  # fmt: skip


def splits_with(sizes: Sequence[int], chunk_rows: int = 11) -> list[Arrays]:
    """Makes rows without a warehouse, in chunks. The dense value is the row's number, ids are 10 * number and up."""
    random, first, made = np.random.default_rng(5), 0, list[Arrays]()
    for size in sizes:
        split: dict[str, np.ndarray] = {}
        for chunk, low in enumerate(range(0, size, chunk_rows)):
            rows = min(chunk_rows, size - low)
            number = np.arange(first + low, first + low + rows)
            lists = [[10 * int(i) + k for k in range(random.integers(0, 9))] for _ in range(3) for i in number]
            split |= {
                f"{chunk}.dense": np.stack([number, -number], axis=1).astype(np.float32),
                f"{chunk}.labels": (number % 2).astype(np.float32),
                f"{chunk}.starts": np.cumsum([0, *map(len, lists)]),
                f"{chunk}.ids": np.array([i for ids in lists for i in ids], np.int32),
            }
        made.append(split)
        first += size
    return made


def worker_without_rows() -> Worker:
    """Returns a worker that can only batch rows of two numbers and three lists."""
    worker = Worker.__new__(Worker)
    worker.orders = {}
    worker.spec = SimpleNamespace(plan=SimpleNamespace(sparse=range(3), dense=range(2)), shared=())  # type: ignore[assignment]
    return worker


def plain_batches(work: BatchWork, splits: Sequence[Arrays]) -> list[list[dict[str, list[Any]]]]:
    """For each batch and rank: dense, labels, weights, lists by row, in plain Python."""
    made = []
    for windows in work.batches:
        rows: list[tuple[list[float], float, float, list[list[int]]]] = []
        for window in windows:
            stored = [
                (dense.tolist(), float(label), 1.0, lists)
                for i in window.splits
                for dense, label, lists in zip(
                    joined(splits[i], "dense"), joined(splits[i], "labels"), lists_of(splits[i]), strict=True
                )
            ]
            order = permute_rows(work.seed, work.epoch, window.number, len(stored))
            order = order if work.shuffled else np.arange(len(stored))
            rows += [stored[i] for i in order[window.start : window.stop]]
        size = -(-len(rows) // work.world_size)
        ranks = []
        for rank in work.ranks:
            share = rows[rank * len(rows) // work.world_size : (rank + 1) * len(rows) // work.world_size]
            share += [([0.0, 0.0], 0.0, 0.0, [[], [], []])] * (size - len(share))
            ranks.append({name: [row[i] for row in share] for i, name in enumerate(("dense", "labels", "weights", "lists"))})  # fmt: skip
        made.append(ranks)
    return made


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffled", [True, False])
def test_batches_are_those_of_a_plain_loop(world_size: int, shuffled: bool) -> None:
    """Windows of several splits, some of them empty. Batches across windows, and one of a single row."""
    splits = splits_with([30, 0, 12, 5, 0, 41])
    first = {"number": 4, "splits": (0, 1, 2)}
    second = {"number": 5, "splits": (3, 4, 5)}
    work = work_of(
        [BlockSlice(**first, start=0, stop=25)],
        [BlockSlice(**first, start=25, stop=42), BlockSlice(**second, start=0, stop=8)],
        [BlockSlice(**second, start=8, stop=45)],
        [BlockSlice(**second, start=45, stop=46)],
        world_size=world_size,
        shuffled=shuffled,
    )
    made = batches_of(worker_without_rows(), work, splits)
    for b, ranks in enumerate(plain_batches(work, splits)):
        for rank, share in enumerate(ranks):
            lists = [[row[f] for row in share["lists"]] for f in range(3)]  # type: ignore[index]
            assert share_of(made, b, rank, features=3) == {
                "dense": share["dense"],
                "labels": share["labels"],
                "weights": share["weights"],
                "lengths": [[len(ids) for ids in column] for column in lists],
                "values": [i for column in lists for ids in column for i in ids],
            }


def test_a_single_rank_gets_the_same_share() -> None:
    splits = splits_with([20, 21])
    work = work_of([BlockSlice(number=0, splits=(0, 1), start=3, stop=41)], world_size=3)
    whole = batches_of(worker_without_rows(), work, splits)
    for rank in range(3):
        part = batches_of(worker_without_rows(), work.model_copy(update={"ranks": (rank,)}), splits)
        assert share_of(part, 0, 0, features=3) == share_of(whole, 0, rank, features=3)
        assert len(part["labels"]) == 13


def test_work_done_again_gives_the_same(data: DataSpec) -> None:
    worker, other = Worker(data), Worker(data)
    fragments = worker.fragments()[:4]
    splits = [rows_of(worker, *fragments[:2]), rows_of(worker, *fragments[2:])]
    again = [rows_of(other, *fragments[:2]), rows_of(other, *fragments[2:])]
    work = work_of([BlockSlice(number=0, splits=(0, 1), start=0, stop=333)], world_size=2)
    first, second = batches_of(worker, work, splits), batches_of(other, work, again)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_costs_add_up_and_travel() -> None:
    seconds: dict[str, Any] = {"x": 1.0}
    a = Costs(1.0, 2.0, 3.0, 4, 5, Counter(seconds), Counter(n=2), read_sizes=Counter({"64": 1}), row_groups_skipped=3)
    a.cache.update(hits=3)
    b = Costs.from_json(vars(a))
    b.add(a)
    assert vars(b) == {
        "read_seconds": 2.0, "transform_seconds": 4.0, "batch_seconds": 6.0, "bytes_read": 8, "bytes_stored": 10,
        "op_seconds": {"x": 2.0}, "counts": {"n": 4}, "reads": 0,
        "read_sizes": {"64": 2}, "row_groups_skipped": 6, "cache": {"hits": 6},
    }  # fmt: skip
    assert b.seconds == 12.0
    assert a.seconds == 6.0


# -- selections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "selection",
    [{}, {"filter": "num_b >= 1.5"}, {"hash_keys": ("cat_user",), "hash_range": (0, HASH_STEPS // 2)}],
    ids=["days", "filter", "hash"],
)
def test_counting_is_reading(data: DataSpec, selection: dict[str, object]) -> None:
    spec = chosen(data, **selection)
    worker = Worker(spec)
    read = sum(worker.read_selected(fragment).num_rows for fragment in worker.fragments())
    assert count_rows(spec, warehouse(spec)) == read
    assert 0 < read <= 2481


def test_filter_keeps_what_numpy_keeps(data: DataSpec, days: list[pa.Table]) -> None:
    worker = Worker(chosen(data, filter="num_b >= 1.5 and cat_user < 20"))
    read = pa.concat_tables([worker.read_selected(fragment) for fragment in worker.fragments()])
    source = pa.concat_tables(days)
    kept = (source["num_b"].to_numpy() >= 1.5) & (source["cat_user"].to_numpy() < 20)
    assert read["share"].to_pylist() == source["share"].filter(kept).to_pylist()


def test_hash_split_parts_the_rows_by_key(data: DataSpec, days: list[pa.Table]) -> None:
    cuts = [0, HASH_STEPS // 3, HASH_STEPS // 2, HASH_STEPS]
    parts = []
    for span in pairwise(cuts):
        worker = Worker(chosen(data, hash_keys=("cat_user",), hash_range=span))
        parts.append(pa.concat_tables([worker.read_selected(fragment) for fragment in worker.fragments()]))
    users = [set(part["cat_user"].to_pylist()) for part in parts]
    assert all(users)
    assert sum(map(len, users)) == len(set.union(*users))
    shares = sorted(value for part in parts for value in part["share"].to_pylist())
    assert shares == pa.concat_tables(days)["share"].to_pylist()


def test_a_split_without_selected_rows_has_no_chunks(data: DataSpec) -> None:
    worker = Worker(data)
    none = Worker(chosen(data, hash_keys=("cat_user",), hash_range=(0, 0)))
    assert rows_of(none, *worker.fragments()[:2]) == {}


def test_plan_is_fitted_on_the_selected_rows_only(data: DataSpec, days: list[pa.Table]) -> None:
    unfitted = data.plan.model_copy(
        update={
            "ops": tuple(
                op.model_copy(update={"mean": None, "std": None}) if op.kind == "standardise" else op
                for op in data.plan.ops
            )
        }
    )
    spec = chosen(data, days=data.selection.days[:1], filter="num_b < 2.0").model_copy(update={"plan": unfitted})
    learned = {op.inputs[0]: op for op in fit_plan(spec, warehouse(spec)).ops if op.kind == "standardise"}
    values = days[0]["num_b"].to_numpy()
    assert learned["num_b:dense"].mean == pytest.approx(values[values < 2.0].mean(), rel=1e-12)
    assert learned["num_b:dense"].std == pytest.approx(values[values < 2.0].std(), rel=1e-12)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "shown"), [(2, "2"), (None, "null"), (-1, "-1")])
def test_a_bad_label_is_refused(
    days: list[pa.Table], make_warehouse: Maker, tmp_path: Path, value: int | None, shown: str
) -> None:
    worker = Worker(make_warehouse(tmp_path, [column_of(days[0], "label", 150, value)]))
    first, second = worker.fragments()[:2]
    assert len(joined(rows_of(worker, first), "labels")) == 100
    with pytest.raises(DataError) as caught:
        rows_of(worker, second)
    assert str(caught.value) == (
        f"label 'label' in row group 1 of file '{second.path}': expected 0 or 1, got {shown}. "
        "Correct the source and ingest the day with force=true."
    )


def test_the_remedy_for_a_bad_label_of_another_engine_is_a_filter(
    days: list[pa.Table], make_warehouse: Maker, tmp_path: Path
) -> None:
    spec = make_warehouse(tmp_path, [column_of(days[0], "label", 0, None)])
    worker = Worker(spec)
    tables = {spec.snapshot.table: TableConfig(table="theirs.logs.t")}
    worker.spec = spec.model_copy(update={"warehouse": spec.warehouse.model_copy(update={"tables": tables})})
    with pytest.raises(DataError) as caught:
        rows_of(worker, worker.fragments()[0])
    assert str(caught.value).endswith(
        'expected 0 or 1, got null. Leave such rows out with filter="label in (0, 1)", or correct them in '
        "'theirs.logs.t' with its engine."
    )


def test_a_corrupt_file_is_named(days: list[pa.Table], make_warehouse: Maker, tmp_path: Path) -> None:
    worker = Worker(make_warehouse(tmp_path, days[:1]))
    fragment = worker.fragments()[0]
    corrupt(files_of(worker.spec)[0])
    with pytest.raises(CorruptFileError) as caught:
        rows_of(worker, fragment)
    message = str(caught.value)
    assert message.startswith(
        f"file '{fragment.path}' of snapshot {worker.spec.snapshot.snapshot_id} of table 't': "
        "expected a whole Parquet file, got "
    )
    assert message.endswith(" Ingest its day with force=true.")

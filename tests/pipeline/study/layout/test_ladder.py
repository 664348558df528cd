"""Each step of the ladder reads the wanted values, in as many reads as it says, and leaves no file."""

import datetime
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from pipeline.study.layout import ladder as module
from pipeline.study.layout.ladder import ROUNDS, STEPS, as_maps, measure_ladder, take_sample
from storage.config import WarehouseConfig
from storage.layout.reads import read_percentiles, traffic_curve
from storage.layout.spec import Layout
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

ROWS = 200
WANTED = ["tags", "c3", "number", "c5", "word", "id"]


@pytest.fixture(scope="module")
def sample():
    draw = np.random.default_rng(5)

    def holes(values, kind):
        return pa.array([None if draw.random() < 0.4 else value for value in values], kind)

    lists = [draw.integers(-5, 5, draw.integers(0, 4)).tolist() for _ in range(ROWS)]
    wide = {f"c{i}": holes(draw.random(ROWS).tolist(), pa.float64()) for i in range(30)}
    return pa.table(
        {
            "id": holes([2**62 + i for i in range(ROWS)], pa.int64()),
            "number": holes(draw.random(ROWS).tolist(), pa.float32()),
            **wide,
            "tags": holes(lists, pa.large_list(pa.int64())),
            "word": holes([f"w{i % 7}" for i in range(ROWS)], pa.large_string()),
        }
    )


class CountingIO(PyArrowFileIO):
    """Counts reads of files as the store sees them."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def new_input(self, location):
        made, sizes = super().new_input(location), self.sizes

        class File:
            def __init__(self, file):
                self.file = file

            def read_at(self, size, offset):
                sizes.append(size)
                return self.file.read_at(size, offset)

            def __getattr__(self, name):
                return getattr(self.file, name)

        class Input:
            def open(self):
                return File(made.open())

        return Input()


def test_all_steps_read_the_same_values(sample, tmp_path):
    found: list[list[dict]] = []
    modes = []

    def transform(rows, fused):
        found.append(rows.select(WANTED).to_pylist())
        modes.append(fused)

    steps = measure_ladder(sample, WANTED, WANTED, Layout(), (PyArrowFileIO(), f"{tmp_path}/ladder"), transform)
    assert [step.adds for step in steps] == [step.adds for step in STEPS]
    expected = sample.select(WANTED).to_pylist()
    groups = [8] * 6 + [1]
    assert len(found) == (ROUNDS + 1) * sum(groups)
    taken = iter(found)
    for _ in range(ROUNDS + 1):
        for count in groups:
            assert [row for _ in range(count) for row in next(taken)] == expected
    assert modes[:49] == [False] * 24 + [True] * 25
    assert list(tmp_path.iterdir()) == []


def test_reads_are_those_that_the_store_sees(sample, tmp_path):
    io = CountingIO()
    layout = Layout(gap_bytes=1_000)
    steps = measure_ladder(sample, WANTED, WANTED, layout, (io, f"{tmp_path}/ladder"), lambda rows, fused: None)
    fetched = [steps[i].reads for i in (0, 1, 4, 5, 6)]  # the third and fourth read what the second does
    assert len(io.sizes) >= (ROUNDS + 1) * sum(fetched)  # footers are read, too
    counts = [step.reads for step in steps]
    assert counts[1] == counts[2] == counts[3] > counts[4] >= counts[5] > counts[6] == 1
    assert steps[4].bytes_read > steps[3].bytes_read  # what lies between is read, too
    assert steps[5].bytes_read == steps[3].bytes_read
    needed = {step.bytes_read for step in steps[1:4]}
    assert len(needed) == 1
    assert steps[0].bytes_read == steps[0].bytes_stored
    for step in steps:
        assert step.disk == pytest.approx(
            (steps[0].reads * 0.008 + steps[0].bytes_read / 150e6) / (step.reads * 0.008 + step.bytes_read / 150e6)
        )
    assert (steps[0].worker, steps[0].storage, steps[0].disk) == (1, 1, 1)


def test_files_are_removed_after_an_error(sample, tmp_path):
    def fail(rows, fused):
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        measure_ladder(sample, WANTED, WANTED, Layout(), (PyArrowFileIO(), f"{tmp_path}/ladder"), fail)
    assert list(tmp_path.iterdir()) == []


def test_the_reason_of_a_failed_write_is_not_hidden(sample, tmp_path):
    (tmp_path / "file").write_text("")
    store = (PyArrowFileIO(), f"{tmp_path}/file/ladder")
    with pytest.raises(NotADirectoryError):
        measure_ladder(sample, WANTED, WANTED, Layout(), store, lambda rows, fused: None)


def test_maps_hold_the_values_that_are_there(sample):
    maps = as_maps(sample).to_pylist()
    for row, values in zip(maps, sample.to_pylist(), strict=True):
        entries = {key: value for one in row.values() for key, value in one}
        assert entries == {i: values[name] for i, name in enumerate(sample.column_names) if values[name] is not None}


def test_a_sample_is_of_the_newest_day(tmp_path, monkeypatch):
    warehouse = Warehouse(WarehouseConfig(row_group_rows=100), tmp_path)
    kept: dict = {"day": pa.date32(), "a": pa.int64(), "dense": pa.map_(pa.int32(), pa.float32()),
                  "scored": pa.map_(pa.int32(), pa.map_(pa.int64(), pa.float32())), "words": pa.map_(pa.string(), pa.int64())}  # fmt: skip
    days = [datetime.date(2025, 1, 1), datetime.date(2025, 1, 2)]
    rows = pa.Table.from_pylist(
        [
            {"day": days[i // 250], "a": i, "dense": [(i % 3, 1.0)], "scored": [(7, [(i, 2.0)])], "words": [("x", i)]}
            for i in range(500)
        ],
        pa.schema(kept),
    )
    snapshot = replace_days(warehouse, "t", dict.fromkeys(days, "i"), rows.schema, rows.to_batches(), 500)
    found = take_sample(warehouse, snapshot, ["dense_5"])
    assert sorted(found["a"].to_pylist()) == list(range(250, 500))
    keys = {"dense_0", "dense_1", "dense_2", "dense_5", "scored_7", "scored_7_scores"}
    assert set(found.column_names) == {"day", "a", *keys}  # a map of words has no features
    assert found["dense_5"].null_count == 250
    assert [row["scored_7"] for row in found.to_pylist()] == [[row["a"]] for row in found.to_pylist()]
    monkeypatch.setattr(module, "SAMPLE_BYTES", found.nbytes // 10)
    assert 15 < len(take_sample(warehouse, snapshot, [])) < 40


def test_percentiles_of_reads_bound_the_sizes():
    draw = np.random.default_rng(2)
    sizes = (draw.pareto(1.0, 1_000) * 500).astype(int) + 1
    found = read_percentiles(Counter(f"{1 << int(size).bit_length()}" for size in sizes))
    for share, bound in found.items():
        exact = np.percentile(sizes, int(share), method="inverted_cdf")
        assert bound / 2 <= exact < bound
    assert read_percentiles({}) == {}


def test_the_traffic_curve_takes_the_most_read_columns_first():
    draw = np.random.default_rng(3)
    stored = {f"c{i}": int(draw.integers(1, 100)) for i in range(40)}
    reads = [(draw.choice(list(stored), 8, replace=False).tolist(), int(draw.integers(1, 9))) for _ in range(12)]
    times = Counter({name: sum(rows for names, rows in reads if name in names) for name in stored})
    curve = traffic_curve(reads, stored)
    total, traffic = sum(stored.values()), sum(times[name] * stored[name] for name in stored)
    for share, held in curve.items():
        kept: list[str] = []
        for count in range(1, 41):
            kept = [name for name, _ in times.most_common(count)]
            if sum(times[name] * stored[name] for name in kept) >= float(share) * traffic:
                break
        assert held == pytest.approx(sum(stored[name] for name in kept) / total)
    assert all(low <= high for low, high in pairwise(curve.values()))
    assert traffic_curve([(["unknown"], 3)], stored) == {}

"""The contestants do the same work, and the command prints its measurements. Nothing is timed here."""

import json
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks import preprocessing, service
from benchmarks.contestants import BATCH_ROWS, CONTESTANTS, Whole, shuffled_batches
from benchmarks.wide_table import (
    LABEL,
    LIMIT,
    LIST_COLUMNS,
    LONGEST,
    NUMBER_COLUMNS,
    READ,
    SIZE,
    WIDE,
    WideTable,
    wide_table,
)
from pipeline.preprocessing.epoch.memory import Arrays, Slabs
from pipeline.preprocessing.executors import WORKER_ENVIRONMENT
from pipeline.preprocessing.worker import Worker
from pipeline.transforms.kernels.hashing import offsets_of

ROWS = 9_000
COLUMN_WISE = [name for name in preprocessing.WORKERS if name != "ours_batched"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> WideTable:
    return wide_table(tmp_path_factory.mktemp("wide"), ROWS)


@pytest.fixture(scope="module")
def source(table: WideTable) -> pa.Table:
    return pa.concat_tables(pq.ParquetFile(path).read(columns=list(READ)) for path in table.files)


def whole(name: str, table: WideTable) -> Whole:
    made = [unit() for unit in CONTESTANTS[name](table)]
    assert [part.rows for part in made] == [ROWS], "so few rows are one row group"
    assert made[0].whole is not None
    found = made[0].whole()
    assert made[0].ids == sum(offsets[-1] - offsets[0] for _, offsets in found.lists)
    return found


def list_lengths(source: pa.Table, column: str) -> npt.NDArray[np.int32]:
    lengths: npt.NDArray[np.int32] = pc.list_value_length(source[column]).fill_null(0).to_numpy()
    return lengths


@pytest.mark.parametrize("name", COLUMN_WISE)
def test_workers_generate_the_rows_of_the_source(name: str, table: WideTable, source: pa.Table) -> None:
    made = whole(name, table)
    for column, (ids, offsets) in zip(LIST_COLUMNS, made.lists, strict=True):
        lengths = np.minimum(list_lengths(source, column), LIMIT)
        np.testing.assert_array_equal(np.diff(offsets), lengths)
        assert len(ids) == lengths.sum()
        assert ids.min() >= 0
        assert SIZE > ids.max() > SIZE // 2
    np.testing.assert_array_equal(made.labels, source[LABEL].to_numpy())
    assert made.labels.dtype == made.dense.dtype == np.float32
    np.testing.assert_allclose(made.dense, whole("numpy", table).dense, rtol=1e-6, atol=1e-6)


def test_numpy_hashes_as_our_worker_does(table: WideTable) -> None:
    for (a, _), (b, _) in zip(whole("ours", table).lists, whole("numpy", table).lists, strict=True):
        np.testing.assert_array_equal(a, b)


def test_batches_hold_each_row_once_in_another_order(table: WideTable) -> None:
    worker = Worker(table.spec, table.warehouse)
    groups = list(shuffled_batches(worker, (Slabs(), Slabs()), worker.fragments()))
    sizes = [rows for group in groups for rows in group["shares"][:, 0, 1].tolist()]
    assert sizes == [BATCH_ROWS, BATCH_ROWS, ROWS - 2 * BATCH_ROWS]
    batched = [row for group in groups for row in batch_rows(group)]
    expected = whole("ours", table)
    lists = [np.split(ids, offsets[1:-1]) for ids, offsets in expected.lists]
    rows = [
        (expected.dense[i].tobytes(), float(expected.labels[i]), tuple(tuple(column[i].tolist()) for column in lists))
        for i in range(ROWS)
    ]
    assert batched != rows
    assert sorted(batched) == sorted(rows)


def batch_rows(group: Arrays) -> list[tuple[bytes, float, tuple[tuple[int, ...], ...]]]:
    """Returns the rows of some batches, concatenated."""
    found = []
    starts, features = offsets_of(group["lengths"]), len(LIST_COLUMNS)
    for first, size, _, _ in group["shares"][:, 0].tolist():
        for row in range(size):
            lists = []
            for feature in range(features):
                at = features * first + feature * size + row
                lists.append(tuple(group["values"][starts[at] : starts[at + 1]].tolist()))
            found.append((group["dense"][first + row].tobytes(), float(group["labels"][first + row]), tuple(lists)))
    return found


def test_the_table_is_as_described(table: WideTable, source: pa.Table) -> None:
    lengths = np.concatenate([list_lengths(source, column) for column in LIST_COLUMNS])
    assert 25.0 < lengths.mean() < 27.0
    assert 9.5 < np.minimum(lengths, LIMIT).mean() < 10.5
    assert lengths.max() == LONGEST
    assert 0.09 < (lengths == 0).mean() < 0.13
    assert 0.005 < source[LIST_COLUMNS[0]].null_count / ROWS < 0.015
    assert 0.05 < source[NUMBER_COLUMNS[0]].null_count / ROWS < 0.15
    file = pq.ParquetFile(table.files[0])
    assert file.metadata.num_columns == 2 + len(READ) - 1 + WIDE.unread
    assert file.metadata.row_group(0).column(1).compression == "ZSTD"


def test_a_finished_table_is_used_again(table: WideTable) -> None:
    before = [Path(path).stat().st_mtime_ns for path in table.files]
    again = wide_table(table.folder, ROWS)
    assert again.snapshot == table.snapshot
    assert [Path(path).stat().st_mtime_ns for path in again.files] == before


@pytest.mark.nightly
def test_a_pass_of_our_worker_runs_in_a_workers_environment(table: WideTable, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: seen.append(options) or run(*words, **options))
    figures = preprocessing.run_in_process("ours", table.folder, ROWS)
    assert (figures["rows"], figures["seconds"] > 0, figures["peak_mib"] > 0) == (ROWS, True, True)
    assert seen[0]["env"].items() >= WORKER_ENVIRONMENT.items()


def test_an_epoch_goes_through_the_service(table: WideTable, capfd: pytest.CaptureFixture[str]) -> None:
    service.main(["--folder", str(table.folder), "--rows", str(ROWS), "--workers", "2"])
    figures = json.loads(capfd.readouterr().out)
    assert figures["rows"] == ROWS
    assert figures["seconds"] > 0


@pytest.mark.nightly
def test_the_last_line_is_the_result(
    table: WideTable, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        preprocessing,
        "run_in_process",
        lambda name, *table: (
            preprocessing.roofline(*table) if name == "roofline" else preprocessing.one_pass(name, *table)
        ),
    )  # each is a process, which takes seconds to start
    monkeypatch.setattr(preprocessing, "epoch", lambda workers, *_: {"seconds": 4.0 / workers, "rows": ROWS})
    preprocessing.main(["--json", "--rows", str(ROWS), "--rounds", "1", "--folder", str(table.folder)])
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert figures["contestants"].keys() == CONTESTANTS.keys()
    seconds = {name: one["median_seconds"] for name, one in figures["contestants"].items()}
    fastest = min(seconds[name] for name in preprocessing.DECODERS)
    assert figures["decode_ratio"] == round(seconds["ours"] / fastest, 3)
    assert figures["batched_ratio"] == round(seconds["ours_batched"] / fastest, 3)
    assert figures["two_workers_speedup"] == 2.0
    assert figures["services"]["2"]["rows_per_second"] == ROWS / 2
    assert {"python", "numpy", "pyarrow", "polars", "duckdb", "numba"} <= figures["machine"]["versions"].keys()
    limits = figures["roofline"]
    assert limits["decoded_bytes_per_row"] > 26 * 20 * 8  # 26 lists of about 26 ids
    assert all(limits[f"ns_per_id_{what}"] > 0.0 for what in ("hashed", "copied_to_rows", "copied_to_batches"))
    assert limits["decoded_gb_per_second"] == round(1e-9 * limits["decoded_bytes_per_row"] * ROWS / fastest, 2)
    text = preprocessing.as_text(figures)
    assert all(f"| {name} |" in text for name in (*CONTESTANTS, "1", "2"))

"""The log of scored rows: whole files, one version's columns each; and what happens where the disk is slow or full."""

import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.serving import row_log
from pipeline.serving.config import ServedVersion
from pipeline.serving.metrics import ServerMetrics
from pipeline.serving.row_log import RowLog

ROWS = pa.table({"age": [1.0, None], "tags": [[1, 2], None]})


def version(number: int) -> ServedVersion:
    return ServedVersion(model="demo", version=number, run_id="r", snapshot=None)


class Counted:
    """The counters of a server, as its address for metrics shows them."""

    def __init__(self) -> None:
        self.metrics = ServerMetrics()

    def __call__(self, written: int, dropped: int) -> None:
        self.metrics.count_log(written, dropped)

    def read(self, name: str) -> int:
        lines = self.metrics.text().decode().splitlines()
        return int(next(float(line.split()[1]) for line in lines if line.startswith(f"{name}_total ")))

    @property
    def written(self) -> int:
        return self.read("dlrm_logged_rows")

    @property
    def dropped(self) -> int:
        return self.read("dlrm_log_dropped_rows")


def test_rows_are_written_with_probability_time_and_version(tmp_path):
    counts = Counted()
    log = RowLog(tmp_path / "log", 1 << 20, counts)
    log.add(version(1), ROWS, np.array([0.25, 0.5]))
    log.add(version(1), ROWS, np.array([0.75, 1.0]))
    log.add(version(2), pa.table({"other": ["x"]}), np.array([0.1]))
    log.close()
    first, second = sorted((tmp_path / "log").iterdir())
    rows = pq.read_table(first)
    assert rows["probability"].to_pylist() == [0.25, 0.5, 0.75, 1.0]
    assert rows["tags"].to_pylist() == [[1, 2], None] * 2
    assert rows["model_version"].to_pylist() == [1] * 4
    assert abs(time.time() - rows["time"][0].value / 1e6) < 60
    assert pq.read_table(second).drop_columns("time").to_pylist() == [
        {"other": "x", "probability": 0.1, "model_version": 2}
    ]
    assert (counts.written, counts.dropped) == (5, 0)


def test_columns_in_another_order_go_to_the_same_file(tmp_path):
    """Ranked candidates have the user's columns last. A column `time` of the model stays."""
    log = RowLog(tmp_path, 1 << 20, Counted())
    rows = ROWS.append_column("time", pa.array(["a", "b"]))
    log.add(version(1), rows, np.array([0.25, 0.5]))
    log.add(version(1), rows.select(["tags", "time", "age"]), np.array([0.75, 1.0]))
    log.close()
    [file] = tmp_path.iterdir()
    found = pq.read_table(file)
    assert found.column_names == ["age", "tags", "time", "probability", "model_version"]
    assert found["age"].to_pylist() == [1.0, None] * 2
    assert found["time"].to_pylist() == ["a", "b"] * 2


def test_a_slow_disk_drops_rows_and_delays_nobody(tmp_path, monkeypatch):
    go, begun, counts = threading.Event(), threading.Event(), Counted()
    write = pq.write_table

    def slowly(*args, **options):
        begun.set()
        assert go.wait(30)
        write(*args, **options)

    monkeypatch.setattr(pq, "write_table", slowly)
    monkeypatch.setattr(row_log, "FILE_ROWS", 2)
    log = RowLog(tmp_path, 1 << 20, counts, waiting=3 * ROWS.nbytes)
    log.add(version(1), ROWS, np.array([0.0, 0.1]))
    assert begun.wait(30)
    for _ in range(100):
        log.add(version(1), ROWS, np.array([0.2, 0.3]))
    assert counts.dropped == 2 * 98
    go.set()
    log.close()
    assert counts.written == 2 * 3
    assert sum(pq.read_metadata(file).num_rows for file in tmp_path.iterdir()) == 6


def fill(log: RowLog, counts: Counted) -> tuple[int, int]:
    """Adds a file's rows and waits until they are written or dropped. Returns how many were."""
    before = counts.written, counts.dropped
    log.add(version(1), ROWS, np.array([0.0, 0.1]))
    deadline = time.monotonic() + 30
    while (counts.written, counts.dropped) == before and time.monotonic() < deadline:
        time.sleep(0.005)
    return counts.written - before[0], counts.dropped - before[1]


@pytest.mark.parametrize("fault", ["limit", "a file in place of the folder", "full disk", "not writable"])
def test_a_log_that_could_not_write_goes_on_when_the_operator_has_mended_it(tmp_path, monkeypatch, caplog, fault):
    caplog.set_level("WARNING", "dlrm")
    monkeypatch.setattr(row_log, "FILE_ROWS", 2)
    counts, folder, write = Counted(), tmp_path / "log", pq.write_table

    def fail(rows, path, **options):
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device") if fault == "full disk" else ValueError("odd")

    log = RowLog(folder, 1 if fault == "limit" else 1 << 20, counts)
    if fault == "limit":
        assert fill(log, counts) == (2, 0)
    elif fault.startswith("a file"):
        folder.rmdir()
        folder.write_text("")
    else:
        monkeypatch.setattr(pq, "write_table", fail)
    assert [fill(log, counts) for _ in range(3)] == [(0, 2)] * 3
    assert caplog.text.count("further rows are dropped") == 1
    monkeypatch.setattr(pq, "write_table", write)
    if fault == "limit":
        for file in folder.iterdir():
            file.unlink()
    elif fault.startswith("a file"):
        folder.unlink()
    assert fill(log, counts) == (2, 0)
    assert caplog.text.count("rows are written again") == 1
    log.close()
    [file] = folder.iterdir()
    assert pq.read_metadata(file).num_rows == 2


def test_a_removed_folder_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(row_log, "FILE_ROWS", 2)
    counts, folder = Counted(), tmp_path / "log"
    log = RowLog(folder, 1 << 20, counts)
    folder.rmdir()
    assert fill(log, counts) == (2, 0)
    log.close()

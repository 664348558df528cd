"""Served rows and a training's features, compared with those computed after late events have arrived."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.consistency import consistency
from flows.end_to_end import end_to_end
from storage.warehouse import Warehouse, WarehouseConfig
from tests.homes import LEARNER, START, moments, rows_of, write_config, write_days

DAYS, ROWS, USERS, LAST = 3, 200, 6, 3
LOG: dict[str, Any] = {
    "on": "user",
    "time": "time",
    "as_of": "at",
    "last": LAST,
    "columns": "item",
    "prefix": "seen_",
}
LATE: dict[str, Any] = LEARNER | {
    "name": "late",
    "source": {"path": "samples.parquet", "day_column": "at"},
    "features": {
        "dense": [{"columns": ["num"]}],
        "sparse": [
            {"columns": ["user", "seen_item"], "pooling": "mean", "transforms": [{"kind": "sigrid_hash", "size": 50}]}
        ],
    },
    "split": {"days": {"train": ["2025-03-01"], "valid": ["2025-03-02"], "test": ["2025-03-03"]}},
    "model": {"embedding_width": 4, "bottom_mlp": [4], "top_mlp": [4]},
    "training": {"batch_rows": 64, "world_size": 1, "threads_per_rank": 1},
    "preprocessing": {"workers": 1, "executor": "inline"},
    "evaluation": {"workers": 1, "importance_rows": None, "baselines": []},
}


def events(seconds: np.ndarray) -> pa.Table:
    """Events whose user and item follow from their second."""
    return rows_of(START.date(), len(seconds), user=seconds % USERS, time=moments(seconds), item=seconds)


def lists_of(samples: pa.Table, seconds: np.ndarray) -> list[list[int]]:
    """The lists of a server that had these events: a loop over rows."""
    found = []
    for row in samples.to_pylist():
        at = (row["at"] - START).total_seconds()
        found.append([int(one) for one in np.sort(seconds)[::-1] if one % USERS == row["user"] and one < at][:LAST])
    return found


@pytest.fixture
def samples(tmp_path: Path) -> pa.Table:
    random = np.random.default_rng(7)
    at = np.arange(DAYS * ROWS) * (86_400 // ROWS)
    values = {"at": moments(at), "user": random.integers(0, USERS, len(at)), "num": random.normal(size=len(at))}
    rows = pa.table(values | {"label": random.integers(0, 2, len(at))})
    pq.write_table(rows, tmp_path / "samples.parquet")
    return rows


def describe(folder: Path, **source: Any) -> str:
    features = LATE["features"] | {"histories": [LOG | source]}
    values = LATE | {"features": features, "source": LATE["source"] | {"path": str(folder / "samples.parquet")}}
    return write_config(folder, values)


@pytest.mark.nightly
def test_late_events_show_in_served_rows_and_in_features_computed_again(samples, command, tmp_path):
    """A table as source: its snapshot of the training can still be read. Each late event is newest when it arrives."""
    home = tmp_path / "home"
    early = np.arange(0, DAYS * 86_400, 613)
    late = early[early % 86_400 > 72_000]  # those of the evenings arrived when the rows had been served
    known = np.setdiff1d(early, late)
    warehouse = Warehouse(WarehouseConfig(), home / "warehouse")

    def write_log(seconds: np.ndarray, tag: str) -> None:
        write_days(warehouse, events(seconds), name="log", identity=tag)

    write_log(known, "a")
    config = describe(tmp_path, table="log")
    code, _, log = command(end_to_end, config, home=home)
    assert code == 0, log
    served = samples.drop_columns("label").append_column("seen_item", pa.array(lists_of(samples, known)))
    pq.write_table(served, tmp_path / "served.parquet")
    words = (config, f"served={tmp_path / 'served.parquet'}", "on=[user, at]")
    code, found, log = command(consistency, *words, home=home)
    assert (code, found["rows"], found["only_then"], found["only_now"]) == (0, DAYS * ROWS, 0, 0), log
    assert [one["differing"] for one in found["features"]] == [0, 0]
    code, found, log = command(consistency, config, home=home)
    assert (code, found["version"]) == (0, 1), log
    assert [(one["feature"], one["differing"]) for one in found["features"]] == [("seen_item", 0)]

    write_log(early, "b")
    lists = [lists_of(samples, seconds) for seconds in (known, early)]
    changed = sum(one != two for one, two in zip(*lists, strict=True))
    other = sum(bool(one) and one != two for one, two in zip(*lists, strict=True))
    assert other > 0
    for given in (words, (config,)):
        code, found, log = command(consistency, *given, home=home)
        assert code == 0, log
        [lists_found] = [one for one in found["features"] if one["feature"] == "seen_item"]
        assert lists_found["differing"] == changed
        assert lists_found["share"] == changed / (DAYS * ROWS)
        assert lists_found["reasons"]["other value"] == other
        assert len(lists_found["examples"]["other value"]) == 3
        report = json.loads(Path(found["report"]).read_text(encoding="utf-8"))
        assert report["features"] == found["features"]
    code, found, log = command(consistency, *words, "start=2025-03-03", "end=2025-03-03", home=home)
    assert (found["rows"], found["only_then"], found["days"]) == (ROWS, (DAYS - 1) * ROWS, ["2025-03-03"]), log

    code, found, log = command(consistency, config, f"served={tmp_path / 'served.parquet'}", home=home)
    assert code == 1
    assert "argument 'on': expected columns that tell which row is which" in found["error"] + log


@pytest.mark.nightly
def test_events_in_changed_files_cannot_be_compared_with_those_of_a_training(samples, command, tmp_path):
    """Files of new events can: those that the training read are still as they were."""
    home = tmp_path / "home"
    seconds = np.arange(0, DAYS * 86_400, 613)
    (tmp_path / "log").mkdir()
    pq.write_table(events(seconds[::2]), tmp_path / "log" / "a.parquet")
    config = describe(tmp_path, path=str(tmp_path / "log" / "*.parquet"))
    code, _, log = command(end_to_end, config, home=home)
    assert code == 0, log
    pq.write_table(events(seconds[1::2]), tmp_path / "log" / "b.parquet")
    code, found, log = command(consistency, config, home=home)
    lists = [lists_of(samples, one) for one in (seconds[::2], seconds)]
    assert code == 0, log
    assert found["features"][0]["differing"] == sum(one != two for one, two in zip(*lists, strict=True)) > 0
    pq.write_table(events(seconds), tmp_path / "log" / "a.parquet")
    code, found, log = command(consistency, config, home=home)
    assert code == 1
    assert "expected the file that version 1 was trained with, got a changed or missing one" in found["error"] + log

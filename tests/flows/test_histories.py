"""Lists and windows of a log of events train the model that the same values stored in the rows train."""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.end_to_end import end_to_end
from flows.score import score
from flows.train import train
from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.jobs.workspace import Workspace
from storage.warehouse import Warehouse, WarehouseConfig
from tests.homes import LEARNER, moments, read_rows, write_config

DAYS, ROWS, USERS, ITEMS, LAST = 4, 500, 25, 40, 4
SAMPLES: dict[str, Any] = LEARNER | {
    "name": "histories",
    "source": {"path": "samples.parquet", "day_column": "at"},
    "features": {
        "dense": [{"columns": ["num", "week_*"]}],
        "sparse": [
            {"columns": ["user"], "transforms": [{"kind": "sigrid_hash", "size": 50}]},
            {
                "columns": ["seen_item"],
                "pooling": "mean",
                "transforms": [{"kind": "first_x", "limit": 3}, {"kind": "sigrid_hash", "size": 100}],
            },
        ],
    },
    "split": {"days": {"train": ["2025-03-01..2025-03-02"], "valid": ["2025-03-03"], "test": ["2025-03-04"]}},
}
HISTORY = {"on": "user", "time": "time", "as_of": "at", "last": LAST, "columns": "item", "prefix": "seen_"}
WINDOW = {
    "on": "user", "time": "time", "as_of": "at", "seconds": [604_800], "take": ["count", "mean"], "columns": "minutes",
    "prefix": "week_",
}  # fmt: skip


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Four days of samples whose label depends on what the user finished last, and a log of that.

    The log goes on after each sample, and also has what users left.
    """
    random = np.random.default_rng(3)
    n, m = DAYS * ROWS, 6_000
    at = np.sort(random.integers(0, DAYS * 86_400, n))
    time, finished = random.integers(-86_400, DAYS * 86_400, m), random.random(m) < 0.6
    users, watchers, items = random.integers(0, USERS, n), random.integers(0, USERS, m), random.integers(0, ITEMS, m)
    worth = random.normal(size=ITEMS)
    minutes = random.integers(1, 90, m)
    lists, labels, counts, means = [], [], [], []
    for user, moment in zip(users, at, strict=True):
        mine = np.flatnonzero((watchers == user) & (time < moment) & finished)
        known = mine[np.argsort(time[mine], kind="stable")][::-1][:LAST]
        lists.append(items[known].tolist())
        inside = mine[(time[mine] >= moment - 604_800) & finished[mine]]
        counts.append(len(inside))
        means.append(float(minutes[inside].mean()) if len(inside) else None)
        labels.append(int(random.random() < 1.0 / (1.0 + np.exp(-3.0 * worth[items[known]][:3].sum()))))

    samples = {"at": moments(at), "user": users, "num": random.normal(size=n), "label": labels}
    log = {
        "time": moments(time),
        "user": watchers,
        "item": items,
        "minutes": minutes,
        "action": np.where(finished, "finish", "leave"),
    }
    pq.write_table(pa.table(samples), tmp_path / "samples.parquet")
    ready = {"seen_item": lists, "week_count_604800": counts, "week_minutes_mean_604800": means}
    pq.write_table(pa.table(samples | ready), tmp_path / "ready.parquet")
    (tmp_path / "log").mkdir()
    pq.write_table(pa.table(log)[:4_000], tmp_path / "log" / "a.parquet")
    pq.write_table(pa.table(log)[4_000:], tmp_path / "log" / "b.parquet")
    return tmp_path


def describe(logs: Path, samples: str, name: str, **features: Any) -> str:
    values = SAMPLES | {"name": name, "source": SAMPLES["source"] | {"path": str(logs / samples)}}
    return write_config(logs, values | {"features": SAMPLES["features"] | features})


@pytest.mark.slow
def test_a_model_reads_its_history_as_it_was_trained(logs, command, tmp_path):
    """Also when the config cuts other lists by now, or none: as the gate's champion and in scores."""
    home = tmp_path / "home"
    finished = {"path": str(logs / "log" / "*.parquet"), "where": "action = 'finish'"}
    windows = [WINDOW | finished]
    config = describe(logs, "samples.parquet", "cut", histories=[HISTORY | finished], windows=windows)
    code, first, log = command(end_to_end, config, home=home)
    assert code == 0, log
    scores = []
    code, result, log = command(score, config, "start=2025-03-04", home=home)
    assert code == 0, log
    scores.append(read_scores(home, result["table"]))

    late = HISTORY | finished | {"last": 2, "delay_seconds": 86_400}
    describe(logs, "samples.parquet", "cut", histories=[late], windows=windows)
    code, second, log = command(train, config, home=home)
    assert code == 0, log
    assert second["gate"]["champion"] == 1
    assert second["gate"]["champion_ne"] == first["eval"]["ne"], "the champion had the list of the other model"
    assert second["eval"]["ne"] != first["eval"]["ne"]
    code, result, log = command(score, config, "start=2025-03-04", "version=1", "force=true", home=home)
    assert code == 0, log
    scores.append(read_scores(home, result["table"]))
    assert scores[0] == scores[1]

    describe(logs, "samples.parquet", "cut", sparse=SAMPLES["features"]["sparse"][:1], windows=windows)
    code, third, log = command(train, config, home=home)
    assert code == 0, log
    assert third["gate"]["champion_ne"] == first["eval"]["ne"]

    (record,) = home.glob(f"mlflow/**/{first['mlflow_run_id']}/**/record.json")
    record.unlink()
    describe(logs, "samples.parquet", "cut", histories=[late], windows=windows)
    code, result, log = command(score, config, "start=2025-03-04", "version=1", "force=true", home=home)
    assert code == 0, log
    assert "the record of version 1 cannot be read" in log
    assert read_scores(home, result["table"]) != scores[0]


def read_scores(home: Path, table: str) -> dict[str, list[Any]]:
    warehouse = Warehouse(WarehouseConfig(), home / "warehouse")
    return read_rows(warehouse, table, ["probability"]).to_pydict()


@pytest.mark.nightly
def test_histories_and_windows_train_like_the_same_values_in_the_rows(logs, command, tmp_path):
    """The same weights bit for bit, scores and served probabilities. The table has none of them, and the log's future
    is not seen."""
    home = tmp_path / "home"
    finished = {"path": str(logs / "log" / "*.parquet"), "where": "action = 'finish'"}
    window = WINDOW | finished
    cut = describe(logs, "samples.parquet", "cut", histories=[HISTORY | finished], windows=[window])
    kept = describe(logs, "ready.parquet", "kept")
    code, found, log = command(end_to_end, cut, home=home)
    assert code == 0, log
    code, expected, log = command(end_to_end, kept, home=home)
    assert code == 0, log
    assert found["train"]["weights_sha256"] == expected["train"]["weights_sha256"]
    assert found["eval"] == expected["eval"]
    assert found["eval"]["ne"] < 0.8  # it learns from the histories
    warehouse = Warehouse(WarehouseConfig(), home / "warehouse")
    assert set(warehouse.schema(warehouse.current("cut")).names) == {"day", "at", "user", "num", "label"}

    scores = {}
    for name, config in (("cut", cut), ("kept", kept)):
        code, scored, log = command(score, config, "scoring.keep=[user, at]", home=home)
        assert (code, scored["rows"]) == (0, DAYS * ROWS), log
        scores[name] = read_rows(warehouse, f"{name}_scores", ["user", "at", "probability"])
    assert scores["cut"] == scores["kept"]

    mlflow.set_tracking_uri(Workspace(load(cut, {"home": str(home)})).tracking.uri)
    model = mlflow.pyfunc.load_model("models:/cut@champion")
    rows = pq.read_table(logs / "ready.parquet").slice(1_500).to_pandas()
    served = model.predict(rows[["user", "num", *(name for name in rows if name.startswith(("seen_", "week_")))]])[
        "probability"
    ]
    offline = scores["cut"].slice(1_500).column("probability").to_numpy()
    np.testing.assert_allclose(served.to_numpy(), offline, atol=1e-6)
    reading = mlflow.pyfunc.load_model(
        "models:/cut@champion", model_config={"events": {finished["path"]: finished["path"]}}
    )
    assert reading.predict(rows[["user", "at", "num"]])["probability"].tolist() == served.tolist()

    code, skipped, log = command(train, cut, home=home)
    assert (code, skipped["status"]) == (0, "skipped"), log


def test_a_log_of_the_labels_needs_a_delay(logs):
    """Labels are not known at once. The log may be named in several ways, or be the table of samples."""
    outcomes = {"path": str(logs / "log" / "*.parquet"), "outcome_time": "time"}
    given = SAMPLES | {"source": SAMPLES["source"] | {"outcomes": outcomes}}
    history = HISTORY | {"path": outcomes["path"]}
    given |= {"features": SAMPLES["features"] | {"histories": [history]}}
    with pytest.raises(ConfigError, match=r"delay_seconds of features\.histories .*: expected 1 or more"):
        load(given)
    load(given, {"features.histories.0.delay_seconds": 3_600})
    versions = {
        "path": [outcomes["path"].replace("/log/", "/log/./")],
        "on": "user",
        "valid_from": "time",
        "as_of": "at",
    }
    own = {key: value for key, value in HISTORY.items() if key != "columns"} | {"table": "histories", "columns": "lab*"}
    clicked = own | {"columns": "num", "where": "label = 1"}
    for features in ({"joined": [versions]}, {"histories": [own]}, {"histories": [clicked]}):
        with pytest.raises(ConfigError, match=r"expected 1 or more, because it has the labels"):
            load(given | {"features": SAMPLES["features"] | features})
    looked_up = {**versions, "path": outcomes["path"]}
    with pytest.raises(ConfigError, match=r"delay_seconds of source\.lookups .*: expected 1 or more"):
        load(given | {"source": given["source"] | {"lookups": [looked_up]}, "features": SAMPLES["features"]})
    without = {"generator": {}, "outcomes": {}, "day_column": "event_time"}
    load(given | {"source": without, "features": SAMPLES["features"] | {"histories": [own | {"columns": "num"}]}})

"""A beta feature is first joined, then materialized in the days. Both give the same model."""

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.enrich import enrich
from flows.ingest import ingest
from flows.score import score
from flows.train import train
from pipeline.catalog.events import read_events
from pipeline.config import RunConfig, load
from pipeline.data.joined.source import pin_sources
from pipeline.jobs.training.identity import describe_joined, identity
from pipeline.jobs.workspace import Workspace
from storage.warehouse import Warehouse, WarehouseConfig
from tests.homes import LEARNER, write_config

DAYS = [datetime.date(2025, 3, 1) + datetime.timedelta(days=i) for i in range(4)]
ROWS = 400
BETA: dict[str, Any] = LEARNER | {
    "name": "beta",
    "source": {"path": "samples.parquet", "day_column": "day"},
    "features": {
        "dense": [{"columns": ["num", "score"]}],
        "sparse": [{"columns": ["user", "liked"], "transforms": [{"kind": "sigrid_hash", "size": 100}]}],
        "joined": [{"path": "side/*.parquet", "on": "user", "day_column": "day"}],
    },
    "filter": "score > -2.5 or num > -3",
    "split": {"days": {"train": ["2025-03-01..2025-03-02"], "valid": ["2025-03-03"], "test": ["2025-03-04"]}},
    "evaluation": {"workers": 1, "importance_rows": 800},
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Four days of samples and, for each day, a score and a list for most users."""
    random = np.random.default_rng(3)
    users, days = random.integers(0, 30, ROWS * 4), np.repeat(np.arange(4), ROWS)
    worth = random.normal(size=(4, 30))
    truth = random.random(ROWS * 4) < 1.0 / (1.0 + np.exp(-2.0 * worth[days, users]))
    samples = {"day": [DAYS[i] for i in days], "user": users, "num": random.normal(size=ROWS * 4), "label": truth.astype(int)}  # fmt: skip
    pq.write_table(pa.table(samples), tmp_path / "samples.parquet")
    (tmp_path / "side").mkdir()
    for number, day in enumerate(DAYS):
        some = random.permutation(30)[:25]
        side = {"day": [day] * 25, "user": some, "score": worth[number, some], "liked": [[int(i), 7] for i in some]}
        pq.write_table(pa.table(side), tmp_path / "side" / f"{number}.parquet")
    values = BETA | {"source": BETA["source"] | {"path": str(tmp_path / "samples.parquet")}}
    joined = values["features"]["joined"][0] | {"path": str(tmp_path / "side/*.parquet")}
    values |= {"features": values["features"] | {"joined": [joined]}}
    return write_config(tmp_path, values)


@pytest.mark.nightly
def test_a_joined_feature_and_the_same_one_materialized_train_the_same_model(config, command, tmp_path):
    home = tmp_path / "home"
    code, _, log = command(ingest, config, home=home)
    assert code == 0, log
    code, tried, log = command(train, config, home=home)
    assert code == 0, log
    assert tried["eval"]["ne"] < 0.95  # the model learns from the feature source
    code, scored, log = command(score, config, home=home)
    assert (code, scored["rows"]) == (0, 4 * ROWS), log
    code, skipped, log = command(train, config, home=home)
    assert skipped["status"] == "skipped", log

    code, done, log = command(enrich, config, home=home)
    assert (code, done["status"], done["days_written"], done["rows"]) == (0, "ok", 4, 4 * ROWS), log
    assert (done["columns"], 0.5 < done["matched_share"] < 1.0) == (["score", "liked"], True)
    code, refused, _ = command(train, config, home=home)
    assert code == 1
    assert "Set `stored: true` if flows.enrich wrote them" in refused["error"]
    stored = "features.joined.0.stored=true"
    code, final, log = command(train, config, stored, home=home)
    assert code == 0, log
    assert final["snapshot_id"] != tried["snapshot_id"]
    assert final["train"]["weights_sha256"] == tried["train"]["weights_sha256"]
    assert final["eval"] == tried["eval"]

    code, skipped, log = command(ingest, config, home=home)
    assert (code, skipped["status"]) == (0, "skipped"), log
    code, skipped, log = command(enrich, config, stored, home=home)
    assert (code, skipped["status"], skipped["days_skipped"]) == (0, "skipped", 4), log


def test_a_changed_feature_source_is_another_training(config, monkeypatch, tmp_path):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))

    def named(settings: RunConfig) -> str:
        workspace = Workspace(settings)
        read = [one for one in settings.features.joined if not one.stored]
        pinned = pin_sources(read, tmp_path, workspace.warehouse)
        return identity(workspace, {"train": describe_joined(workspace.warehouse, pinned, None, DAYS[:2])}, "plan")

    settings = load(config)
    before = named(settings)
    assert named(load(config)) == before
    os.utime(tmp_path / "side" / "3.parquet", ns=(1, 1))  # of a day that no row of the training can read
    assert named(settings) == before
    os.utime(tmp_path / "side" / "0.parquet", ns=(1, 1))
    assert named(settings) != before
    stored = load(config, {"features.joined.0.stored": True})
    without = load(config, {"features.joined": []})
    assert named(stored) == named(without) != named(settings)


def test_the_feature_is_not_in_the_table_until_it_is_written(config, command, tmp_path):
    code, result, log = command(ingest, config, home=tmp_path / "home")
    assert code == 0, log
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "home" / "warehouse")
    assert set(warehouse.schema(warehouse.current("beta")).names) == {"day", "user", "num", "label"}
    code, result, _ = command(enrich, config, "features.joined.0.on=usr", home=tmp_path / "home")
    assert (code, "column 'usr'" in result["error"]) == (1, True)
    code, result, log = command(enrich, config, "end=2025-03-02", home=tmp_path / "home")
    assert (code, result["days_written"]) == (0, 2), log
    code, result, log = command(enrich, config, home=tmp_path / "home")
    assert (code, result["days_written"], result["days_skipped"]) == (0, 2, 2), log
    declared = [(event.feature, event.state, event.by) for event in read_events(warehouse, "beta")]
    assert sorted(declared) == [(name, "beta", "flows.enrich") for name in ("liked", "score")]
    code, result, _ = command(enrich, config, "features.joined=[]", home=tmp_path / "home")
    assert (code, result["error"]) == (1, "features.joined, histories and windows: expected one to materialize, which has stored: true, got none. Set stored: true where its columns are to be written into the days.")  # fmt: skip

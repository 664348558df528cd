"""The generated clicks depend on what they are said to depend on, and models are trained. No NE is judged but that."""

import datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.history_learning import ITEMS, NTH, Learned, generate, measure, missing_data, prepare_ratings, render
from pipeline.config import load


@pytest.mark.nightly
def test_clicks_depend_on_the_event_that_decides_alone(tmp_path: Path) -> None:
    """Row by row: the probability given the shown item and the 200th-last event before the row is one number."""
    generate(tmp_path, rows=2_000, users=5)
    log, samples = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("log", "samples"))
    logit = np.log([row["by_event"] / (1 - row["by_event"]) for row in samples])
    parts = np.zeros((len(samples), 2 * ITEMS))
    for number, row in enumerate(samples):
        events = [event["item"] for event in log if event["user"] == row["user"] and event["time"] < row["at"]]
        parts[number, [row["item"], ITEMS + events[-NTH]]] = 1
        assert len({*events[-NTH:]}) == NTH, "an item repeats"
    found, *_ = np.linalg.lstsq(parts, logit, rcond=None)
    np.testing.assert_allclose(parts @ found, logit, atol=1e-6)
    assert abs(np.mean([row["label"] - row["by_event"] for row in samples])) < 0.05


def test_the_floor_is_lower_the_more_is_known(tmp_path: Path) -> None:
    generate(tmp_path, rows=20_000, users=100)
    samples = pq.read_table(tmp_path / "samples.parquet")
    losses = {}
    for name in ("by_event", "by_list", "by_nothing"):
        truth, known = (samples.column(one).to_numpy() for one in ("by_event", name))
        assert known.mean() == pytest.approx(truth.mean(), abs=0.01)
        losses[name] = -(truth * np.log(known) + (1 - truth) * np.log(1 - known)).mean()
    assert losses["by_event"] < 0.8 * losses["by_list"]
    assert losses["by_list"] < losses["by_nothing"] < 1.02 * losses["by_list"]


def test_ratings_are_split_by_time(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_DATA", str(shared_data))
    models = prepare_ratings(tmp_path)
    split = load(models["last 200"]).split.days
    assert split is not None
    ends = [
        datetime.date.fromisoformat(end)
        for part in (split.train, split.valid, split.test)
        for end in part[0].split("..")
    ]
    assert ends == sorted(ends)
    days = pq.read_table(tmp_path / "ratings.parquet").column("at").cast("date32").to_pylist()
    assert sum(day >= ends[4] for day in days) / len(days) == pytest.approx(0.1, abs=0.02)
    assert all(history.delay_seconds for one in models.values() for history in load(one).features.histories)


def test_ratings_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_DATA", str(tmp_path))
    assert "ml100k/ratings.parquet" in str(missing_data("configs/movielens100k.yaml"))


def test_the_table_has_means_and_half_ranges() -> None:
    found = Learned(part="generated", model="last 20", rows=9, ne=(0.9, 0.8), auc=(0.7, 0.6), ne_floor=0.5)
    assert render([found]).splitlines()[-1] == "| generated | last 20 | 0.8500 | 0.0500 | 0.6500 | 0.5000 |"


@pytest.mark.nightly
def test_the_event_that_decides_is_learned_if_it_is_a_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.history_learning.ITEMS", 8)
    monkeypatch.setattr("benchmarks.history_learning.NTH", 4)
    monkeypatch.setattr("benchmarks.history_learning.LENGTHS", (2, 4))
    monkeypatch.delenv("DLRM_HOME", raising=False)
    models = generate(tmp_path, rows=6_000, users=30)
    assert [*models] == ["no history", "last 2", "last 2, oldest", "last 4", "last 4, oldest"]
    chosen = {name: models[name] for name in ("last 2, oldest", "last 4, oldest")}
    short, whole = measure("generated", chosen, [1], tmp_path)
    assert whole.ne_floor is not None
    assert short.ne_floor is not None
    assert whole.ne_floor < whole.ne[0] < short.ne_floor < short.ne[0]

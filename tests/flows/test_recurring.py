"""Daily training: incremental champions, backfills and backtests of policies."""

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.backfill import backfill
from flows.backtest import backtest
from flows.recurring import recurring
from flows.replay import replay
from pipeline.config import load
from pipeline.errors import ConfigError, ContractError, RegistryError
from pipeline.evaluation.series import BacktestResult, DaySums
from pipeline.jobs.recurring import judge, run
from pipeline.jobs.recurring.backfill import describe_backfill
from pipeline.jobs.recurring.backtest import render_table, summarize
from pipeline.jobs.recurring.day import identity_of_day
from pipeline.jobs.training.provenance import fetch_record
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import CHALLENGER, CHAMPION, REFERENCE, find_holder, list_moves
from tests.homes import CONFIG, open_smoke

TOY = {
    "name": "toy_daily",
    "split": {"hash": {"key": ["cat_user", "cat_item"], "shares": {"train": 0.7, "valid": 0.1, "test": 0.2}, "days": ["2025-01-06..2025-01-07"]}},
    "training.epochs": 4,  # with one, the first model is no better than the mean rate
    "training.world_size": 1,
    "training.threads_per_rank": 1,
    "preprocessing.executor": "inline",
    "evaluation.importance_rows": None,
    "evaluation.slices": [],
    "gate.rule": "not_worse",
    "gate.calibration_low": 0.5,
    "gate.calibration_high": 2.0,
    "recurring.training": {"dense_learning_rate": 5.0e-4},
    "recurring.policies": {"every day": {}, "never": {"every_days": None}},
}  # fmt: skip
"""Four days of generated rows. The first model is trained on two of them."""


@pytest.fixture(scope="module")
def toy_home(plainly, tmp_path_factory):
    """A home with the third day backfilled."""
    home = tmp_path_factory.mktemp("toy")
    with plainly(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLRM_HOME", str(home))
        filled = backfill(CONFIG, TOY, start="2025-01-08", end="2025-01-08")
    return home, filled


@pytest.fixture
def filled(toy_home, plain, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(toy_home[0]))
    return toy_home[1]


def tags(config, version):
    return Workspace(config).tracking.client.get_model_version("toy_daily", str(version)).tags


@pytest.mark.slow
def test_a_champion_is_trained_day_by_day(filled, monkeypatch, tmp_path):
    """Days after the first champion: trained, judged on the next day, skipped, only evaluated, refused."""
    config = load(CONFIG, TOY)
    tracker = Workspace(config).tracking
    assert (filled["status"], filled["days_written"], filled["days_trained"]) == ("ok", 1, 1)
    first = tags(config, 1)
    assert (first["trained_to"], first["scratch_day"]) == ("2025-01-07", "2025-01-07")
    second = tags(config, 2)
    assert (second["trained_to"], second["scratch_day"], second["trained_from"]) == ("2025-01-08", "2025-01-07", "1")
    assert filled["model"] == {"name": "toy_daily", "version": 2, "alias": "challenger"}
    assert [find_holder(tracker, "toy_daily", alias) for alias in (CHAMPION, CHALLENGER, REFERENCE)] == [1, 2, 1]

    once_more = recurring(CONFIG, TOY, day="2025-01-08")
    assert (once_more["status"], once_more["model"]) == ("skipped", filled["model"])
    assert (once_more["gate"]["decision"], once_more["judged"]) == ("hold", None)
    assert once_more["gate"]["reason"] == "It is judged on the next day, which no model has seen yet."
    assert once_more["champion_eval"]["rows"] == day_rows(config, 8)
    assert once_more["train"]["rows"] + once_more["eval"]["rows"] == once_more["champion_eval"]["rows"]
    assert once_more["champion_eval"]["ne"] == filled["series"][0]["champion_ne"]
    assert once_more["reference"] == {"version": 1, "eval": once_more["champion_eval"]}
    with pytest.raises(
        RegistryError,
        match=r"version 1: expected a champion that has not seen 2025-01-07 yet, got one trained to 2025-01-07",
    ):
        recurring(CONFIG, TOY, day="2025-01-07")

    folder = config.home_path / "runs" / second["run_folder"]
    (folder / "registered").unlink()  # as if publishing was interrupted after the version became challenger
    tracker.client.delete_model_version_tag("toy_daily", "2", "identity")
    assert recurring(CONFIG, TOY, day="2025-01-08")["status"] == "skipped"
    assert tags(config, 2)["identity"] == second["identity"]

    idle = TOY | {"recurring.every_days": None}
    for where, what in ((judge, "move_alias"), (run, "prepare_day")):  # killed before, and after, the alias moved
        with monkeypatch.context() as cut:
            cut.setattr(where, what, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                recurring(CONFIG, idle, day="2025-01-09")
    assert find_holder(tracker, "toy_daily") == 2
    evaluated = recurring(CONFIG, idle, day="2025-01-09")
    assert (evaluated["status"], evaluated["model"]["version"], evaluated["gate"]) == ("ok", 2, None)
    assert evaluated["decision"] == {"training": "none", "reason": "no condition of the policy holds"}
    assert (evaluated["champion"], evaluated["judged"]["version"]) == (1, 2)
    verdict = evaluated["judged"]["gate"]
    assert (verdict["decision"], verdict["champion"]) == ("promote", 1)
    rows = day_rows(config, 9)
    scored = (evaluated["champion_eval"], evaluated["judged"]["eval"], evaluated["reference"]["eval"])
    assert [numbers["rows"] for numbers in scored] == [rows] * 3
    difference = evaluated["judged"]["eval"]["ne"] - evaluated["champion_eval"]["ne"]
    assert verdict["difference"]["ne"] == pytest.approx(difference, abs=1e-9)
    assert f"{rows:,} rows of one day only" in verdict["reason"]
    assert (tags(config, 2)["gate"], tags(config, 2)["gate_reason"]) == ("promote", verdict["reason"])
    assert [move.version for move in list_moves(tracker, "toy_daily") if move.alias == CHAMPION] == [1, 2]
    metrics = tracker.client.get_run(evaluated["mlflow_run_id"]).data.metrics
    assert [metrics[f"day/{role}_ne"] for role in ("champion", "challenger", "reference")] == [
        one["ne"] for one in scored
    ]
    judged = tracker.load_result(tracker.client.get_model_version("toy_daily", "2").run_id)
    assert (judged["gate"], judged["judged_on"], judged["model"]["alias"]) == (verdict, "2025-01-09", "champion")
    assert judged["judged_eval"] == evaluated["judged"]["eval"]
    shown = f"v2 promoted, NE {judged['judged_eval']['ne']:.4f} on 2025-01-09 ({rows:,} rows), 2025-01-08 incremental"
    run_of_second = tracker.client.get_run(tracker.client.get_model_version("toy_daily", "2").run_id)
    assert run_of_second.info.run_name.startswith(shown)
    assert run_of_second.data.metrics["judged/ne"] == judged["judged_eval"]["ne"]
    told = ("ne", "rows", "judged_on")
    assert [tags(config, 2)[key] for key in told] == [f"{judged['judged_eval']['ne']:.4f}", f"{rows}", "2025-01-09"]
    nightly = recurring(CONFIG, idle | {"recurring.closed_after_hours": 0})
    line = {"day": "2025-01-09", "status": "skipped", "model": evaluated["model"]}
    [told] = nightly.pop("verdicts")
    assert told == {key: evaluated[key] for key in told} | {"status": "skipped"}
    assert nightly == evaluated | {"status": "skipped", "days": [line]}
    assert recurring(CONFIG, idle)["days"] == []  # no later day closes the ninth

    shutil.move(folder / "checkpoints", tmp_path)
    with pytest.raises(
        ContractError, match=r"version 2: expected its checkpoint in .*, got none. Train from scratch: scratch=true."
    ):
        recurring(CONFIG, TOY, day="2025-01-09")
    shutil.move(tmp_path / "checkpoints", folder)

    both = backfill(CONFIG, TOY, start="2025-01-08", end="2025-01-09", work="train")
    assert (both["status"], both["days_trained"], both["trainings_skipped"]) == ("ok", 1, 1)
    assert [line["champion_ne"] for line in both["series"]] == [
        filled["series"][0]["champion_ne"],
        evaluated["champion_eval"]["ne"],
    ]
    assert [line["gate"] for line in both["series"]] == ["promote", "promote"]  # the first is judged by now
    third = tags(config, 3)
    assert (third["trained_to"], third["scratch_day"], third["trained_from"]) == ("2025-01-09", "2025-01-07", "2")
    seen = fetch_record(tracker, "toy_daily", 3).trained_on
    assert {day.day for one in seen for day in one.days} == {6, 7, 8, 9}
    shutil.rmtree(folder / "checkpoints")  # retention does this: version 2 is replayed first, from version 1
    here = {key: value for key, value in TOY.items() if key != "training.epochs"}  # the record knows its own
    replayed = replay(CONFIG, here, version=3)
    assert (replayed["equal"], replayed["replayed_first"]) == (True, [2])


def day_rows(config, number):
    warehouse = Workspace(config).warehouse
    return warehouse.day_rows(warehouse.current("toy_daily"))[datetime.date(2025, 1, number)]


@pytest.mark.slow
def test_policies_are_backtested_on_the_same_days(filled, monkeypatch):
    """A model that is never retrained scores the first new day as the champion did, to the last bits.

    The model of the first new day is judged on the second one, so the first model serves that day, too.
    """
    compared = backtest(CONFIG, TOY, end="2025-01-09")
    assert (compared["status"], compared["days"]) == ("ok", 2)
    every, never = (compared["policies"][name] for name in ("every day", "never"))
    assert every["trainings"] == {"incremental": 2, "scratch": 0}
    line = filled["series"][0]
    days = open_smoke(TOY).tracking.load_result(line["mlflow_run_id"])
    assert every["rows_trained"] > days["train"]["rows"] > 0
    trained = {
        one["trainings"]["incremental"]: one["rows_trained"]
        for one in map(_course, Path(compared["figure"]).parent.glob("policies/*.json"))
    }
    assert trained[2]["2025-01-08"] == days["train"]["rows"]  # the rows that the daily run trained on
    assert (never["trainings"], never["rows_trained"]) == ({"incremental": 0, "scratch": 0}, 0)
    client = open_smoke(TOY).tracking.client
    children = client.search_runs(
        [client.get_run(compared["mlflow_run_id"]).info.experiment_id],
        f"tags.`mlflow.parentRunId` = '{compared['mlflow_run_id']}'",
    )
    series = {run.info.run_name: client.get_metric_history(run.info.run_id, "next_day_ne") for run in children}
    assert series["never"][0].value == series["every day"][0].value
    assert series["never"][0].value == pytest.approx(filled["series"][0]["champion_ne"], rel=1e-6)
    assert series["never"][1].value == series["every day"][1].value
    assert every["ne"] == never["ne"]
    again = backtest(CONFIG, TOY, end="2025-01-09")  # read from files
    assert again["policies"] == compared["policies"]


def _course(path):
    return json.loads(path.read_text())


def test_a_days_work_does_not_depend_on_the_champion():
    config, day = load(CONFIG, TOY), datetime.date(2025, 1, 8)
    same = load(config, {"preprocessing.workers": 2, "recurring.policies": {}, "gate.rule": "better"})
    assert identity_of_day(Workspace(config), day) == identity_of_day(Workspace(same), day)
    other: Any
    for other in ({"training.epochs": 3}, {"recurring.every_days": 2}, {"recurring.training": {}}):
        assert identity_of_day(Workspace(config), day) != identity_of_day(Workspace(load(config, other)), day)
    assert identity_of_day(Workspace(config), day) != identity_of_day(Workspace(config), datetime.date(2025, 1, 9))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"recurring.training": {"epoch": 2}}, "recurring.training.epoch: expected a key of `training` and a value that fits"),
        ({"recurring.training": {"epochs": 0}}, "recurring.training.epochs: expected a key of `training` and a value that fits"),
        (
            {"recurring.training": {"dense_optimizer": "sgd"}},
            "recurring.training.dense_optimizer: expected training.dense_optimizer, adam: the state is kept, got sgd.",
        ),
    ],
)  # fmt: skip
def test_invalid_incremental_trainings_are_refused(overrides, said):
    with pytest.raises(ConfigError) as refused:
        load(CONFIG, TOY | overrides)
    assert str(refused.value).startswith(said)


def test_incremental_training_is_one_plain_epoch_by_default():
    config = load(CONFIG, TOY | {"training.epochs": 5, "training.average_from_step": 9, "training.patience": 3})
    assert (config.incremental.epochs, config.incremental.average_from_step, config.incremental.patience) == (
        1,
        None,
        None,
    )
    assert (config.incremental.dense_learning_rate, config.training.dense_learning_rate) == (5.0e-4, 1.0e-3)


def course(name: str, shift: float) -> BacktestResult:
    days = [
        DaySums(day=datetime.date(2025, 1, 1 + i), rows=100, loss=50 + i + shift, labels=20 + i, predictions=22 + i)
        for i in range(6)
    ]
    trained = {day.day: 10.0 for day in days[:2]}
    return BacktestResult(
        name=name, days=days, rows_trained=trained, seconds=1.25, trainings={"incremental": 2, "scratch": 0}
    )


def test_the_table_of_policies():
    summary = summarize([course("a", 0.0), course("b", 3.0)], 0.05)
    assert summary["a"]["ne_difference"] is None
    assert summary["b"]["ne_difference"]["value"] == pytest.approx(
        summary["b"]["ne"]["value"] - summary["a"]["ne"]["value"]
    )
    assert summary["a"]["calibration"] == pytest.approx((22 * 6 + 15) / (20 * 6 + 15))
    lines = render_table(summary).splitlines()
    assert lines[0].startswith("| policy | next-day NE | interval over days | difference from a |")
    assert lines[3].endswith("| 2 incremental | 20 |")
    json.dumps(summary)


def test_the_summary_of_a_backfill_is_one_line():
    counts = {"days": 3, "days_trained": 1, "days_judged": 1, "trainings_skipped": 1}
    assert describe_backfill(counts) == "3 days; 1 trained, 1 evaluated only, 1 were done before"

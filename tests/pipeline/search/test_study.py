"""Sweeps: drawn values, resumption after a kill, early stopping, and the best trial."""

import threading

import numpy as np
import optuna
import pytest

from pipeline.search.config import PruneConfig, SweepConfig
from pipeline.search.grid import grid_points
from pipeline.search.study import Draw, SearchStudy

SPACE = {
    "training.table_learning_rate": {"low": 1e-3, "high": 1.0, "log": True},
    "model.embedding_width": {"low": 8, "high": 64, "step": 8},
    "model.bottom_mlp": {"choices": [[16], [32, 16], []]},
    "training.dense_optimizer": {"choices": ["adam", "sgd"]},
}
RATE = "training.table_learning_rate"


def config(strategy: str = "tpe", **more) -> SweepConfig:
    return SweepConfig(**{"strategy": strategy, "trials": 6, "startup_trials": 3, "space": SPACE} | more)


def ne(draw: Draw) -> float:
    """A bowl: the best rate is 0.1, and adam is better."""
    return (
        0.8 + 0.01 * np.log10(draw.params[RATE] / 0.1) ** 2 + 0.05 * (draw.params["training.dense_optimizer"] == "sgd")
    )


def run(study: SearchStudy, trials: int = 99) -> list[dict]:
    """Runs trials until there are enough, and returns their values."""
    drawn: list[dict] = []
    while len(drawn) < trials and (draw := study.next()) is not None:
        drawn.append(dict(draw.params))
        study.finish(draw.number, ne(draw))
    return drawn


GRID = {"a": {"choices": ["x", "y"]}, RATE: {"low": 0.01, "high": 1.0, "log": True, "points": 3}}


@pytest.mark.parametrize("strategy", ["tpe", "random"])
def test_the_same_seed_gives_the_same_trials(strategy, tmp_path):
    first = run(SearchStudy(tmp_path / "a.db", config(strategy), {}))
    assert len(first) == 6
    assert run(SearchStudy(tmp_path / "b.db", config(strategy), {})) == first
    assert run(SearchStudy(tmp_path / "c.db", config(strategy, seed=2), {})) != first
    for params in first:
        assert all(config().space[key].holds(value) for key, value in params.items())


@pytest.mark.parametrize(("strategy", "trials"), [("tpe", 6), ("gp", 5)])
def test_a_killed_sweep_resumes_with_the_trials_it_would_have_had(strategy, trials, tmp_path):
    """A kill leaves trials RUNNING. Each resumes with its number and values, and the others are unchanged."""
    settings, killed = config(strategy, trials=trials), trials - 2
    undisturbed = run(SearchStudy(tmp_path / "a.db", settings, {}))
    study = SearchStudy(tmp_path / "b.db", settings, {})
    assert run(study, killed) == undisturbed[:killed]
    interrupted = study.next()
    again = SearchStudy(tmp_path / "b.db", settings, {})
    assert [record.state for record in again.records()] == ["complete"] * killed + ["running"]
    assert again.next() == interrupted == Draw(number=killed, params=undisturbed[killed])
    again.finish(killed, ne(interrupted))
    assert run(again) == undisturbed[killed + 1 :]
    assert (
        again.best.params == min((ne(Draw(number=0, params=params)), str(params), params) for params in undisturbed)[2]
    )


def test_a_kill_while_a_trial_is_drawn(tmp_path, monkeypatch):
    """The kill comes between the creation of a trial and the last of its values."""
    undisturbed = run(SearchStudy(tmp_path / "a.db", config("random"), {}))
    study = SearchStudy(tmp_path / "b.db", config("random"), {})
    run(study, 2)
    suggest = optuna.trial.Trial._suggest

    def killed(trial, name, kind):
        if name == "model.bottom_mlp":
            raise SystemExit
        return suggest(trial, name, kind)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.trial.Trial, "_suggest", killed)
        with pytest.raises(SystemExit):
            study.next()
    assert run(SearchStudy(tmp_path / "b.db", config("random"), {})) == undisturbed[2:]


def test_a_failed_trial_changes_no_other(tmp_path):
    study = SearchStudy(tmp_path / "a.db", config("random"), {})
    undisturbed = run(SearchStudy(tmp_path / "b.db", config("random"), {}))
    for number in range(6):
        draw = study.next()
        assert draw.params == undisturbed[number]
        study.fail(number, "broken") if number == 4 else study.finish(number, ne(draw))
    assert study.next() is None
    states = [record.state for record in study.records()]
    assert states == ["complete"] * 4 + ["failed"] + ["complete"]
    assert study.records()[4].notes == {"error": "broken"}
    assert SearchStudy(tmp_path / "a.db", config("random"), {}).next() is None  # a failed one is not tried again


def test_more_trials_extend_a_sweep(tmp_path):
    first = run(SearchStudy(tmp_path / "a.db", config(trials=4), {}))
    assert first + run(SearchStudy(tmp_path / "a.db", config(), {})) == run(
        SearchStudy(tmp_path / "b.db", config(), {})
    )


def test_threads_draw_each_number_once(tmp_path):
    study, drawn = SearchStudy(tmp_path / "a.db", config("random", trials=8), {}), []

    def work() -> None:
        while (draw := study.next()) is not None:
            drawn.append(draw)
            study.report(draw.number, 1, 0.5)
            study.finish(draw.number, ne(draw))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = run(SearchStudy(tmp_path / "b.db", config("random", trials=8), {}))
    assert [draw.params for draw in sorted(drawn, key=lambda draw: draw.number)] == alone


def test_a_grid_takes_each_combination_once(tmp_path):
    grid = SweepConfig(strategy="grid", space=GRID, trials=50)
    study, drawn = SearchStudy(tmp_path / "a.db", grid, {"a": "x"}), []
    for number in range(6):
        if number == 3:
            study = SearchStudy(tmp_path / "a.db", grid, {})
        draw = study.next()
        drawn.append(dict(draw.params))
        study.finish(draw.number, 0.5)
    assert drawn == grid_points(grid)
    assert study.next() is None


def test_the_first_trial_has_the_configs_own_values(tmp_path):
    own = {RATE: 0.05, "training.dense_optimizer": "sgd"}
    first = SearchStudy(tmp_path / "a.db", config(), own).next()
    assert {key: first.params[key] for key in own} == own
    drawn = SearchStudy(tmp_path / "b.db", config(begin_with_config=False), own).next()
    assert drawn.params[RATE] != 0.05


def pruned(study: SearchStudy, curves: list[list[float]]) -> list[int | None]:
    """Returns the comparison at which each trial was stopped. There is one every 100 rows."""
    found = []
    for curve in curves:
        draw = study.next()
        stop = next((i for i, value in enumerate(curve, 1) if study.report(draw.number, 100 * i, value)), None)
        study.finish(draw.number, curve[-1]) if stop is None else study.prune(draw.number)
        found.append(stop)
    return found


def test_a_trial_worse_than_the_median_is_stopped(tmp_path):
    prune = PruneConfig(every_rows=100, startup_trials=2, warmup_rows=150)
    study = SearchStudy(tmp_path / "a.db", config(prune=prune), {})
    curves = [[0.9, 0.85, 0.8], [0.92, 0.87, 0.82], [0.99, 0.98, 0.97], [0.91, 0.84, 0.8]]
    assert pruned(study, curves) == [None, None, 2, None]
    assert [record.state for record in study.records()] == ["complete", "complete", "pruned", "complete"]
    assert study.records()[2].valid_ne is None
    assert study.best.number == 0


def test_halving_keeps_the_best(tmp_path):
    prune = PruneConfig(method="halving", every_rows=100, reduction_factor=2)
    study = SearchStudy(tmp_path / "a.db", config(prune=prune), {})
    assert pruned(study, [[0.8, 0.7], [0.9, 0.9], [0.75, 0.7]]) == [None, 1, None]


def test_a_comparison_counts_once_and_is_repeated_after_a_kill(tmp_path):
    prune = config(prune=PruneConfig(every_rows=100, startup_trials=1))
    study = SearchStudy(tmp_path / "a.db", prune, {})
    assert pruned(study, [[0.8, 0.7]]) == [None]
    draw = study.next()
    assert study.report(draw.number, 50, 2.0) is False  # no comparison yet
    assert study.report(draw.number, 130, 0.9) is True
    again = SearchStudy(tmp_path / "a.db", prune, {})
    assert again.next() == draw
    assert again.falls_behind(draw.number)
    assert again.report(draw.number, 199, 0.1) is False


def test_a_trial_of_the_same_values_is_found(tmp_path):
    study = SearchStudy(tmp_path / "a.db", config("random"), {})
    draw = study.next()
    assert study.twin(draw) is None
    study.finish(draw.number, 0.5)
    assert study.twin(Draw(number=7, params=draw.params)).number == 0


def test_the_key_that_matters_is_the_most_important(tmp_path):
    study = SearchStudy(tmp_path / "a.db", config("random", trials=16), {})
    run(study, 3)
    assert study.importances() == {}
    run(study)
    shares = study.importances()
    assert shares.keys() == SPACE.keys()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["training.dense_optimizer"] > shares["model.bottom_mlp"]


def leader_study(path, **more) -> tuple[SearchStudy, list[Draw]]:
    """Starts three trials in a given order."""
    prune = PruneConfig(method="leader", every_rows=100, **more)
    settings = SweepConfig(strategy="grid", space={"a": {"choices": ["x", "y", "z"]}}, prune=prune)
    study = SearchStudy(path / "leader.db", settings, {}, [{"a": name} for name in "zxy"])
    draws = iter(study.next, None)
    return study, [next(draws) for _ in range(3)]


def test_a_grid_can_have_its_order_given(tmp_path):
    study, draws = leader_study(tmp_path)
    assert [draw.params["a"] for draw in draws] == ["z", "x", "y"]
    assert study.next() is None


def test_the_leader_stops_those_that_fall_behind_after_as_many_rows(tmp_path):
    study, (first, second, third) = leader_study(tmp_path, tolerance=0.1, warmup_rows=200)
    ahead, behind, slow = first.number, second.number, third.number
    assert not study.report(behind, 100, 2.0)  # the first to report
    assert not study.report(ahead, 100, 1.0)
    assert not study.report(behind, 150, 9.0)  # the same comparison
    assert not study.report(behind, 200, 2.0)  # no other trial has reported after 200 rows
    assert not study.report(ahead, 200, 1.0)
    assert study.report(behind, 300, 1.0)  # too late: after 200 it was behind
    study.prune(behind)
    study.finish(ahead, 1.0)
    assert not study.report(slow, 200, 1.1)  # within the tolerance
    assert not study.report(slow, 300, 1.0)


def test_a_trial_that_was_stopped_or_failed_stops_no_other(tmp_path):
    study, draws = leader_study(tmp_path)
    one, other, last = (draw.number for draw in draws)
    for number in (one, other):
        study.report(number, 100, 0.5)
    study.prune(one)
    study.fail(other, "lost")
    assert not study.report(last, 100, 0.9)
    assert not study.falls_behind(last)


def test_a_trial_chosen_to_stop_stops_no_other(tmp_path):
    """Two trials are each behind the other at one comparison. The second reports before the first has ended."""
    study, draws = leader_study(tmp_path)
    one, other, _ = (draw.number for draw in draws)
    study.report(one, 100, 1.0)
    assert study.report(other, 100, 2.0)
    study.report(other, 200, 0.5)
    assert not study.report(one, 200, 1.0)
    assert not study.falls_behind(one)
    assert study.falls_behind(other)


def test_halving_remembers_its_decision_after_a_kill(tmp_path):
    settings = config(prune=PruneConfig(method="halving", every_rows=100, reduction_factor=2))
    study = SearchStudy(tmp_path / "a.db", settings, {})
    assert pruned(study, [[0.8, 0.7]]) == [None]
    draw = study.next()
    assert study.report(draw.number, 100, 0.9)
    again = SearchStudy(tmp_path / "a.db", settings, {})  # killed before it was stopped
    assert again.next() == draw
    assert again.falls_behind(draw.number)

"""Sweeps: what is refused, what they write, and what survives kills and crashes."""

import json
import os
from pathlib import Path

import psutil
import pytest

from flows.sweep import sweep
from pipeline.config import load
from pipeline.errors import ConfigError, StorageError, TrainingError
from pipeline.jobs.search import sweep as sweep_job
from pipeline.jobs.search.trials import Search, SearchJob, StoppedEarly, Trials, pin_trial
from pipeline.jobs.workspace import Workspace
from pipeline.search.config import SweepConfig
from pipeline.search.study import Draw, SearchStudy, TrialRecord
from tests.commands import killed, wait_for
from tests.homes import CONFIG, open_smoke

RATE, STEPS = "training.table_learning_rate", "training.max_steps"
LIGHT = {"training.world_size": 1, "preprocessing.executor": "inline", "training.threads_per_rank": 1}
"""One process makes a trial a matter of seconds."""
SPACE = {RATE: {"low": 0.01, "high": 0.2, "log": True}, STEPS: {"choices": [15, 10_000]}}
"""There are rows for 20 steps. A trial with more steps fails at its end."""
SEED = 10
"""Gives two trials that succeed and one that fails."""


def swept(**more) -> dict:
    return {"sweep": SweepConfig(space=SPACE, strategy="random", trials=3, begin_with_config=False, **more)}


def snapshot_of(smoke: dict) -> dict:
    return {"table": "smoke", "snapshot_id": smoke["snapshot_id"]}


def record(params: dict, ne: float = 0.9) -> TrialRecord:
    return TrialRecord(number=7, state="complete", params=params, valid_ne=ne, seconds=1.0, notes={})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"sweep.space": {}},
            "sweep.space: expected at least one key with its values, got none. Add one: `training.table_learning_rate: "
            "{low: .01, ...}`.",
        ),
        (
            {"sweep.space": {"split.days.valid": {"choices": [["2025-01-08"]]}}},
            "sweep.space, key 'split.days.valid': expected a key of seed, sampling, features, model, training, "
            "preprocessing, got another. Leave it out.",
        ),
        (
            {"sweep.space": {"training.threads_per_rank": {"low": 1, "high": 2}}},
            "sweep.space 'training.threads_per_rank': expected a key that changes what is learned, got none. "
            "Leave it out.",
        ),
        (
            {"sweep.space": {"training.epoch": {"low": 1, "high": 2}}},
            "sweep.space, key 'training.epoch': expected a known key, got 'epoch'. Did you mean 'epochs'?",
        ),
        (
            {"sweep.space": {"training.epochs": {"low": 0, "high": 2}}},
            "sweep.space, key 'training.epochs': expected greater than 0, got 0. Correct the value.",
        ),
        (
            {"sweep.space": {"features.label": {"choices": ["label", "dense_price"]}}},
            "sweep.space, features.label: expected the label by which all are ranked, 'label', got 'dense_price'. "
            "Leave it out.",
        ),
        (
            {"sweep.trial_overrides": {"split.days.valid": ["2025-01-09"]}},
            "sweep.trial_overrides, key 'split.days.valid': expected a key of seed, sampling, features, model, "
            "training, preprocessing, got another. Leave it out.",
        ),
        (
            {
                "sweep.space": {RATE: {"low": 0.1, "high": 0.2}},
                "sweep.parallel": 2,
                "sweep.trial_overrides": {"training.launcher": "ray", "preprocessing.executor": "inline"},
            },
            "sweep.parallel: expected 1 with Ray: a process has one connection to it, got 2. Set it to 1.",
        ),
        (
            {"sweep.trial_overrides": {"training.deadline": 9}},
            "sweep.trial_overrides, key 'training.deadline': expected a known key, got 'deadline'. Did you mean 'deadline_seconds'?",
        ),
    ],
)
def test_invalid_searches_are_refused(overrides, said):
    with pytest.raises(ConfigError) as error:
        sweep_job.check_space(load(CONFIG, overrides))
    assert str(error.value) == said


def test_trials_need_validation_rows(at_home):
    with pytest.raises(ConfigError) as error:
        sweep_job.pin_sweep(open_smoke({"split.days.valid": []}), None, False)
    assert str(error.value) == (
        "split: expected validation rows, by which trials are ranked, got none. Name some as `valid`."
    )


def test_the_sweep_section_is_not_part_of_a_trainings_identity():
    plain = load(CONFIG, {"sweep": {}})
    assert plain.sweep != load(CONFIG).sweep
    assert plain.semantics() == load(CONFIG).semantics()


def test_the_same_sweep_has_the_same_folder_until_forced(smoke, copied):
    config = load(CONFIG)
    first = sweep_job.pin_sweep(Workspace(config), None, False)
    assert sweep_job.pin_sweep(open_smoke({"sweep.trials": 99, "sweep.parallel": 2}), None, True) == first
    assert sweep_job.pin_sweep(open_smoke({"sweep.seed": 2}), None, False).identity != first.identity
    folder = Path(first.folder)
    folder.mkdir(parents=True)
    assert sweep_job.pin_sweep(Workspace(config), None, True) == first  # unfinished, so it resumes
    (folder / "result.json").write_text("{}")
    second = sweep_job.pin_sweep(Workspace(config), None, True)
    assert (folder.name[:-1], Path(second.folder).name) == (Path(second.folder).name[:-1], f"{folder.name[:-1]}1")
    assert sweep_job.pin_sweep(Workspace(config), None, False) == first


def test_own_values_must_be_in_the_search_space():
    space = {
        RATE: {"low": 0.01, "high": 0.2},
        "training.dense_learning_rate": {"low": 0.5, "high": 1.0},
        "model.bottom_mlp": {"choices": [[16], [8]]},
        "features.sparse.0.transforms.0.size": {"choices": [100_000, 10]},
        "training.table_learning_rates.cat_user": {"low": 0.1, "high": 1.0},
    }
    assert sweep_job.read_own_values(load(CONFIG, {"sweep.space": space})) == {
        RATE: 0.05, "model.bottom_mlp": [16], "features.sparse.0.transforms.0.size": 100_000,
    }  # fmt: skip


def test_the_best_config_is_a_file_that_loads_to_its_trial(smoke, copied):
    """A list with a searched key is written whole, because a file's list replaces its base's list."""
    space = {RATE: {"low": 0.01, "high": 0.2}, "features.sparse.1.transforms.0.limit": {"low": 1, "high": 9}}
    config = load(CONFIG, {"sweep.space": space, "sweep.trial_overrides": {STEPS: 3}, "seed": 4})
    job = sweep_job.pin_sweep(Workspace(config), None, False)
    params = {RATE: 0.0123, "features.sparse.1.transforms.0.limit": 7}
    Path(job.folder).mkdir(parents=True)
    work = Search(Workspace(config), job, "sweep", "none")
    path = sweep_job.write_best(work, record(params))
    found = load(path)
    assert found == load(CONFIG, {**params, "seed": 4, "sweep": {}})
    assert found.features.sparse[1].transforms[0].limit == 7
    assert sweep_job.make_config(work, params) == load(found, {STEPS: 3})
    assert path.read_text().startswith(f"# Trial 7 of sweep {job.name}: NE 0.9000 on the validation rows.\nbase: ")


def test_trials_share_a_fitted_plan_if_they_can(smoke, copied):
    config = load(CONFIG)
    search = SearchJob(identity="x", folder=str(copied), snapshot=snapshot_of(smoke))
    jobs = [
        pin_trial(Workspace(load(config, {key: value})), search, copied / f"{number}")
        for number, (key, value) in enumerate(
            [(RATE, 0.1), ("model.embedding_width", 4), ("features.sparse.1.transforms.0.limit", 3)]
        )
    ]
    assert len(list(copied.glob("plans/smoke/*.json"))) == 2
    assert jobs[0].plan.hash == jobs[1].plan.hash != jobs[2].plan.hash
    for job in jobs:
        assert set(job.data) == {"train", "valid"}  # no plan is fitted on the test rows
        assert tuple(spec.selection.days for spec in job.data.values()) == tuple(
            spec.selection.days for spec in jobs[0].data.values()
        )


def test_the_printed_table():
    records = [record({RATE: 0.5, "model.bottom_mlp": [8]}), record({RATE: 0.25, "model.bottom_mlp": [16]}, 0.8)]
    assert sweep_job.render_table(records, [RATE, "model.bottom_mlp"]) == (
        f"| trial | NE | `{RATE}` | `model.bottom_mlp` |\n|---|---|---|---|\n"
        "| 7 | 0.8000 | 0.25 | [16] |\n| 7 | 0.9000 | 0.5 | [8] |"
    )


def expected(folder: Path, config: SweepConfig) -> list[dict]:
    """Returns the values of the trials, which depend only on the sweep's seed."""
    study = SearchStudy(folder / "expected.db", config, {})
    return [dict(study.next().params) for _ in range(config.trials)]


def ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=15)
    return not alive


@pytest.mark.slow
def test_a_killed_sweep_resumes_and_finds_the_same_best(smoke, command, copied, prefect):
    """The sweep is killed in its second trial, and the third fails. It agrees with an undisturbed sweep, two at a time."""
    settings = swept(seed=SEED)["sweep"]
    params = expected(copied, settings)
    assert [trial[STEPS] for trial in params] == [15, 15, 10_000]
    words = [f"{key}={value}" for key, value in LIGHT.items()] + ["training.checkpoint_every_steps=5"]
    words += [f"sweep={settings.model_dump_json(exclude_defaults=True)}"]
    sweeps = copied / "sweeps"
    environment, log = os.environ | {"PREFECT_API_URL": prefect}, copied / "sweep.log"
    with killed("sweep", CONFIG, *words, environment=environment, log=log) as process:
        wait_for(lambda: list(sweeps.glob("*/trials/0001/checkpoints/step-*")), process, log)
        family = psutil.Process(process.pid).children(recursive=True)
    assert ended(family)
    [folder] = sweeps.iterdir()
    tracker = open_smoke().tracking
    before = {run.data.tags["dlrm.trial"]: run for run in children(tracker, (folder / "mlflow_run_id").read_text())}
    assert {number: run.info.status for number, run in before.items()} == {"0": "FINISHED", "1": "RUNNING"}

    code, result, log = command(sweep, CONFIG, *words, home=copied)
    assert code == 0, log
    assert result["trials"] == {"complete": 2, "failed": 1}
    trials = trials_of(tracker, result)
    assert [trial["params"] for trial in trials] == params
    assert trials[2]["notes"]["error"] == (
        "training.max_steps: expected 10000 steps, got rows for 20. Raise epochs, or lower max_steps."
    )
    after = {run.data.tags["dlrm.trial"]: run for run in children(tracker, result["mlflow_run_id"])}
    assert {number: run.info.status for number, run in after.items()} == {
        "0": "FINISHED", "1": "FINISHED", "2": "FAILED",
    }  # fmt: skip
    assert after["0"].info.end_time == before["0"].info.end_time  # finished trials are not repeated
    assert after["1"].info.run_id == before["1"].info.run_id
    assert not list(folder.glob("trials/*/checkpoints"))
    assert tracker.client.get_run(result["mlflow_run_id"]).info.status == "FINISHED"
    plots = {item.path for item in tracker.client.list_artifacts(result["mlflow_run_id"], "plots")}
    assert plots == {f"plots/{name}.svg" for name in ("history", "importance", "parallel_coordinates")}
    assert load(result["config_path"]) == load(load(CONFIG, LIGHT | {"training.checkpoint_every_steps": 5}), result["best"]["params"] | {"sweep": {}})  # fmt: skip
    identity = folder.name.split("-")[1]
    tags = [tag for tag in open_smoke().warehouse.table("smoke").refs() if identity in tag]
    assert tags == [f"train-{identity}-{smoke['snapshot_id']}"]  # one plan for all trials

    code, same, _ = command(sweep, CONFIG, *words, home=copied)
    assert (code, same) == (0, result | {"status": "skipped"})

    code, other, log = command(sweep, CONFIG, *words, "sweep.parallel=2", "force=true", home=copied)
    assert code == 0, log
    assert other["study"] != result["study"]
    assert other["best"] == result["best"]
    kept = ("number", "params", "state", "valid_ne")
    assert [[trial[key] for key in kept] for trial in trials_of(tracker, other)] == [
        [trial[key] for key in kept] for trial in trials
    ]


def children(tracker, parent: str) -> list:
    return tracker.client.search_runs([tracker.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.strip()}'")


def trials_of(tracker, result: dict) -> list[dict]:
    return tracker.read_json(result["mlflow_run_id"], "trials.json")


@pytest.mark.nightly
def test_a_candidate_stopped_early_ends_at_once_and_can_resume(smoke, copied):
    config = load(CONFIG, LIGHT | {"training.checkpoint_every_steps": 5})
    job = SearchJob(identity="x" * 32, folder=str(copied), snapshot=snapshot_of(smoke))
    study = SearchStudy(copied / "study.db", SweepConfig(space=SPACE, trials=1), {})
    draw, tracker = study.next(), Workspace(config).tracking
    trials = Trials(
        Search(Workspace(config), job, "sweep", "none"), study, copied, lambda params: config,
        lambda draw: ("candidate", {}), lambda record: None,
    )  # fmt: skip

    def watch(number, event) -> None:
        if event is not None and event["event"] == "saved":
            raise StoppedEarly

    trials.watch = watch  # type: ignore[method-assign]
    trials.train(draw)
    [stopped] = study.records()
    assert (stopped.state, stopped.valid_ne) == ("pruned", None)
    run = tracker.client.get_run(stopped.notes["mlflow_run_id"])
    assert (run.info.status, run.data.tags["dlrm.stopped_early"]) == ("FINISHED", "true")
    ours = [process.name() for process in psutil.Process().children(recursive=True)]
    assert not [name for name in ours if name.startswith("dlrm rank")]
    trials.study = SearchStudy(copied / "again.db", SweepConfig(space=SPACE, trials=1), {})
    del trials.watch
    trials.train(trials.study.next())
    [again] = trials.study.records()
    assert again.notes["mlflow_run_id"] == stopped.notes["mlflow_run_id"]
    trained = json.loads((trials.trial_folder(0) / "trained.json").read_text())
    assert trained["summary"]["valid_ne"] == again.valid_ne
    assert tracker.client.get_run(run.info.run_id).data.metrics["best_valid_ne"] == again.valid_ne


def failing(tmp_path: Path, errors: list[Exception | None]) -> Trials:
    """The trials of one study. Each raises the next error or has an NE."""
    settings = SweepConfig(space=SPACE, strategy="random", trials=len(errors))
    job = SearchJob(identity="x", folder=str(tmp_path), snapshot={"table": "smoke", "snapshot_id": 1})
    study = SearchStudy(tmp_path / "study.db", settings, {})

    def make_config(params):
        raise AssertionError("not trained")

    trials = Trials(
        Search(open_smoke(), job, "sweep", "none"), study, tmp_path, make_config,
        lambda draw: (f"trial {draw.number}", {}), lambda record: None,
    )  # fmt: skip

    def train(draw: Draw) -> None:
        error = errors[draw.number]
        if error is not None:
            raise error
        study.finish(draw.number, 0.9)

    trials.train = train  # type: ignore[method-assign]
    return trials


@pytest.mark.parametrize(
    "error", [StorageError("table", "an answer", "none", "Wait."), OSError(28, "No space left on device")]
)
def test_an_error_outside_a_trial_does_not_fail_it(error, tmp_path):
    trials = failing(tmp_path, [None, error, None])
    with pytest.raises(type(error)):
        trials.run_all(1)
    assert [record.state for record in trials.study.records()] == ["complete", "running"]


def test_three_failures_in_a_row_end_the_search(tmp_path):
    wrong = ValueError("no such file.")
    trials = failing(tmp_path, [wrong, wrong, None, wrong, wrong, wrong, None])
    with pytest.raises(TrainingError) as error:
        trials.run_all(1)
    assert str(error.value) == (
        "trials: expected one of three in a row that ends with an NE, got three failures; the last: ValueError: no "
        "such file. Correct that, and run the same command again to run the other 1. To start over, remove "
        f"'{tmp_path}'."
    )
    trials.stop.clear()
    trials.run_all(1)
    assert [record.state for record in trials.study.records()][5:] == ["failed", "complete"]


def test_a_sweep_without_its_best_config_is_not_finished(tmp_path):
    job = SearchJob(identity="x", folder=str(tmp_path), snapshot={"table": "smoke", "snapshot_id": 1})
    result = {"trials": {"complete": 20}, "config_path": str(tmp_path / "best.yaml")}
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert sweep_job.load_result(open_smoke(), job) is None
    (tmp_path / "best.yaml").touch()
    assert sweep_job.load_result(open_smoke(), job) == result | {"status": "skipped"}


def test_an_interrupt_ends_all_trials(tmp_path):
    trials = failing(tmp_path, [None])
    trials.watch(0, None)
    trials.stop.set()
    with pytest.raises(KeyboardInterrupt):
        trials.watch(0, None)

"""Release trains: refusals, the choice of candidates, and a full run with a failed and a stopped candidate."""

import json
from pathlib import Path

import pytest

from flows.release import release
from flows.replay import replay
from pipeline.config import load
from pipeline.errors import ConfigError, EmptyDatasetError
from pipeline.jobs.search import release as releasing
from pipeline.jobs.search.release import CandidateStanding
from pipeline.jobs.search.trials import SearchJob, find_unfinished
from pipeline.jobs.workspace import Workspace
from pipeline.search.config import ReleaseConfig
from tests.homes import CONFIG, open_smoke

RATE, STEPS = "training.table_learning_rate", "training.max_steps"
SAMPLE = {"inputs": ["cat_user"], "rate": 0.5}
LIGHT = {"training.world_size": 1, "preprocessing.executor": "inline", "training.threads_per_rank": 1}
"""One process makes a candidate a matter of seconds."""


def settings(**more):
    return load(CONFIG, {"release": {"candidates": {"slow": {RATE: 0.02}}, "sample": SAMPLE} | more})


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"candidates": {}},
            "release.candidates: expected at least one besides the config itself, got none. "
            "Add one: `deep: {model.top_mlp: [128, 64, 32]}`.",
        ),
        (
            {"candidates": {"long": {"training.epoch": 2}}},
            "release.candidates 'long', key 'training.epoch': expected a known key, got 'epoch'. "
            "Did you mean 'epochs'?",
        ),
        (
            {"candidates": {"late": {"split.days.train": ["2025-01-07"]}}},
            "release.candidates 'late', key 'split.days.train': expected a key of seed, sampling, features, model, "
            "training, preprocessing, got another. Leave it out.",
        ),
        (
            {"candidates": {"other": {"features.label": "dense_price"}}},
            "release.candidates 'other', features.label: expected the label by which all are ranked, 'label', "
            "got 'dense_price'. Leave it out.",
        ),
        (
            {"explore": {"split.days.valid": ["2025-01-09"]}},
            "release.explore, key 'split.days.valid': expected a key of seed, sampling, features, model, training, "
            "preprocessing, got another. Leave it out.",
        ),
        (
            {"parallel": 2, "candidates": {"far": {"seed": 2, "preprocessing.executor": "ray"}}},
            "release.parallel: expected 1 with Ray: a process has one connection to it, got 2. Set it to 1.",
        ),
        (
            {"candidates": {"same": {"training.threads_per_rank": 2}}},
            "release.candidates 'same': expected a training unlike the others, got that of 'base'. "
            "Leave one of them out.",
        ),
        (
            {"sample": {}},
            "release.sample.inputs: expected key columns of the rows to explore on, got none. "
            "Name some, such as the user's.",
        ),
        (
            {"explore": {"training.steps": 2}},
            "release.explore, key 'training.steps': expected a known key, got 'steps'. Did you mean 'max_steps'?",
        ),
        (
            {"fresh": {"training.epochs": 0}},
            "release.fresh, key 'training.epochs': expected greater than 0, got 0. Correct the value.",
        ),
    ],
)
def test_invalid_releases_are_refused(section, said):
    with pytest.raises(ConfigError) as error:
        releasing.load_candidates(settings(**section))
    assert str(error.value) == said


def test_all_candidates_are_checked_against_the_table(at_home):

    def said(**more):
        with pytest.raises((ConfigError, EmptyDatasetError)) as error:
            releasing.pin_release(Workspace(settings(**more)), None, False)
        return str(error.value)

    unknown = {"less": {"sampling": {"inputs": ["cat_usr"], "rate": 0.5}}}
    assert said(candidates=unknown).startswith("release.candidates 'less', sampling.inputs")
    assert said(fresh={"split.days.train": ["2025-02-01"]}).startswith(
        "release.fresh, split.days.train '2025-02-01': expected days of the table, 2025-01-06 to 2025-01-09"
    )
    fresh = {"split.days": {"train": ["2025-01-06"], "valid": ["2025-01-07"], "test": ["2025-01-08"]}}
    assert said(fresh=fresh) == (
        "release.fresh: expected test rows that no candidate was trained on or ranked by, got rows of split's "
        "`valid`. Choose other test rows."
    )
    learned = {"split.days": {"train": ["2025-01-07"], "valid": ["2025-01-08"], "test": ["2025-01-06"]}}
    assert said(fresh=learned).endswith("got rows of split's `train`. Choose other test rows.")


def test_the_same_release_has_the_same_folder_until_forced(smoke, copied):
    first = releasing.pin_release(Workspace(settings()), None, False)
    assert releasing.pin_release(Workspace(settings(parallel=2)), None, True) == first
    assert releasing.pin_release(Workspace(settings(keep=1)), None, False).identity != first.identity
    folder = Path(first.folder)
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"status": "failed"}')
    assert releasing.load_result(Workspace(settings()), first) is None
    assert releasing.pin_release(Workspace(settings()), None, True).folder == f"{folder}"[:-1] + "1"


def test_another_model_or_gate_is_another_release(smoke, copied):
    first = releasing.pin_release(Workspace(settings()), None, False)
    for more in ({"registration.model_name": "other"}, {"gate.rule": "not_worse"}):
        assert releasing.pin_release(Workspace(load(settings(), more)), None, False).identity != first.identity


def test_a_release_without_its_version_is_not_finished(smoke, copied):
    job = SearchJob(identity="x", folder=str(copied), snapshot={"table": "smoke", "snapshot_id": 1})
    result = {"status": "ok", "model": smoke["model"], "model_run_id": smoke["mlflow_run_id"]}
    (copied / "result.json").write_text(json.dumps(result))
    assert releasing.load_result(Workspace(settings()), job) == result | {"status": "skipped"}
    (copied / "result.json").write_text(json.dumps(result | {"model": smoke["model"] | {"version": 10_000}}))
    assert releasing.load_result(Workspace(settings()), job) is None


def test_an_unfinished_search_on_another_snapshot_is_found(tmp_path):
    def job(name, snapshot_id, inputs="same"):
        folder = tmp_path / name
        made = SearchJob(identity=name, folder=str(folder), snapshot={"table": "t", "snapshot_id": snapshot_id}, inputs=inputs)  # fmt: skip
        folder.mkdir()
        (folder / "search.json").write_text(made.model_dump_json())
        return made

    old, ended, _, new = job("old", 1), job("ended", 2), job("other", 3, "other"), job("new", 4)
    (Path(ended.folder) / "result.json").write_text("{}")
    assert find_unfinished(new) == [old]


def test_the_release_section_is_not_part_of_a_trainings_identity():
    assert settings().semantics() == load(CONFIG).semantics()


def test_the_demo_has_candidates():
    assert list(releasing.load_candidates(load("configs/demo.yaml"))) == ["base", "wide", "cross"]


def test_a_candidate_is_explored_on_a_sample_of_its_own_rows():
    config = settings(explore={STEPS: 5}, fresh={"seed": 7})
    own = {"inputs": ["cat_item"], "rate": 0.4, "seed": 3}
    sampled = releasing.shrink(load(CONFIG, {"sampling": own}), config.release)
    assert sampled.sampling.model_dump() == {"kind": "sampling", "inputs": ("cat_item",), "rate": 0.2, "seed": 3}
    plain = releasing.shrink(load(CONFIG), config.release)
    assert plain.sampling.model_dump() == {"kind": "sampling", "inputs": ("cat_user",), "rate": 0.5, "seed": 0}
    assert (plain.training.max_steps, plain.seed) == (5, 1)
    assert releasing.freshen(load(CONFIG), config.release) == load(CONFIG, {"seed": 7})


def test_the_printed_table():
    stages = {
        "explore": [CandidateStanding(name="b", valid_ne=0.8), CandidateStanding(name="base", valid_ne=0.9), CandidateStanding(name="c", failed="no")],
        "compare": [CandidateStanding(name="base", valid_ne=0.85), CandidateStanding(name="b", stopped=True)],
    }  # fmt: skip
    assert releasing.render_table(stages, {"b": {RATE: 0.5}, "c": {"model.dropout": 0.1, "seed": 2}}) == (
        "| candidate | explore | compare | differs in |\n|---|---|---|---|\n"
        "| base | 0.9000 | 0.8500 | nothing |\n"
        "| b | 0.8000 | stopped | training.table_learning_rate=0.5 |\n"
        "| c | failed |  | model.dropout=0.1, seed=2 |"
    )


@pytest.mark.nightly
def test_a_release_with_a_failed_and_a_stopped_candidate(smoke, command, copied):
    """`broken` has too few rows for its steps. `wild` has far too high a learning rate."""
    section = ReleaseConfig(
        candidates={"broken": {STEPS: 10_000}, "wild": {RATE: 5.0, "training.dense_learning_rate": 0.3}},
        sample=SAMPLE,
        prune={"every_rows": 2_560},
        fresh={"split.days.train": ["2025-01-07"]},
    )
    words = [f"{key}={value}" for key, value in LIGHT.items()]
    words += [f"release={section.model_dump_json(exclude_defaults=True)}"]
    code, result, log = command(release, CONFIG, *words, home=copied)
    assert code == 0, log
    explored, compared, [last] = result["stages"].values()
    assert [one["name"] for one in explored] == ["base", "wild", "broken"]
    assert explored[0]["valid_ne"] < explored[1]["valid_ne"]
    assert explored[2]["failed"].startswith("training.max_steps: expected 10000 steps, got rows for ")
    assert [(one["name"], one["stopped"]) for one in compared] == [("base", False), ("wild", True)]
    assert (result["winner"], last["name"], result["status"]) == ("base", "base", "ok")
    assert result["gate"]["decision"] in ("promote", "hold", "reject")

    tracker = open_smoke().tracking
    children = tracker.client.search_runs(
        [tracker.experiment_id], f"tags.`mlflow.parentRunId` = '{result['mlflow_run_id']}'"
    )
    stages = {(run.data.tags["dlrm.stage"], run.data.tags["dlrm.candidate"]): run for run in children}
    assert {key: run.info.status for key, run in stages.items()} == {
        ("explore", "base"): "FINISHED", ("explore", "broken"): "FAILED", ("explore", "wild"): "FINISHED",
        ("compare", "base"): "FINISHED", ("compare", "wild"): "FINISHED", ("retrain", "base"): "FINISHED",
    }  # fmt: skip
    model = result["model"]
    version = tracker.get_version(model["name"], str(model["version"]))
    assert version.run_id == result["model_run_id"] == stages["retrain", "base"].info.run_id
    assert tracker.read_json(result["mlflow_run_id"], "stages.json") == result["stages"]
    [folder] = (copied / "releases").iterdir()
    assert not list(folder.rglob("checkpoints"))

    code, same, _ = command(release, CONFIG, *words, home=copied)
    assert (code, same) == (0, result | {"status": "skipped"})
    for name in ("result.json", "final.json"):  # as after a kill just before the end
        (folder / name).unlink()
    code, again, log = command(release, CONFIG, *words, home=copied)
    assert (code, again["stages"], again["model"]) == (0, result["stages"], model), log
    assert json.loads((folder / "result.json").read_text()) == again
    after = {run.info.run_id: run.info.end_time for run in tracker.client.search_runs([tracker.experiment_id])}
    assert all(after[run.info.run_id] == run.info.end_time for run in children)  # nothing was retrained

    code, replayed, log = command(replay, CONFIG, f"version={model['version']}", home=copied)
    assert (code, replayed["equal"]) == (0, True), log

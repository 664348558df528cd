"""The gate decides about a second model, and people promote or roll back afterwards."""

import shutil
from pathlib import Path

import mlflow
import pytest

from flows.promote import promote
from flows.rollback import rollback
from flows.score import score
from flows.train import train
from pipeline.config import load
from pipeline.errors import RegistryError
from pipeline.evaluation.gate import Verdict
from pipeline.inference.model import LoadedModel
from pipeline.jobs.training import evaluate
from pipeline.jobs.training.job import count_parts, resolve_job
from pipeline.jobs.training.provenance import RECORD, fetch_record
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import CHAMPION, find_holder, list_moves, move_alias
from tests.homes import CONFIG, open_smoke

LIGHT = ("training.world_size=1", "training.threads_per_rank=1", "preprocessing.executor=inline")
"""Settings for a training with one process."""


@pytest.mark.slow
def test_a_worse_model_is_rejected_and_a_better_one_promoted(smoke, home, copied, command):
    """The worse model is hardly trained. As champion, it is judged against the smoke run's."""
    words = ("training.max_steps=1", "seed=2", "evaluation.importance_rows=null", *LIGHT)
    code, worse, log = command(train, CONFIG, *words, home=copied)
    assert code == 0, log
    assert (worse["gate"]["decision"], worse["gate"]["champion"], worse["model"]["alias"]) == ("reject", 1, None)
    assert worse["gate"]["reason"].startswith("NE is higher than that of version 1, ")
    assert worse["gate"]["champion_ne"] < worse["eval"]["ne"]
    assert f"gate: reject. {worse['gate']['reason']}" in log
    metrics = open_smoke().tracking.client.get_run(worse["mlflow_run_id"]).data.metrics
    assert metrics["gate/ne_low"] > 0.0
    code, _, log = command(promote, CONFIG, f"version={worse['model']['version']}", home=copied)
    assert code == 0, log
    job, model = the_model(smoke, home)
    workspace = open_smoke()
    better = evaluate.compare_with_champion(workspace, job, model, lambda *note: None)
    assert (better.gate.decision, better.gate.champion) == ("promote", worse["model"]["version"])
    assert better.gate.champion_ne == worse["eval"]["ne"] > better.report.overall.ne == smoke["eval"]["ne"]
    assert better.gate.difference.high < 0.0
    assert evaluate.apply_verdict(workspace, 1, better.gate)[1] == "champion"
    assert find_holder(workspace.tracking, "smoke") == 1
    assert [one.version for one in list_moves(workspace.tracking, "smoke")] == [1, worse["model"]["version"], 1]
    code, back, log = command(rollback, CONFIG, home=copied)
    assert code == 0, log
    assert (back["status"], back["version"], back["previous"]) == ("ok", worse["model"]["version"], 1)
    assert find_holder(workspace.tracking, "smoke") == worse["model"]["version"]


def test_a_person_promotes(copied, command):
    code, result, log = command(promote, CONFIG, "version=1", home=copied)
    assert (code, result["status"], result["version"]) == (0, "skipped", 1), log
    tracker = open_smoke().tracking
    tracker.client.delete_registered_model_alias("smoke", CHAMPION)
    code, result, log = command(promote, CONFIG, "version=1", "reason=it is the only one", home=copied)
    assert code == 0, log
    assert (result["status"], result["model"], result["version"], result["by"]) == ("ok", "smoke", 1, "person")
    assert result["reason"] == "it is the only one"
    assert list_moves(tracker, "smoke")[-1].reason == "it is the only one"
    code, result, _ = command(promote, CONFIG, "version=999", home=copied)
    assert code == 1
    assert result["error"].startswith("model 'smoke': expected a version among 1")
    code, result, _ = command(promote, CONFIG, home=copied)
    assert (code, result["error"]) == (
        1, "argument 'version': expected the version that becomes champion, got none. Add version=N.",
    )  # fmt: skip


def counted(workspace):
    """A training that is done, with the number of its rows, as a new evaluation of it has."""
    job = resolve_job(workspace, None, False)
    return job.model_copy(update={"data": count_parts(job.data, workspace.warehouse)})


def the_model(smoke, home):
    """The smoke run's job and the folder of its model."""
    return counted(open_smoke()), home / "runs" / f"smoke-{smoke['identity'][:12]}-0" / "model"


def test_a_champion_that_cannot_score_the_rows_stays_champion(smoke, home, copied, monkeypatch):
    job, model = the_model(smoke, home)
    known = LoadedModel.__init__

    def broken(self, folder):
        known(self, folder)
        if folder != model:
            self.model.score = self.gone

    def gone(self, *tensors):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(LoadedModel, "gone", gone, raising=False)
    monkeypatch.setattr(LoadedModel, "__init__", broken)
    gate = evaluate.compare_with_champion(open_smoke(), job, model, lambda *note: None).gate
    assert (gate.decision, gate.champion) == ("hold", 1)
    assert gate.reason == "Version 1, the champion, cannot score these rows: RuntimeError: no such kernel."
    assert not list(copied.rglob("champion"))


def test_a_damaged_champion_neither_judges_nor_scores_nor_serves(smoke, home, copied, command):
    """One bit of the weights in the registry is another one."""
    job, model = the_model(smoke, home)
    tracker = open_smoke().tracking
    first = tracker.client.get_model_version("smoke", "1")
    [whole] = (home / "mlflow").glob(f"**/{first.source.rpartition('/')[2]}/artifacts")
    place = shutil.copytree(whole, copied / "damaged")
    [stored] = place.rglob("weights.safetensors")
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    tracker.client.create_model_version("smoke", place.as_uri(), first.run_id, tags=first.tags)
    move_alias(tracker, "smoke", CHAMPION, 2, "person", "")
    gate = evaluate.compare_with_champion(open_smoke(), job, model, lambda *note: None).gate
    problem = "model 'smoke', version 2: expected the files that were registered, got another weights.safetensors."
    assert (gate.decision, gate.champion) == ("hold", 2)
    assert problem in gate.reason
    code, result, _ = command(score, CONFIG, home=copied)
    assert (code, problem in result["error"]) == (1, True), result
    assert not open_smoke().warehouse.written_days("smoke_scores")
    with pytest.raises(RegistryError, match="served model: expected the files that were registered"):
        mlflow.pyfunc.load_model(str(place))


def test_a_champion_whose_alias_is_gone_is_not_replaced_unasked(smoke, home, copied):
    job, model = the_model(smoke, home)
    workspace = open_smoke()
    workspace.tracking.client.delete_registered_model_alias("smoke", CHAMPION)
    gate = evaluate.compare_with_champion(workspace, job, model, lambda *note: None).gate
    assert (gate.decision, gate.champion) == ("hold", None)
    assert gate.reason == (
        "There is no champion to compare with: version 1 was the last, and the alias 'champion' is gone. "
        "Name one: python -m flows.promote CONFIG version=N."
    )
    assert evaluate.apply_verdict(workspace, 1, gate)[1] == "challenger"
    assert find_holder(workspace.tracking, "smoke") is None


def test_a_champion_is_not_compared_on_rows_that_it_was_trained_on(smoke, home, copied):
    model = the_model(smoke, home)[1]
    days = {"train": ["2025-01-06"], "valid": ["2025-01-07"], "test": ["2025-01-08..2025-01-09"]}
    workspace = Workspace(load(CONFIG, {"split": {"days": days}}))
    found = evaluate.compare_with_champion(workspace, resolve_job(workspace, None, False), model, lambda *note: None)
    assert (found.gate.decision, found.gate.champion, found.gate.champion_ne) == ("hold", 1, None)
    assert found.gate.reason == (
        "Version 1, the champion, was trained on some of these evaluation rows (2025-01-08), so they cannot tell "
        "which is better. Evaluate on rows that it has not seen, or choose: python -m flows.promote CONFIG version=N."
    )
    assert found.report.overall.rows == 10_000
    workspace = Workspace(load(CONFIG, {"split": {"days": days | {"test": ["2025-01-09"]}}}))
    gate = evaluate.compare_with_champion(
        workspace, resolve_job(workspace, None, False), model, lambda *note: None
    ).gate
    assert gate.difference is not None


UNKNOWN = (
    "so it may have been trained on these evaluation rows. Choose yourself: python -m flows.promote CONFIG version=N."
)


def damage(values):
    return values | {"trained_on": [{"days": "yesterday"}]}


def forget(values):
    return {key: value for key, value in values.items() if key != "trained_on"}


def move_table(values):
    return values | {"snapshot": values["snapshot"] | {"table": "elsewhere"}}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            damage,
            "The record of version 1, the champion, cannot be read (RegistryError: record.json of model 'smoke', "
            "version 1: expected a record of its training, got other content at 'trained_on.0.days'. Train another "
            f"version.), {UNKNOWN}",
        ),
        (forget, f"The record of version 1, the champion, names no rows, {UNKNOWN}"),
        (move_table, None),
    ],
    ids=["damaged", "no rows", "another table"],
)
def test_a_champion_whose_rows_are_unknown_is_not_compared(smoke, home, copied, change, reason):
    job, model = the_model(smoke, home)
    tracker = open_smoke().tracking
    changed = change(fetch_record(tracker, "smoke", 1).model_dump(mode="json"))
    run_id = tracker.start("changed", {}, {}, None)
    tracker.log_json(run_id, changed, RECORD)
    tracker.client.set_model_version_tag("smoke", "1", "record", f"runs:/{run_id}/{RECORD}")
    gate = evaluate.compare_with_champion(open_smoke(), job, model, lambda *note: None).gate
    if reason is None:  # rows of another table are not looked for here: docs/evaluation.md
        assert gate.difference is not None
    else:
        assert (gate.decision, gate.champion, gate.champion_ne, gate.reason) == ("hold", 1, None, reason)


def test_a_champion_whose_record_is_gone_is_not_compared(smoke, home, copied):
    job, model = the_model(smoke, home)
    tracker = open_smoke().tracking
    tracker.client.set_model_version_tag("smoke", "1", "record", f"runs:/{'0' * 32}/{RECORD}")
    gate = evaluate.compare_with_champion(open_smoke(), job, model, lambda *note: None).gate
    assert (gate.decision, gate.champion, gate.champion_ne) == ("hold", 1, None)
    assert gate.reason.startswith("The record of version 1, the champion, cannot be read (")
    tracker.client.delete_model_version_tag("smoke", "1", "record")
    gate = evaluate.compare_with_champion(open_smoke(), job, model, lambda *note: None).gate
    assert gate.difference is not None, "a version that was not trained here is compared"


def test_no_champion_scores_for_a_model_that_is_judged_later(smoke, home, copied, monkeypatch):
    job, model = the_model(smoke, home)
    loaded, load_model = set(), LoadedModel.__init__

    def note(self, folder):
        loaded.add(folder)
        load_model(self, folder)

    monkeypatch.setattr(LoadedModel, "__init__", note)
    later = job.model_copy(update={"judged_later": True})
    found = evaluate.compare_with_champion(open_smoke(), later, model, lambda *note: None)
    assert (found.gate.decision, found.gate.champion) == ("hold", None)
    assert found.gate.reason == "It is judged on the next day, which no model has seen yet."
    assert found.report.overall.rows == 5_000
    assert loaded == {model}


def test_leftovers_of_a_killed_attempt_are_not_counted(smoke, home, copied):
    config = load(CONFIG, {"evaluation.group_by": "cat_user"})
    job, model = counted(Workspace(config)), the_model(smoke, home)[1]
    groups = Path(job.folder) / "groups"
    groups.mkdir(parents=True)
    (groups / "torn.parquet").write_bytes(b"PAR1")
    grouped = evaluate.compare_with_champion(Workspace(config), job, model, lambda *note: None).report.grouped
    assert 0.0 < grouped.gauc < 1.0
    assert 0 < grouped.rows <= 5_000
    assert not groups.exists()


@pytest.mark.nightly
def test_several_processes_evaluate_as_one_does(smoke, home, copied):
    job, model = the_model(smoke, home)
    alone = evaluate.compare_with_champion(open_smoke(), job, model, lambda *note: None)
    several = evaluate.compare_with_champion(open_smoke({"evaluation.workers": 2}), job, model, lambda *note: None)
    assert several == alone
    assert alone.gate.difference.ne == 0.0


def test_a_champion_promoted_meanwhile_stays_champion(copied):
    config = load(CONFIG)
    tracker = Workspace(config).tracking
    verdict = Verdict(decision="promote", reason="NE is lower.", champion=7)
    found, alias = evaluate.apply_verdict(Workspace(config), 1, verdict)
    assert (found.decision, alias) == ("hold", "challenger")
    assert found.reason == "Version 1 became champion meanwhile. NE is lower."
    assert find_holder(tracker, "smoke") == 1
    assert evaluate.apply_verdict(Workspace(config), 1, verdict.model_copy(update={"champion": 1}))[1] == "champion"


def test_a_version_that_has_learned_fewer_days_than_a_daily_champion_is_held(copied, caplog):
    """Its promotion would take days back, and the next night would learn them again."""
    config = load(CONFIG)
    client = Workspace(config).tracking.client
    daily = client.create_model_version("smoke", "daily", tags={"day": "2025-01-20", "trained_to": "2025-01-20"})
    verdict = Verdict(decision="promote", reason="NE is lower.", champion=int(daily.version))
    client.set_registered_model_alias("smoke", "champion", daily.version)
    days = client.get_model_version("smoke", "1").tags["trained_to"]
    found, alias = evaluate.apply_verdict(Workspace(config), 1, verdict)
    assert (found.decision, alias) == ("hold", "challenger")
    behind = f"It has learned days up to {days}, and version {daily.version}, which daily runs train, those up to 2025-01-20."
    assert found.reason == f"{behind} NE is lower."
    assert behind in caplog.text
    client.set_model_version_tag("smoke", "1", "trained_to", "2025-01-20")
    assert evaluate.apply_verdict(Workspace(config), 1, verdict)[1] == "champion"

"""A release: its candidates, their stages, the last training of the winner, and the result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from pipeline.config import RunConfig, load
from pipeline.data.config import Part
from pipeline.data.selection import share_rows
from pipeline.errors import ConfigError, TrainingError
from pipeline.evaluation.metrics import format_metric
from pipeline.evaluation.record import markdown_table
from pipeline.jobs.console import step
from pipeline.jobs.search.trials import (
    AGAIN,
    BEST_NE,
    RESULT,
    STUDY,
    Search,
    SearchJob,
    Trials,
    check_parallel,
    describe_outcome,
    open_search,
    override,
    pin_search,
    prefix_errors,
    read_result,
    resolve_ranked,
)
from pipeline.jobs.training.identity import describe_rows, semantics
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.training.run import train_version
from pipeline.jobs.workspace import Workspace
from pipeline.registration.tracking import reporting_unreachable
from pipeline.registration.versions import is_intact
from pipeline.search import plots
from pipeline.search.config import Dimension, PruneConfig, ReleaseConfig, SweepConfig
from pipeline.search.study import Draw, SearchStudy, TrialRecord
from pipeline.transforms.ops.sampling import Sampling
from storage.artifacts import read_note, write_json

Stage = Literal["explore", "compare", "retrain"]
"""Exploratory, combo and release-candidate jobs in the words of arXiv:2108.09373, section 4."""
CANDIDATE = "candidate"
"""The one key of a stage's study: the name of the candidate."""
FINAL = "final.json"
"""File in a release's folder: the result of the winner's last training."""
STAGES = "stages.json"
"""Artifact of the release's MLflow run."""
RANKED_BY: tuple[Part, ...] = ("train", "valid")
"""Parts that candidates are trained on and ranked by."""


def pin_release(workspace: Workspace, snapshot_id: int | None, force: bool) -> SearchJob:
    """Pins the release of a config and a snapshot, and checks every candidate before anything runs.

    Raises:
        ConfigError: If the keys of a candidate do not fit the config or the table. Names the candidate.
        EmptyDatasetError: If the split of the last training names days that the table does not have.
    """
    config = workspace.config
    candidates = load_candidates(config)
    snapshot, data = resolve_ranked(workspace, snapshot_id)
    for name, candidate in candidates.items():
        with prefix_errors(f"release.candidates '{name}'"):
            resolve_dataset(workspace.with_config(shrink(candidate, config.release)), snapshot.snapshot_id)
        with prefix_errors("release.fresh"):
            last = resolve_dataset(workspace.with_config(freshen(candidate, config.release)), snapshot.snapshot_id)[1]
        for part in RANKED_BY:
            if share_rows(data[part].selection, last["test"].selection):
                expected = "test rows that no candidate was trained on or ranked by"
                raise ConfigError("release.fresh", expected, f"rows of split's `{part}`", "Choose other test rows.")
    inputs: dict[str, Any] = {"config": semantics(workspace, evaluation=True), "release": config.release.identity()}
    inputs |= {"model": config.model_name, "gate": config.gate.model_dump(mode="json")}
    rows: dict[str, Any] = {"plan": data["train"].plan.hash}
    rows["compared"] = describe_rows(workspace.warehouse, data, RANKED_BY)
    rows["last"] = describe_rows(workspace.warehouse, last)
    return pin_search(workspace, "release", snapshot, rows, inputs, force)


def load_candidates(config: RunConfig) -> dict[str, RunConfig]:
    """Returns the checked configs of all candidates, that of `base` first.

    Raises:
        ConfigError: Names the candidate and the key.
    """
    if not config.release.candidates:
        remedy = "Add one: `deep: {model.top_mlp: [128, 64, 32]}`."
        raise ConfigError("release.candidates", "at least one besides the config itself", "none", remedy)
    plain = config.model_copy(update={"release": ReleaseConfig()})
    found: dict[str, RunConfig] = {}
    for name, overrides in config.release.overrides.items():
        where = f"release.candidates '{name}'"
        candidate = override(where, plain, overrides)
        for trial in (candidate, shrink(candidate, config.release)):
            launcher, executor = trial.training.launcher, trial.preprocessing.executor
            check_parallel("release.parallel", config.release.parallel, launcher, executor)
        freshen(candidate, config.release)
        twin = next((other for other, one in found.items() if one.semantics() == candidate.semantics()), None)
        if twin is not None:
            raise ConfigError(where, "a training unlike the others", f"that of '{twin}'", "Leave one of them out.")
        found[name] = candidate
    return found


def shrink(candidate: RunConfig, release: ReleaseConfig) -> RunConfig:
    """Returns the config to explore a candidate with: a sample of its rows.

    Raises:
        ConfigError: If neither the sample nor the candidate's sampling names key columns.
    """
    sample, own = release.sample, candidate.sampling
    if own is None and not sample.inputs:
        expected = "key columns of the rows to explore on"
        raise ConfigError("release.sample.inputs", expected, "none", "Name some, such as the user's.")
    if own is None:
        own = Sampling(inputs=sample.inputs, rate=1.0, seed=sample.seed)
    sampling = own.model_copy(update={"rate": own.rate * sample.rate})
    return override("release.explore", candidate.model_copy(update={"sampling": sampling}), release.explore)


def freshen(candidate: RunConfig, release: ReleaseConfig) -> RunConfig:
    """Returns the config of a candidate's last training: the freshest days."""
    with prefix_errors("release.fresh"):
        return load(candidate, release.fresh or {})


class _Model(BaseModel, frozen=True):
    """The model that a release has made."""

    name: str
    version: int


class _Released(BaseModel, frozen=True):
    """What `load_result` reads of a result."""

    status: str
    model: _Model | None = None
    model_run_id: str = ""


def load_result(workspace: Workspace, job: SearchJob) -> dict[str, Any] | None:
    """Returns the result of a release that is done, if its version still exists and is undamaged, else None."""
    result = read_result(job, _Released)
    if result is None or result["status"] != "ok":
        return None
    model = result["model"]
    with reporting_unreachable(AGAIN):
        if not is_intact(workspace.tracking, model["name"], model["version"], result["model_run_id"]):
            return None
    workspace.console.log.info("skipped: release %s is done; force=true starts a new one", job.name)
    return result | {"status": "skipped"}


class CandidateStanding(BaseModel, frozen=True):
    """Result of a candidate in a stage."""

    name: str
    valid_ne: float | None = None
    """Best NE on the validation rows. None if the candidate was stopped or failed."""
    stopped: bool = False
    """Whether it was stopped because another one did better."""
    failed: str | None = None
    """Error message."""
    mlflow_run_id: str | None = None


@dataclass(eq=False)
class Release(Search):
    """A running release."""

    candidates: Mapping[str, RunConfig]
    stages: dict[Stage, list[CandidateStanding]] = field(default_factory=dict)

    @property
    def settings(self) -> ReleaseConfig:
        """Section of the config."""
        return self.workspace.config.release

    def render_table(self) -> str:
        """Returns the stages so far as a markdown table."""
        return render_table(self.stages, self.settings.candidates)

    def dump_stages(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the ranked candidates of the stages so far as JSON values."""
        return {stage: [one.model_dump() for one in standings] for stage, standings in self.stages.items()}


def run_release(workspace: Workspace, snapshot_id: int | None, force: bool) -> dict[str, Any]:
    """Runs a release, resumes it, or returns its result where it is done.

    Args:
        snapshot_id: Snapshot to read; None takes the newest.
        force: Starts a new release where the same one is done or has failed.
    """
    job, config = pin_release(workspace, snapshot_id, force), workspace.config
    done = load_result(workspace, job)
    if done is not None:
        return done
    with open_search(workspace, job, "release", f"release of {config.name}", config.release) as search:
        release = Release(**vars(search), candidates=load_candidates(config))
        ranked = run_stage(release, "explore", tuple(release.candidates))
        names = [one.name for one in ranked if one.valid_ne is not None][: config.release.keep]
        if len(names) > 1:
            ranked = run_stage(release, "compare", names)
        return conclude(release, retrain(release, ranked[0].name, force))


def run_stage(release: Release, stage: Stage, names: Sequence[str]) -> list[CandidateStanding]:
    """Trains the candidates of a stage, or those that are left. Returns them ranked, the best first.

    Raises:
        TrainingError: If none of them has an NE. The same command fails again; `force=true` starts a new release.
    """
    log, settings, folder = release.console.log, release.settings, release.folder / stage
    folder.mkdir(exist_ok=True)
    log.info("%s: %s", stage, ", ".join(names))

    def make_config(params: Mapping[str, Any]) -> RunConfig:
        candidate = release.candidates[params[CANDIDATE]]
        return shrink(candidate, settings) if stage == "explore" else candidate

    def describe(draw: Draw) -> tuple[str, dict[str, str]]:
        return f"{stage} {draw.params[CANDIDATE]}", make_tags(stage, draw.params[CANDIDATE])

    def report(record: TrialRecord) -> None:
        log.info("%s %s: %s", stage, record.params[CANDIDATE], describe_outcome(record))

    study = open_stage(folder, names, settings.prune if stage == "compare" else None)
    Trials(release, study, folder, make_config, describe, report).run_all(settings.parallel)
    standings = rank_candidates(study.records())
    log_stage(release, stage, standings)
    if standings[0].valid_ne is not None:
        log.info("%s: best is %s, NE %s", stage, standings[0].name, format_metric(standings[0].valid_ne))
        return standings
    result = {"status": "failed", "stages": release.dump_stages(), "mlflow_run_id": release.run_id}
    write_json(release.folder / RESULT, result)
    reason = next((one.failed for one in standings if one.failed), "all were stopped")
    raise TrainingError(
        f"release, stage '{stage}'", "one candidate that ends with an NE",
        f"none of {len(standings)}; the first: {reason}",
        "Correct the candidates, or try again with force=true. With release.prune=null none is stopped.",
    )  # fmt: skip


def open_stage(folder: Path, names: Sequence[str], prune: PruneConfig | None) -> SearchStudy:
    """Opens a stage as a study over the candidate's name, in the order of the names."""
    space = {CANDIDATE: Dimension(choices=tuple(names))}
    config = SweepConfig(strategy="grid", trials=len(names), space=space, prune=prune)
    return SearchStudy(folder / STUDY, config, {}, [{CANDIDATE: name} for name in names])


def make_tags(stage: Stage, name: str) -> dict[str, str]:
    """Returns the tags of a candidate's MLflow run."""
    return {"dlrm.stage": stage, "dlrm.candidate": name}


def rank_candidates(records: Sequence[TrialRecord]) -> list[CandidateStanding]:
    """Returns the results of a stage: the best first, then the stopped, then the failed ones in their given order."""
    standings = [
        CandidateStanding(
            name=one.params[CANDIDATE],
            valid_ne=one.valid_ne,
            stopped=one.state == "pruned",
            failed=one.notes.get("error"),
            mlflow_run_id=one.notes.get("mlflow_run_id"),
        )
        for one in records
    ]
    return sorted(standings, key=lambda one: (one.failed is not None, one.valid_ne is None, one.valid_ne or 0.0))


def log_stage(release: Release, stage: Stage, standings: list[CandidateStanding]) -> None:
    """Results of a stage -> MLflow: metrics, a figure and a table. Safe to repeat: it replaces itself."""
    release.stages[stage] = standings
    tracker, run_id = release.workspace.tracking, release.run_id
    tracker.log_json(run_id, release.dump_stages(), STAGES)
    tracker.log(run_id, len(release.stages), {BEST_NE: standings[0].valid_ne})
    tracker.tag(run_id, {"mlflow.note.content": release.render_table()})
    nes: dict[str, dict[str, float]] = {
        name: {one.name: one.valid_ne for one in found if one.valid_ne is not None}
        for name, found in release.stages.items()
    }
    with release.workspace.best_effort("figure of the stages"):
        tracker.log_figures(run_id, {"stages": plots.draw_stages(nes)})


def retrain(release: Release, name: str, force: bool) -> dict[str, Any]:
    """Trains the winner on the freshest days, evaluates it on test rows, and registers it, as flows.train does.

    Args:
        force: Trains even if the same training is in the registry, unless this release put it there.
    Returns:
        Result of the training. `status` is `skipped` if it was in the registry before this release.
    """
    path = release.folder / FINAL
    before = read_note(path, dict[str, Any]) if path.exists() else {}
    workspace = release.workspace.with_config(freshen(release.candidates[name], release.settings))
    again, tags = force and not before, {**release.child_tags, **make_tags("retrain", name)}
    # Skips what is in the registry, and repeats what is gone from it.
    result = train_version(workspace, release.job.snapshot.snapshot_id, again, f"retrain {name}", tags)
    if before.get("mlflow_run_id") == result["mlflow_run_id"]:
        return before
    result |= {"winner": name}
    write_json(path, result)
    return result


@step("conclude")
def conclude(release: Release, final: Mapping[str, Any]) -> dict[str, Any]:
    """All stages -> the result, a figure and a table. Safe to repeat: it replaces itself."""
    name, model, gate = final["winner"], final["model"], final["gate"]
    last = CandidateStanding(name=name, valid_ne=final["train"]["valid_ne"], mlflow_run_id=final["mlflow_run_id"])
    log_stage(release, "retrain", [last])
    verdict = f"**{gate['decision']}**: {gate['reason']}"
    if final["status"] == "skipped":
        verdict += " The version was in the registry already, and the verdict is from that time."
    text = f"Winner: `{name}`, version {model['version']} of model {model['name']}. {verdict}\n\n"
    result = {
        "release": release.job.name,
        "stages": release.dump_stages(),
        "winner": name,
        "model": model,
        "gate": gate,
        "eval": final["eval"],
        "model_run_id": final["mlflow_run_id"],
    }
    return release.conclude(text + release.render_table(), {"dlrm.winner": name}, result)


def render_table(
    stages: Mapping[Stage, Sequence[CandidateStanding]], candidates: Mapping[str, Mapping[str, Any]]
) -> str:
    """Returns candidates and their NE by stage as a markdown table. Those that got furthest come first."""
    names = dict.fromkeys(one.name for standings in reversed([*stages.values()]) for one in standings)
    rows = []
    for name in names:
        cells = [_cell(standings, name) for standings in stages.values()]
        differs = ", ".join(f"{key}={json.dumps(value)}" for key, value in candidates.get(name, {}).items())
        rows.append([name, *cells, differs.replace("|", "\\|") or "nothing"])
    return markdown_table(["candidate", *stages, "differs in"], rows)


def _cell(standings: Sequence[CandidateStanding], name: str) -> str:
    one = next((one for one in standings if one.name == name), None)
    if one is None:
        return ""
    return "failed" if one.failed else "stopped" if one.stopped else format_metric(one.valid_ne)

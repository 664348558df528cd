"""Runs a release: pins and checks its candidates, runs its stages in order, and reports the result."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config import RunConfig, load
from pipeline.data.config import Part
from pipeline.data.selection import share_rows
from pipeline.errors import ConfigError, EmptyDatasetError, TrainingError
from pipeline.evaluation.metrics import format_metric
from pipeline.evaluation.record import markdown_table
from pipeline.jobs.console import Console, step
from pipeline.jobs.search.candidate import BEST_NE
from pipeline.jobs.search.trials import (
    AGAIN,
    RESULT,
    SearchJob,
    Trials,
    check_label,
    check_parallel,
    check_section,
    open_search_run,
    pin_search,
)
from pipeline.jobs.training.identity import describe_rows, semantics
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.training.run import train_version
from pipeline.jobs.workspace import Workspace
from pipeline.registration.tracking import RESULT as RESULT_OF_RUN
from pipeline.registration.tracking import reporting_unreachable
from pipeline.registration.versions import is_intact
from pipeline.search import plots
from pipeline.search.config import ReleaseConfig
from pipeline.search.release import (
    CANDIDATE,
    CandidateStanding,
    Stage,
    make_stage,
    make_standing,
    rank_candidates,
    sample_rows,
    select_best,
)
from pipeline.search.study import Draw, SearchStudy, TrialRecord
from storage.artifacts import read_note, read_values, write_json

FINAL = "final.json"
"""File in a release's folder: the result of the winner's last training."""
STAGES = "stages.json"
"""Artifact of the release's MLflow run."""
STAGE_TAG = "dlrm.stage"
SOURCE = "flows.release"
RANKED_BY: tuple[Part, ...] = ("train", "valid")
"""Parts that candidates are trained on and ranked by."""


def pin_release(workspace: Workspace, snapshot_id: int | None, force: bool) -> SearchJob:
    """Pins the release of a config and a snapshot, and checks every candidate before anything runs.

    Args:
        snapshot_id: None takes the newest.
        force: Starts a new release if the last one has ended.
    Raises:
        ConfigError: If the keys of a candidate do not fit the config or the table. Names the candidate.
        EmptyDatasetError: If the split of the last training names days that the table does not have.
    """
    config = workspace.config
    candidates = load_candidates(config)
    snapshot, data = resolve_dataset(workspace, snapshot_id)
    if "valid" not in data:
        raise ConfigError("split", "validation rows, by which candidates are ranked", "none", "Name some as `valid`.")
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
    return pin_search(workspace, "releases", snapshot, rows, inputs, force)


def load_candidates(config: RunConfig) -> dict[str, RunConfig]:
    """Returns the checked configs of all candidates, that of `base` first.

    Raises:
        ConfigError: Names the candidate and the key.
    """
    if not config.release.candidates:
        remedy = "Add one: `deep: {model.top_mlp: [128, 64, 32]}`."
        raise ConfigError("release.candidates", "at least one besides the config itself", "none", remedy)
    for key in config.release.explore:
        check_section(f"release.explore, key '{key}'", key)
    label, plain = config.features.label, config.model_copy(update={"release": ReleaseConfig()})
    found: dict[str, RunConfig] = {}
    for name, overrides in config.release.overrides.items():
        where = f"release.candidates '{name}'"
        with prefix_errors(where):
            candidate = load(plain, overrides)
        for key in overrides:
            check_section(f"{where}, key '{key}'", key)
        check_label(f"{where}, features.label", label, candidate.features.label)
        with prefix_errors("release.explore"):
            exploration = shrink(candidate, config.release)
        check_label("release.explore, features.label", label, exploration.features.label)
        for trial in (candidate, exploration):
            launcher, executor = trial.training.launcher, trial.preprocessing.executor
            check_parallel("release.parallel", config.release.parallel, launcher, executor)
        with prefix_errors("release.fresh"):
            freshen(candidate, config.release)
        twin = next((other for other, one in found.items() if one.semantics() == candidate.semantics()), None)
        if twin is not None:
            raise ConfigError(where, "a training unlike the others", f"that of '{twin}'", "Leave one of them out.")
        found[name] = candidate
    return found


def shrink(candidate: RunConfig, release: ReleaseConfig) -> RunConfig:
    """Returns the config to explore a candidate with: a sample of its rows."""
    sampling = sample_rows(release.sample, candidate.sampling)
    return load(candidate.model_copy(update={"sampling": sampling}), release.explore)


def freshen(candidate: RunConfig, release: ReleaseConfig) -> RunConfig:
    """Returns the config of a candidate's last training: the freshest days."""
    return load(candidate, release.fresh or {})


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Prefixes config errors from the block with the key that caused them."""
    try:
        yield
    except (ConfigError, EmptyDatasetError) as error:
        if error.where.startswith("release."):
            raise
        where = f"{place}, {error.where.removeprefix('config, ')}"
        raise type(error)(where, error.expected, error.actual, error.remedy) from None


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
    path = Path(job.folder) / RESULT
    if not path.exists():
        return None
    result = read_values(path, _Released)
    if result["status"] != "ok":
        return None
    model = result["model"]
    with reporting_unreachable(AGAIN):
        if not is_intact(workspace.tracking, model["name"], model["version"], result["model_run_id"]):
            return None
    workspace.console.log.info("skipped: release %s is done; force=true starts a new one", job.name)
    return dict(result) | {"status": "skipped"}


class Release:
    """A running release."""

    def __init__(self, workspace: Workspace, job: SearchJob, run_id: str) -> None:
        self.workspace, self.job, self.run_id = workspace, job, run_id
        self.config, config = workspace.config, workspace.config
        self.folder = Path(job.folder)
        self.candidates = load_candidates(config)
        self.stages: dict[Stage, list[CandidateStanding]] = {}

    @property
    def console(self) -> Console:
        """Console of the workspace."""
        return self.workspace.console

    def make_config(self, stage: Stage, name: str) -> RunConfig:
        """Returns the config of a candidate in a stage."""
        candidate = self.candidates[name]
        if stage == "explore":
            return shrink(candidate, self.config.release)
        return freshen(candidate, self.config.release) if stage == "retrain" else candidate

    def make_tags(self, stage: Stage, name: str) -> dict[str, str]:
        """Returns the tags of a candidate's MLflow run."""
        return {STAGE_TAG: stage, "dlrm.candidate": name, "mlflow.source.name": SOURCE}


@contextmanager
def open_release(workspace: Workspace, job: SearchJob) -> Iterator[Release]:
    """Opens the release with its folder and its MLflow run. Ends the run in any case."""
    config = workspace.config
    params = {f"release.{key}": value for key, value in config.release.model_dump(exclude_defaults=True).items()}
    tags = {"mlflow.source.name": SOURCE, "dlrm.release": job.name}
    with open_search_run(workspace, job, f"release of {config.name}", params, tags) as run_id:
        yield Release(workspace, job, run_id)


def run_release(workspace: Workspace, snapshot_id: int | None, force: bool) -> dict[str, Any]:
    """Runs a release, resumes it, or returns its result where it is done.

    Args:
        snapshot_id: Snapshot to read; None takes the newest.
        force: Starts a new release where the same one is done or has failed.
    """
    job = pin_release(workspace, snapshot_id, force)
    done = load_result(workspace, job)
    if done is not None:
        return done
    with open_release(workspace, job) as release:
        explored = run_stage(release, "explore", tuple(release.candidates))
        names = select_best(explored, workspace.config.release.keep)
        compared = run_stage(release, "compare", names) if len(names) > 1 else explored
        return conclude(release, retrain(release, compared[0].name, force))


def run_stage(release: Release, stage: Stage, names: Sequence[str]) -> list[CandidateStanding]:
    """Trains the candidates of a stage, or those that are left. Returns them ranked, the best first.

    Args:
        names: Candidates in the order in which they start.
    Raises:
        TrainingError: If none of them has an NE.
    """
    settings = release.config.release
    space, points = make_stage(names, settings.prune if stage == "compare" else None)
    folder = release.folder / stage
    folder.mkdir(exist_ok=True)
    study = SearchStudy(folder / "study.db", space, {}, points)
    trials = Trials(release.workspace, study, release.job, folder, release.run_id)
    trials.tidy_all()
    release.console.log.info("%s: %s", stage, ", ".join(names))
    trials.run_all(
        settings.parallel, partial(run_candidate, release, trials, stage), partial(log_candidate, release, stage)
    )
    standings = rank_candidates([make_standing(record) for record in study.records()])
    log_stage(release, stage, standings)
    if standings[0].valid_ne is None:
        raise record_failure(release, stage, standings)
    release.console.log.info("%s: best is %s, NE %s", stage, standings[0].name, format_metric(standings[0].valid_ne))
    return standings


@step("{stage} {draw.params[candidate]}")
def run_candidate(release: Release, trials: Trials, stage: Stage, draw: Draw) -> None:
    """Trains a candidate to its NE in one stage. Safe to repeat: it resumes from its last checkpoint."""
    name = draw.params[CANDIDATE]
    tags = release.make_tags(stage, name)
    trials.train(draw.number, release.make_config(stage, name), f"{stage} {name}", tags)


def log_candidate(release: Release, stage: Stage, record: TrialRecord) -> None:
    """Logs the result of a candidate in a stage."""
    one = make_standing(record)
    result = (
        f"failed: {one.failed}" if one.failed else "stopped" if one.stopped else f"NE {format_metric(one.valid_ne)}"
    )
    release.console.log.info("%s %s: %s", stage, one.name, result)


def log_stage(release: Release, stage: Stage, standings: list[CandidateStanding]) -> None:
    """Results of a stage -> MLflow: metrics, a figure and a table. Safe to repeat: it replaces itself."""
    release.stages[stage] = standings
    tracker, run_id = release.workspace.tracking, release.run_id
    tracker.log_json(run_id, dump_stages(release.stages), STAGES)
    tracker.log(run_id, len(release.stages), {BEST_NE: standings[0].valid_ne})
    tracker.tag(run_id, {"mlflow.note.content": render_table(release.stages, release.config.release.candidates)})
    with release.workspace.best_effort("figure of the stages"):
        tracker.log_figures(run_id, {"stages": plots.draw_stages(release.stages)})


def record_failure(release: Release, stage: Stage, standings: Sequence[CandidateStanding]) -> TrainingError:
    """Writes the result of a release that no candidate survived. Returns the error to raise.

    The same command fails again; with `force=true` it starts a new release.
    """
    reason = next((one.failed for one in standings if one.failed), "all were stopped")
    result = {"status": "failed", "stages": dump_stages(release.stages), "mlflow_run_id": release.run_id}
    write_json(release.folder / RESULT, result)
    actual = f"none of {len(standings)}; the first: {reason}"
    remedy = "Correct the candidates, or try again with force=true. With release.prune=null none is stopped."
    return TrainingError(f"release, stage '{stage}'", "one candidate that ends with an NE", actual, remedy)


def retrain(release: Release, name: str, force: bool) -> dict[str, Any]:
    """Trains the winner on the freshest days, evaluates it on test rows, and registers it, as flows.train does.

    Args:
        force: Trains even if the same training is in the registry, unless this release put it there.
    Returns:
        Result of the training. `status` is `skipped` if it was in the registry before this release.
    """
    path = release.folder / FINAL
    before = read_note(path, dict[str, Any]) if path.exists() else {}
    tags = {"mlflow.parentRunId": release.run_id, **release.make_tags("retrain", name)}
    snapshot = release.job.snapshot.snapshot_id
    # Skips what is in the registry, and repeats what is gone from it.
    result = train_version(
        release.workspace.with_config(release.make_config("retrain", name)),
        snapshot,
        force and not before,
        f"retrain {name}",
        tags,
    )
    if before.get("mlflow_run_id") == result["mlflow_run_id"]:
        return before
    result |= {"winner": name}
    write_json(path, result)
    return result


@step("conclude")
def conclude(release: Release, final: Mapping[str, Any]) -> dict[str, Any]:
    """All stages -> the result, a figure and a table. Safe to repeat: it replaces itself."""
    name, tracker, run_id = final["winner"], release.workspace.tracking, release.run_id
    last = CandidateStanding(name=name, valid_ne=final["train"]["valid_ne"], mlflow_run_id=final["mlflow_run_id"])
    log_stage(release, "retrain", [last])
    model, gate = final["model"], final["gate"]
    table = render_table(release.stages, release.config.release.candidates)
    verdict = f"**{gate['decision']}**: {gate['reason']}"
    if final["status"] == "skipped":
        verdict += " The version was in the registry already, and the verdict is from that time."
    head = f"Winner: `{name}`, version {model['version']} of model {model['name']}. {verdict}"
    tracker.tag(run_id, {"mlflow.note.content": f"{head}\n\n{table}", "dlrm.winner": name})
    text = f"# Release {release.job.name}\n\n{head}\n\n{table}"
    release.console.show_text("release", release.config.name, text)
    result = {
        "status": "ok",
        "release": release.job.name,
        "snapshot_id": release.job.snapshot.snapshot_id,
        "stages": dump_stages(release.stages),
        "winner": name,
        "model": model,
        "gate": gate,
        "eval": final["eval"],
        "mlflow_run_id": run_id,
        "model_run_id": final["mlflow_run_id"],
    }
    tracker.log_json(run_id, result, RESULT_OF_RUN)
    write_json(release.folder / RESULT, result)
    return result


def dump_stages(stages: Mapping[Stage, Sequence[CandidateStanding]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the ranked stages as JSON values."""
    return {stage: [one.model_dump() for one in standings] for stage, standings in stages.items()}


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

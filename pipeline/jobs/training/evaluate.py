"""Evaluates a trained model on the evaluation rows, and compares it with the champion."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from pipeline.data.alone import LEAK_AUC, Alone
from pipeline.data.config import Part
from pipeline.data.joined.reader import joined_schema
from pipeline.data.selection import share_rows
from pipeline.errors import ConfigError
from pipeline.evaluation.baselines import (
    NAMES,
    Baseline,
    Examples,
    compare_baselines,
    describe_comparison,
    loses,
    sample_step,
)
from pipeline.evaluation.evaluate import EvalReport, Evaluation
from pipeline.evaluation.gate import UNLESS_KNOWN, Verdict, compare, judge_first
from pipeline.evaluation.importance import ImportanceEstimator
from pipeline.evaluation.record import FeatureImportance, describe_quality
from pipeline.inference.model import LoadedModel, plan_of
from pipeline.jobs.console import Progress, one_line, step
from pipeline.jobs.evaluation.parallel import evaluate_portions
from pipeline.jobs.evaluation.scorers import Comparison, read_outcomes
from pipeline.jobs.evaluation.trained import AS_DECLARED, TrainedColumns, read_as_trained
from pipeline.jobs.training.job import TrainingJob
from pipeline.jobs.training.leaks import describe_leaks, find_leaks
from pipeline.jobs.training.provenance import find_record, trained_sources
from pipeline.jobs.training.train import TrainingResult
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.worker import Worker
from pipeline.registration.aliases import CHALLENGER, CHAMPION, find_holder, lost_champion, move_alias
from pipeline.registration.config import Weights
from pipeline.registration.register import pack
from pipeline.registration.tracking import is_disk_error, is_unreachable
from pipeline.registration.versions import download_packed
from storage.reader import DAY

IMPORTANCE_BATCH_ROWS = 2_048
"""Most rows that exchange the values of a feature."""
IMPORTANCE_BATCH_SCORES = 400_000
"""Most scores of a batch: its rows, once for each feature."""
IMPORTANCE_SECONDS = 30.0
"""After these no further batch is scored."""


class EvaluationResult(BaseModel, frozen=True):
    """Quality on the evaluation rows, and the gate's verdict."""

    report: EvalReport
    gate: Verdict
    weights_sha256: str = ""
    """Hash of the weights that were evaluated."""
    features: tuple[FeatureImportance, ...] = ()
    """The most important first. Empty if importance was not estimated."""

    baselines: tuple[Baseline, ...] = ()
    """Simple models on the same rows."""

    @property
    def droppable(self) -> list[str]:
        """Features that could be dropped."""
        return [feature.name for feature in self.features if feature.droppable]


class Scored(NamedTuple):
    """Rows that a model and the champion have scored."""

    evaluation: Evaluation
    report: EvalReport
    """Of the model."""
    error: str | None
    """Why the champion could not score. None: it could, or there is none."""
    find_leaks: Callable[[], Mapping[str, Alone]] = dict
    """Looks for features of the model that tell the label by themselves."""


def compare_with_champion(
    workspace: Workspace, job: TrainingJob, model: Path, progress: Progress, exact: Path | None = None
) -> EvaluationResult:
    """Scores the evaluation rows, raw as a caller would send them, with the new model and with the champion.

    The champion scores only rows that it has not seen, and none for a model that is judged on another day.

    Args:
        model: Folder of the packed model.
        exact: The same before its tables were rounded, to tell what that costs.
    """
    version = None if job.judged_later else find_holder(workspace.tracking, workspace.config.model_name)
    spec, rows = job.data["test"], job.rows["test"]
    seen = None if version is None else _find_seen_rows(workspace, job, version)
    known = version if seen is None else None
    scored = score_both(workspace, spec, rows, model, known, Path(job.folder), progress, exact)
    if job.judged_later:
        verdict = Verdict(
            decision="hold", reason="It is judged on the next day, which no model has seen yet.", pending=True
        )
    elif version is None:
        verdict = _judge_alone(workspace, scored)
    elif seen is not None:
        verdict = Verdict(decision="hold", reason=seen, champion=version)
    else:
        verdict = decide(workspace, scored, version)
    return EvaluationResult(report=scored.report, gate=verdict)


def score_both(
    workspace: Workspace,
    spec: DataSpec,
    rows: int,
    model: Path,
    version: int | None,
    folder: Path,
    progress: Progress,
    exact: Path | None = None,
    names: Mapping[str, str] = AS_DECLARED.names,
) -> Scored:
    """Scores rows with a model and with the champion.

    Args:
        spec, rows: The rows and their number.
        model: Folder of the packed model.
        version: The champion's. None: the model is scored alone.
        folder: Holds temporary files.
        exact: The model before its tables were rounded. None: they were not rounded.
        names: Column of the model -> its name in the rows, where that is another.
    """
    resampled = workspace.config.gate.resample_by
    fetched, groups = folder / "champion", folder / "groups"
    shutil.rmtree(groups, ignore_errors=True)  # of an attempt that was killed
    try:
        champion = download_scorer(workspace, version, spec, fetched)
        spec = champion.add_columns(spec)
        comparison = Comparison(
            spec=spec,
            evaluation=workspace.config.evaluation,
            units=DAY if resampled in (None, "row") else resampled,
            model=model,
            exact=exact,
            champion=champion.model,
            groups=groups,
            model_names=names,
            champion_names=champion.read.names,
        )
        fragments = Worker(spec, workspace.warehouse).fragments()
        evaluation, failed = evaluate_portions(workspace, comparison, fragments, rows, progress)
        report = evaluation.report()
    finally:
        for made in (fetched, groups):
            shutil.rmtree(made, ignore_errors=True)
    return Scored(
        evaluation, report, champion.error or failed, partial(find_leaks, workspace.warehouse, spec, model, names)
    )


def decide(workspace: Workspace, scored: Scored, version: int) -> Verdict:
    """Asks the gate. Holds the model if the champion, `version`, could not score the rows."""
    if scored.error is not None:
        reason = f"Version {version}, the champion, cannot score these rows: {scored.error}."
        return Verdict(decision="hold", reason=reason, champion=version)
    known = scored.evaluation.champion.quality().auc
    return _hold_leaks(scored, compare(scored.evaluation, scored.report, workspace.config.gate, version), known)


def _hold_leaks(scored: Scored, verdict: Verdict, known: float | None) -> Verdict:
    """Returns the verdict, or a hold where a feature by itself tells nearly all of the label.

    Args:
        known: AUC of the champion. One that is as good was promoted by a person, who knows where it comes from.
    """
    if verdict.decision != "promote" or (known is not None and known > LEAK_AUC):
        return verdict
    found = scored.find_leaks()
    if not found:
        return verdict
    reason = f"Features tell nearly all of the label: {describe_leaks(found)}. {UNLESS_KNOWN}"
    return verdict.model_copy(update={"decision": "hold", "reason": reason})


def _find_seen_rows(workspace: Workspace, job: TrainingJob, version: int) -> str | None:
    """Returns why the champion cannot be compared: it may have seen evaluation rows. None: it can.

    A champion that was not trained here is compared. Nobody knows its rows, and no record can be damaged.
    """
    unknown = (
        "so it may have been trained on these evaluation rows. Choose yourself: "
        "python -m flows.promote CONFIG version=N."
    )
    subject = f"The record of version {version}, the champion,"
    try:
        record = find_record(workspace.tracking, workspace.config.model_name, version)
    except Exception as error:  # of many kinds: MLflow, the store of its files, the disk
        if is_unreachable(error) or is_disk_error(error):
            raise
        return f"{subject} cannot be read ({one_line(error)}), {unknown}"
    if record is None:
        return None
    if not record.trained_on:
        return f"{subject} names no rows, {unknown}"
    test = job.data["test"].selection
    same_table = record.snapshot.table == job.snapshot.table
    days = {day for one in record.trained_on if same_table and share_rows(one, test) for day in one.days}
    if not days & set(test.days):
        return None
    shared = sorted(days & set(test.days))
    span = f"{shared[0]}" if len(shared) == 1 else f"{shared[0]} to {shared[-1]}, {len(shared)} days"
    return (
        f"Version {version}, the champion, was trained on some of these evaluation rows ({span}), so they cannot tell "
        "which is better. Evaluate on rows that it has not seen, or choose: python -m flows.promote CONFIG version=N."
    )


def _judge_alone(workspace: Workspace, scored: Scored) -> Verdict:
    """Decides on a model without a champion. Holds it if somebody has removed the champion."""
    lost = lost_champion(workspace.tracking, workspace.config.model_name)
    if lost is None:
        return _hold_leaks(scored, judge_first(scored.evaluation, scored.report, workspace.config.gate), None)
    return Verdict(decision="hold", reason=f"There is no champion to compare with: {lost}")


def evaluate_model(
    workspace: Workspace,
    spec: DataSpec,
    rows: int,
    model: Path,
    progress: Progress,
    read: TrainedColumns = AS_DECLARED,
) -> EvalReport:
    """Scores rows, raw as a caller would send them, with one model.

    Args:
        model: Folder of the packed model.
        read: How to read the columns that the config no longer declares as the model was trained.
    Raises:
        ConfigError: If the table has not all columns that the model reads.
    """
    groups, warehouse, columns = model.parent / "groups", workspace.warehouse, plan_of(model).columns
    shutil.rmtree(groups, ignore_errors=True)  # of an attempt that was killed
    spec = spec.model_copy(update={"joined": (*spec.joined, *read.joined)})
    known = joined_schema(warehouse, spec.snapshot, spec.joined, columns).names
    columns = [read.names.get(name, name) for name in columns]
    if absent := [name for name in columns if name not in known]:
        where, expected = f"table '{workspace.config.name}'", "the columns that the champion reads"
        raise ConfigError(
            where, f"{expected}, {', '.join(absent)} among them", "none",
            "Bring them back, or train another model and promote it: flows.train, flows.promote.",
        )  # fmt: skip
    spec = spec.model_copy(update={"extra": tuple(dict.fromkeys([*spec.extra, *columns]))})
    comparison = Comparison(
        spec=spec,
        evaluation=workspace.config.evaluation,
        units=DAY,
        model=model,
        exact=None,
        champion=None,
        groups=groups,
        model_names=read.names,
    )
    evaluation, _ = evaluate_portions(workspace, comparison, Worker(spec, warehouse).fragments(), rows, progress)
    return evaluation.report()


def estimate_importance(
    workspace: Workspace, job: TrainingJob, model: Path, progress: Progress
) -> tuple[FeatureImportance, ...]:
    """Estimates feature importance on a sample, within about `IMPORTANCE_SECONDS`.

    The sample is the first rows of fragments that are spread over all. They are read in a random order, so that those
    that the time allows are spread, too.
    """
    evaluation, wanted = workspace.config.evaluation, workspace.config.evaluation.importance_rows
    if wanted is None:
        return ()
    loaded, worker = LoadedModel(model), Worker(job.data["test"], workspace.warehouse)
    estimator = ImportanceEstimator(
        loaded.plan, loaded.score_parts, workspace.config.seed, evaluation.level, evaluation.droppable_ne_loss
    )
    fragments = worker.fragments()
    most = max(wanted // len(fragments), IMPORTANCE_BATCH_ROWS)
    chosen = fragments[:: max(len(fragments) * most // wanted, 1)]
    batch_rows = max(64, min(IMPORTANCE_BATCH_ROWS, IMPORTANCE_BATCH_SCORES // max(1, len(loaded.plan.features))))
    total, ends = min(wanted, job.rows["test"]), time.monotonic() + IMPORTANCE_SECONDS
    for number in np.random.default_rng(workspace.config.seed).permutation(len(chosen)):
        sample = worker.read_selected(chosen[number]).slice(0, most)
        labels, weights = read_outcomes(worker, sample, chosen[number])
        for start in range(0, sample.num_rows, batch_rows):
            if estimator.batches and time.monotonic() > ends:
                took = f"{IMPORTANCE_SECONDS:.0f} s allow for {estimator.rows:,} of {total:,} rows"
                workspace.console.log.info("importance of the features: %s", took)
                return tuple(estimator.estimate())
            rows = sample.slice(start, batch_rows)
            part = slice(start, start + rows.num_rows)
            estimator.add(rows, labels[part], *loaded.parts(rows), None if weights is None else weights[part])
            progress("features", min(estimator.rows, total), total)
    return tuple(estimator.estimate())


def train_baselines(
    workspace: Workspace, job: TrainingJob, model: Path, progress: Progress
) -> tuple[Baseline, ...]:  # fmt: skip
    """Trains simple models on the training rows, thinned to a bound, and evaluates them on the evaluation rows.

    A model that continues another has seen more rows than its job names, so it is not compared.
    """
    names = workspace.config.evaluation.baselines
    if not names or job.start is not None:
        return ()
    plan, by_time = plan_of(model), workspace.config.split.days is not None
    workers = {part: Worker(data, workspace.warehouse) for part, data in job.data.items()}

    def read(part: Part, every: int = 1) -> Iterator[Examples]:
        first, worker = 0, workers[part]
        for fragment in worker.fragments():
            rows = worker.read_selected(fragment)
            kept = rows.take(np.arange(-first % every, rows.num_rows, every)) if every > 1 else rows
            first += rows.num_rows
            labels, weights = read_outcomes(worker, kept, fragment)
            transformed = plan.apply(kept)
            day = fragment.day.toordinal() if by_time else None
            yield Examples.of(transformed.dense, plan.ids(transformed.sparse), labels, weights, day)

    def sample(part: Part) -> Examples:
        return Examples.concatenate(list(read(part, sample_step(job.rows[part], len(plan.features)))))

    def read_test() -> Iterator[Examples]:
        done, total = 0, job.rows["test"]
        for part in read("test"):
            done += len(part)
            progress("baselines", done, total)
            yield part

    valid = sample("valid") if "valid" in workers else None
    return tuple(compare_baselines(names, sample("train"), read_test, workspace.config.seed, valid))


def report_baselines(workspace: Workspace, report: EvalReport, baselines: Sequence[Baseline]) -> None:
    """Logs how the model compares, as a warning if it loses."""
    sentence = describe_comparison(report.overall, baselines)
    if sentence is not None:
        log = workspace.console.log
        (log.warning if loses(report.overall, baselines) else log.info)("%s", sentence)
        for one in baselines:
            if not one.converged:
                log.info("%s reached its limit of iterations, so it could be a little better", NAMES[one.name])


class RegisteredScorer(NamedTuple):
    """A version of the registry, ready to score rows."""

    model: Path | None = None
    """Folder of its packed model. None: there is no version, or it cannot score the rows."""
    columns: Sequence[str] = ()
    """The columns that it reads, by their names in the rows."""
    read: TrainedColumns = AS_DECLARED
    """How to read those that the config declares in another way, or not at all."""
    error: str | None = None
    """Why it cannot score the rows."""

    def add_columns(self, spec: DataSpec) -> DataSpec:
        """Returns the rows with the columns of this version."""
        extra = tuple(dict.fromkeys([*spec.extra, *self.columns]))
        return spec.model_copy(update={"extra": extra, "joined": (*spec.joined, *self.read.joined)})


def download_scorer(workspace: Workspace, version: int | None, spec: DataSpec, folder: Path) -> RegisteredScorer:
    """Fetches a version from the registry. It reads joined features as they were declared when it was trained.

    Args:
        version: None: there is none.
        spec: The rows that it is to score.
    """
    if version is None:
        return RegisteredScorer()
    try:
        model = download_packed(workspace.tracking, workspace.config.model_name, version, folder)
        columns = plan_of(model).columns
        read = read_as_trained(workspace, version, spec.snapshot, trained_sources(workspace, version), columns)
        known = joined_schema(workspace.warehouse, spec.snapshot, (*spec.joined, *read.joined), columns).names
    except Exception as error:  # as above
        if is_unreachable(error):  # it will be there later
            raise
        return RegisteredScorer(error=one_line(error))
    columns = [read.names.get(name, name) for name in columns]
    if absent := [name for name in columns if name not in known]:
        return RegisteredScorer(error=f"the table has no column {', '.join(absent)}")
    return RegisteredScorer(model, columns, read)


def hold_if_overtaken(verdict: Verdict, present: int | None) -> Verdict:
    """Returns the verdict, or a hold where it would replace another champion than it has compared with.

    Args:
        present: The champion now. None: there is none.
    """
    if verdict.decision != "promote" or present == verdict.champion:
        return verdict
    changed = "The champion was taken away" if present is None else f"Version {present} became champion"
    return verdict.model_copy(update={"decision": "hold", "reason": f"{changed} meanwhile. {verdict.reason}"})


def apply_verdict(workspace: Workspace, version: int, verdict: Verdict) -> tuple[Verdict, str | None]:
    """Carries a verdict out: the verdict, or another where the champion has changed since; the version's alias."""
    tracker, name = workspace.tracking, workspace.config.model_name
    verdict = hold_if_overtaken(verdict, find_holder(tracker, name))
    if verdict.decision == "promote" and (behind := _find_days_behind(workspace, version, verdict.champion)):
        workspace.console.log.warning("version %s is held: %s", version, behind)
        verdict = verdict.model_copy(update={"decision": "hold", "reason": f"{behind} {verdict.reason}"})
    if verdict.decision == "reject":
        return verdict, None
    alias = CHAMPION if verdict.decision == "promote" else CHALLENGER
    move_alias(tracker, name, alias, version, "gate", verdict.reason)
    return verdict, alias


def _find_days_behind(workspace: Workspace, version: int, champion: int | None) -> str | None:
    """Says that a version has learned fewer days than a champion of daily runs. None: it has not."""
    if champion is None:
        return None
    tracker, name = workspace.tracking, workspace.config.model_name
    own, theirs = (tracker.client.get_model_version(name, str(one)).tags for one in (version, champion))
    last, newest = own.get("trained_to", ""), theirs.get("trained_to", "")
    if "day" in own or "day" not in theirs or last >= newest:
        return None
    return f"It has learned days up to {last}, and version {champion}, which daily runs train, those up to {newest}."


@step("evaluate")
def evaluate(workspace: Workspace, job: TrainingJob, trained: TrainingResult) -> EvaluationResult:
    """Evaluates the weights and asks the gate. Safe to repeat: it only reads."""
    config = workspace.config
    logger = workspace.console.log
    model = pack_model(workspace, job, trained, config.registration.weights)
    exact = None if config.registration.weights == "fp32" else pack_model(workspace, job, trained)
    with workspace.console.progress() as progress:
        result = compare_with_champion(workspace, job, model, progress, exact)
        with workspace.best_effort("importance of the features"):
            result = result.model_copy(update={"features": estimate_importance(workspace, job, model, progress)})
        with workspace.best_effort("baselines"):
            result = result.model_copy(update={"baselines": train_baselines(workspace, job, model, progress)})
    result = result.model_copy(update={"weights_sha256": trained.summary["weights_sha256"]})
    logger.info("evaluation: %s", describe_quality(result.report))
    report_baselines(workspace, result.report, result.baselines)
    logger.info("gate: %s. %s", result.gate.decision, result.gate.reason)
    if result.features:
        logger.info("most important features: %s", ", ".join(feature.name for feature in result.features[:5]))
        logger.info("features that could be dropped: %s", ", ".join(result.droppable) or "none")
    return result


def pack_model(workspace: Workspace, job: TrainingJob, trained: TrainingResult, form: Weights = "fp32") -> Path:
    config = workspace.config
    folder = Path(job.folder) / ("model" if form == "fp32" else f"{form}/model")  # MLflow keeps the last part as a name
    schema, defaults = workspace.columns(job.snapshot, job.plan.columns), config.registration.defaults
    return pack(
        folder, Path(trained.weights), job.plan, config.model, schema, form, defaults, config.features.logs
    )  # fmt: skip

"""A trained model judged on the evaluation rows, beside the champion."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pydantic import BaseModel

from flows.config import RunConfig
from flows.job import TrainingJob, tracker_of, warehouse_of
from flows.progress import Progress
from pipeline.evaluation.evaluate import EvalReport, Scored, evaluate
from pipeline.evaluation.gate import Verdict, compare
from pipeline.evaluation.metrics import Floats
from pipeline.preprocessing.worker import Worker
from pipeline.registration.aliases import CHALLENGER, CHAMPION, holder, move
from pipeline.registration.register import packed
from pipeline.registration.scorer import BATCH_ROWS, LoadedModel


class Judged(BaseModel, frozen=True):
    """Quality on the evaluation rows, and what the gate makes of it."""

    report: EvalReport
    gate: Verdict


class Champion:
    """The version to beat, as far as it can score today's rows.

    Args:
        columns: Those of the table that it is to score.
        folder: It is fetched there; taken away again.
    """

    def __init__(self, config: RunConfig, version: int, columns: Iterable[str], folder: Path) -> None:
        self.version = version
        self.error: str | None = None
        self.columns: tuple[str, ...] = ()
        try:
            self.model = LoadedModel(packed(tracker_of(config), config.model_name, version, folder))
            absent = [name for name in self.model.plan.columns if name not in columns]
            if absent:
                self.error = f"the table has no column {', '.join(absent)}"
            else:
                self.columns = tuple(self.model.plan.columns)
        except Exception as error:  # a champion that cannot be had must not cost the new model
            self.error = _in_a_line(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def score(self, rows: pa.Table) -> Floats | None:
        """Probabilities of raw rows; None once it has failed."""
        if self.error is None:
            try:
                return self.model.score(rows)
            except Exception as error:  # as above
                self.error = _in_a_line(error)
        return None


def judge(config: RunConfig, job: TrainingJob, model: LoadedModel, progress: Progress) -> Judged:
    """Scores the evaluation rows, raw as a caller would send them, with the new model and with the champion."""
    version = holder(tracker_of(config), config.model_name)
    spec, warehouse = job.data["test"], warehouse_of(config)
    champion = None
    if version is not None:
        champion = Champion(config, version, warehouse.schema(job.snapshot).names, Path(job.folder) / "champion")
        spec = spec.model_copy(update={"extra": tuple(dict.fromkeys([*spec.extra, *champion.columns]))})
    worker = Worker(spec, warehouse)

    def scored() -> Iterator[Scored]:
        done = 0
        for rows in _coalesced(worker.raw(fragment) for fragment in worker.fragments()):
            labels = rows.column(config.features.label).to_numpy().astype("float64")
            done += rows.num_rows
            progress("evaluate", done, job.rows["test"])
            others = None if champion is None else champion.score(rows)
            yield Scored(labels, model.score(rows), rows.select(list(job.data["test"].extra)), others)

    parts = list(scored())
    report = evaluate(parts, config.evaluation)
    if champion is None:
        verdict = Verdict(decision="promote", reason="There is no champion yet.")
    elif champion.error is not None:
        reason = f"Version {champion.version}, the champion, cannot score these rows: {champion.error}."
        verdict = Verdict(decision="hold", reason=reason, champion=champion.version)
    else:
        verdict = compare(parts, report, config.evaluation.slices, config.gate, champion.version)
    return Judged(report=report, gate=verdict)


def moved(config: RunConfig, version: int, verdict: Verdict) -> tuple[Verdict, str | None]:
    """Carries a verdict out: the verdict, or another where the champion has changed since; the version's alias."""
    tracker, name = tracker_of(config), config.model_name
    present = holder(tracker, name)
    if verdict.decision == "promote" and present != verdict.champion:
        reason = f"Version {present} became champion meanwhile. {verdict.reason}"
        verdict = verdict.model_copy(update={"decision": "hold", "reason": reason})
    if verdict.decision == "reject":
        return verdict, None
    alias = CHAMPION if verdict.decision == "promote" else CHALLENGER
    move(tracker, name, alias, version, "gate", verdict.reason)
    return verdict, alias


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _coalesced(parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Parts of at least a scoring batch: days of few rows would cost a call each."""
    pending: list[pa.Table] = []
    for part in parts:
        pending.append(part)
        if sum(other.num_rows for other in pending) >= BATCH_ROWS:
            yield pa.concat_tables(pending)
            pending = []
    if pending:
        yield pa.concat_tables(pending)

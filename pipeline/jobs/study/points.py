"""The points of an efficiency study, measured one after the other in ranks that stay as long as they can."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.characterization.points import StudyPoint
from pipeline.characterization.results import Measurement, PointResult
from pipeline.characterization.workload import make_plan
from pipeline.config import RunConfig, load
from pipeline.config.files import ROOT
from pipeline.errors import ContractError, TrainingError
from pipeline.jobs.study.rank import MeasureSpec, MeasureTask
from pipeline.jobs.study.workload import choose_rows, write_dataset
from pipeline.jobs.training.job import prepare_rows
from pipeline.jobs.training.rank import plan_placement
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.service import Service
from pipeline.preprocessing.worker import Worker
from pipeline.training.launch.processes import Event, Limits, run_ranks
from pipeline.training.tables.statistics import SAMPLE_ROWS, TableUse
from pipeline.training.tables.statistics import measure_table_use as measure_uses
from pipeline.transforms.column import Column
from storage.artifacts import write_json

POINTS = "points"
"""Folder of a study with a file a point."""
OnResult = Callable[[PointResult, bool], PointResult]
"""Called with a result and whether it was there before; returns it as it is to be kept."""


def make_point_config(config: RunConfig, point: StudyPoint) -> RunConfig:
    """The config of a point."""
    plain = config.characterize.model_copy(update={"axes": {}, "scale": 1.0})
    return load(config.model_copy(update={"characterize": plain}), point.settings)


def load_point(folder: Path, point: StudyPoint) -> PointResult | None:
    """What is known of a point from an earlier process."""
    path = folder / POINTS / f"{point.key}.json"
    return PointResult.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else None


def save_point(folder: Path, result: PointResult) -> PointResult:
    """Writes a result down."""
    write_json(folder / POINTS / f"{result.point.key}.json", result.model_dump(mode="json"))
    return result


@dataclass(frozen=True)
class ReadyPoint:
    """A point that can be measured."""

    point: StudyPoint
    task: MeasureTask
    served: DataSpec | None = None
    """Rows that a preprocessing service is to read meanwhile."""

    @property
    def group(self) -> tuple[object, ...]:
        """Points with the same can be measured by the same ranks."""
        training = self.task.training
        kind = (training.world_size, training.threads_per_rank, training.device, training.sync)
        return (*kind, self.point.key) if self.served is not None else kind


def measure_points(
    workspace: Workspace,
    points: Sequence[StudyPoint],
    folder: Path,
    tell: OnResult = lambda result, stored: result,
    snapshot_id: int | None = None,
) -> list[PointResult]:
    """Measures the speed of points that have no result in the folder yet; those that failed are tried again.

    Args:
        workspace: Has the config that the points are put over.
        folder: Results are kept here, a file a point; no other process works in it.
        snapshot_id: Of the config's table, for points without a workload; None takes the newest.
    """
    results: dict[str, PointResult] = {}
    ready: list[ReadyPoint] = []
    rows = PointRows(folder, snapshot_id)

    def done(result: PointResult) -> None:
        results[result.point.key] = save_point(folder, tell(result, False))

    for point in points:
        before = load_point(folder, point)
        if before is not None and before.state != "failed":
            results[point.key] = tell(before, True)
            continue
        try:
            ready.append(_prepare_point(workspace, point, rows))
        except ContractError as error:
            done(PointResult(point=point, state="left out", reason=str(error)))
    for _, members in itertools.groupby(sorted(ready, key=lambda one: str(one.group)), key=lambda one: one.group):
        _measure_group(list(members), folder / "ranks", done)
    return [results[point.key] for point in points]


def _prepare_point(workspace: Workspace, point: StudyPoint, rows: "PointRows") -> ReadyPoint:
    """The point as ranks are told of it.

    Raises:
        ContractError: If its tables cannot be placed: for their kind, the ranks, or the memory.
    """
    settings = make_point_config(workspace.config, point)
    study, training = settings.characterize, settings.training
    data = rows.of(workspace.using(settings))
    shape = study.workload if data is None else None
    if data is not None:
        plan = data.plan
    else:
        assert shape is not None
        plan = make_plan(shape)
    one = MeasureTask(
        key=point.key, model=settings.model, training=training, preprocessing=settings.preprocessing,
        seed=settings.seed, plan=plan, workload=shape, data=data,
        warm_up_steps=study.warm_up_steps, steps=study.steps, repeats=study.repeats, seconds=study.seconds,
    )  # fmt: skip
    uses = {} if data is None else rows.uses(data, training.batch_rows)
    return ReadyPoint(point, plan_placement(one, uses), data if study.data == "files" else None)


class PointRows:
    """What points read: made ready once for all that read the same, since it takes a pass over the training rows.

    Args:
        folder: Tables of workloads are kept below it.
        snapshot_id: Of the config's table; None takes the newest.
    """

    def __init__(self, folder: Path, snapshot_id: int | None) -> None:
        self.folder, self.snapshot_id = folder, snapshot_id
        self.prepared: dict[str, DataSpec] = {}
        self.samples: dict[str, list[Column]] = {}

    def of(self, workspace: Workspace) -> DataSpec | None:
        """The rows that a point reads; None: its batches are drawn in memory.

        Args:
            workspace: Has the config of the point.
        """
        config = workspace.config
        shape = config.characterize.workload
        if shape is None:
            rest = config.model_dump_json(exclude={"model", "training", "characterize"})
            if rest not in self.prepared:
                self.prepared[rest] = prepare_rows(workspace, self.snapshot_id)[1]
            return self.prepared[rest]
        if config.characterize.data == "memory":
            return None
        return write_dataset(shape, choose_rows(shape, config.training.batch_rows), self.folder / "tables", config.seed)

    def uses(self, data: DataSpec, batch_rows: int) -> dict[str, TableUse]:
        """How the tables are used in a sample of these rows."""
        key = data.model_dump_json()
        if key not in self.samples:
            self.samples[key] = list(Worker(data).sample(SAMPLE_ROWS))
        return measure_uses(data.plan.sparse, self.samples[key], batch_rows)


def _measure_group(members: Sequence[ReadyPoint], folder: Path, done: Callable[[PointResult], None]) -> None:
    """Measures points in the same ranks; ranks that a point kills are started again for the others."""
    left = {one.task.key: one for one in members}
    while left:
        before, begun = len(left), ""

        def hear(event: Event) -> None:
            nonlocal begun
            if event["event"] == "point_begins":
                begun = event["key"]
            elif event["event"] == "point":
                found = Measurement.model_validate(event["measurement"])
                done(PointResult(point=left.pop(event["key"]).point, state="measured", measurement=found))
            elif event["event"] == "point_failed":
                done(PointResult(point=left.pop(event["key"]).point, state="failed", reason=event["reason"]))

        try:
            _run(list(left.values()), folder, hear)
        except ContractError as error:  # what ends the ranks of one point, be it killed or refused in mid-step
            if begun not in left:
                raise
            done(PointResult(point=left.pop(begun).point, state="failed", reason=str(error)))
        if len(left) == before:
            raise TrainingError("measuring", "a result of every point", f"none of {before}", f"See {folder}.")
    shutil.rmtree(folder, ignore_errors=True)


def _run(members: Sequence[ReadyPoint], folder: Path, hear: Callable[[Event], None]) -> None:
    first = members[0]
    training, preprocessing = first.task.training, first.task.preprocessing
    with contextlib.ExitStack() as open_until_end:
        tasks = [one.task for one in members]
        if first.served is not None:
            service = Service({"train": first.served}, preprocessing, folder / "service")
            open_until_end.enter_context(service)
            tasks = [one.model_copy(update={"service": service.address}) for one in tasks]
        run_ranks(
            "pipeline.jobs.study.rank", MeasureSpec(training=training, tasks=tuple(tasks), folder=str(folder)), folder,
            training.world_size, training.threads_per_rank, Limits(hang_seconds=training.hang_seconds), hear, ROOT,
        )  # fmt: skip

"""Measures the points of an efficiency study one after the other. Ranks stay alive between points."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast, get_args

from pydantic import BaseModel, ValidationInfo, model_validator

from pipeline.config import RunConfig
from pipeline.config.files import ROOT
from pipeline.errors import ContractError, TrainingError
from pipeline.jobs.training.job import prepare_rows
from pipeline.jobs.training.rank.model import add_sharding_plan
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.service import Service
from pipeline.preprocessing.worker import Worker
from pipeline.study.measure.rank import MeasureSpec, MeasureTask
from pipeline.study.measure.results import Measurement, PointResult
from pipeline.study.points.config import CharacterizeConfig, Workload
from pipeline.study.points.load import StudyConfig, load_study
from pipeline.study.points.points import StudyPoint
from pipeline.study.points.table import choose_rows, write_dataset
from pipeline.study.points.workload import make_plan
from pipeline.training.launch.processes import Event, Limits, run_ranks
from pipeline.training.tables.statistics import SAMPLE_ROWS, TableUse, measure_table_use
from pipeline.transforms.column import Column
from storage.artifacts import MADE_AGAIN, read_note, write_json

POINTS = "points"
"""Folder of a study with a file for each point."""
OnResult = Callable[[PointResult, bool], PointResult]
"""Called with a result and whether it is from an earlier process. Returns the result to store."""


class PointEvent(BaseModel, frozen=True):
    """What the ranks say about a point. The context of the validation has the keys of points that they measure."""

    event: Literal["point_begins", "point", "point_failed"]
    key: str
    measurement: Measurement | None = None
    reason: str = ""

    @model_validator(mode="after")
    def _fits(self, info: ValidationInfo) -> Self:
        if self.key not in (info.context or ()):
            raise ValueError("no point that is measured now")
        if (self.event == "point") != (self.measurement is not None):
            raise ValueError("a measurement of each point that is measured, and of no other one")
        return self


def read_point(event: Event, keys: Collection[str]) -> PointEvent | None:
    """Returns what an event says about one of the points with these keys. None: it says something else."""
    known = get_args(PointEvent.model_fields["event"].annotation)
    return PointEvent.model_validate(event, context=keys) if event["event"] in known else None


def make_point_config(config: RunConfig, study: CharacterizeConfig, point: StudyPoint) -> StudyConfig:
    """Returns the config of a point."""
    values = config.model_copy(update={"training": config.training.on_one_host}).model_dump(mode="json")
    alone = study.model_copy(update={"axes": {}, "scale": 1.0}).model_dump(mode="json")
    return load_study(values | {"characterize": alone}, point.settings)


def load_point(folder: Path, point: StudyPoint) -> PointResult | None:
    """Returns the result of a point from an earlier process, else None."""
    path = folder / POINTS / f"{point.key}.json"
    return read_note(path, PointResult, MADE_AGAIN) if path.exists() else None


def save_point(folder: Path, result: PointResult) -> PointResult:
    """Writes a result to its file, and returns it."""
    write_json(folder / POINTS / f"{result.point.key}.json", result.model_dump(mode="json"))
    return result


@dataclass(frozen=True)
class ReadyPoint:
    """A point that is ready to be measured."""

    point: StudyPoint
    task: MeasureTask
    served: DataSpec | None = None
    """Rows that a preprocessing service reads during the measurement. None: no service."""

    @property
    def group(self) -> tuple[object, ...]:
        """Key of the ranks: points with the same key are measured by the same ranks."""
        training = self.task.training
        kind = (training.world_size, training.threads_per_rank, training.device, training.sync)
        return (*kind, self.point.key) if self.served is not None else kind


def measure_points(
    workspace: Workspace,
    study: CharacterizeConfig,
    points: Sequence[StudyPoint],
    folder: Path,
    on_result: OnResult = lambda result, stored: result,
    snapshot_id: int | None = None,
) -> list[PointResult]:
    """Measures the speed of points without a result in the folder. Measures failed ones again.

    Args:
        workspace: Has the config that the points override.
        folder: Receives a file for each point. No other process may use it.
        on_result: Called for each result.
        snapshot_id: Of the config's table, for points without a workload. None takes the newest.
    """
    results: dict[str, PointResult] = {}
    ready: list[ReadyPoint] = []
    rows = PointRows(folder, snapshot_id)

    def done(result: PointResult) -> None:
        results[result.point.key] = save_point(folder, on_result(result, False))

    for point in points:
        before = load_point(folder, point)
        if before is not None and before.state != "failed":
            results[point.key] = on_result(before, True)
            continue
        try:
            ready.append(_prepare_point(workspace, make_point_config(workspace.config, study, point), point, rows))
        except ContractError as error:
            done(PointResult(point=point, state="left out", reason=str(error)))
    for _, members in itertools.groupby(sorted(ready, key=lambda one: str(one.group)), key=lambda one: one.group):
        _measure_group(list(members), folder / "ranks", done)
    return [results[point.key] for point in points]


def _prepare_point(workspace: Workspace, settings: StudyConfig, point: StudyPoint, rows: "PointRows") -> ReadyPoint:
    """Prepares a point for the ranks.

    Raises:
        ContractError: If its tables cannot be sharded on these ranks with this memory.
    """
    study, training = settings.characterize, settings.training
    data = rows.load(workspace.with_config(settings.run), study)
    plan = make_plan(cast(Workload, study.workload)) if data is None else data.plan
    one = MeasureTask(
        key=point.key, model=settings.model, training=training, preprocessing=settings.preprocessing,
        seed=settings.seed, plan=plan, study=study, data=data,
    )  # fmt: skip
    uses = {} if data is None else rows.measure_uses(data, training.batch_rows)
    return ReadyPoint(point, add_sharding_plan(one, uses), data if study.data == "files" else None)


class PointRows:
    """Rows that points read. Points with the same rows share them: preparing rows takes a pass over them.

    Args:
        folder: Tables of workloads are written below it.
        snapshot_id: Of the config's table. None takes the newest.
    """

    def __init__(self, folder: Path, snapshot_id: int | None) -> None:
        self.folder, self.snapshot_id = folder, snapshot_id
        self.prepared: dict[str, DataSpec] = {}
        self.samples: dict[str, list[Column]] = {}

    def load(self, workspace: Workspace, study: CharacterizeConfig) -> DataSpec | None:
        """Returns the rows that a point reads. None: its batches are drawn in memory.

        Args:
            workspace: Has the config of the point.
        """
        config, shape = workspace.config, study.workload
        if shape is None:
            rest = config.model_dump_json(exclude={"model", "training"})
            if rest not in self.prepared:
                self.prepared[rest] = prepare_rows(workspace, self.snapshot_id)[1]
            return self.prepared[rest]
        if study.data == "memory":
            return None
        return write_dataset(shape, choose_rows(shape, config.training.batch_rows), self.folder / "tables", config.seed)

    def measure_uses(self, data: DataSpec, batch_rows: int) -> dict[str, TableUse]:
        """Measures the use of the tables on a sample of these rows."""
        key = data.model_dump_json()
        if key not in self.samples:
            self.samples[key] = list(Worker(data).sample(SAMPLE_ROWS))
        return measure_table_use(data.plan.sparse, self.samples[key], batch_rows)


def _measure_group(members: Sequence[ReadyPoint], folder: Path, done: Callable[[PointResult], None]) -> None:
    """Measures points with the same ranks. If a point kills the ranks, starts them again for the others."""
    left = {one.task.key: one for one in members}
    while left:
        before, current = len(left), ""

        def on_event(event: Event) -> None:
            nonlocal current
            said = read_point(event, left)
            if said is not None and said.event == "point_begins":
                current = said.key
            elif said is not None:
                point, found = left.pop(said.key).point, said.measurement
                state: Literal["measured", "failed"] = "failed" if found is None else "measured"
                done(PointResult(point=point, state=state, measurement=found, reason=said.reason or None))

        try:
            _run(list(left.values()), folder, on_event)
        except ContractError as error:  # a point ended the ranks: killed, or refused within a step
            if current not in left:
                raise
            done(PointResult(point=left.pop(current).point, state="failed", reason=str(error)))
        if len(left) == before:
            raise TrainingError("measuring", "a result for each point", f"none of {before}", f"See {folder}.")
    shutil.rmtree(folder, ignore_errors=True)


def _run(members: Sequence[ReadyPoint], folder: Path, on_event: Callable[[Event], None]) -> None:
    first = members[0]
    training, preprocessing = first.task.training, first.task.preprocessing
    with contextlib.ExitStack() as open_until_end:
        tasks = [one.task for one in members]
        if first.served is not None:
            service = Service({"train": first.served}, preprocessing, folder / "service")
            open_until_end.enter_context(service)
            tasks = [one.model_copy(update={"service": service.address}) for one in tasks]
        spec = MeasureSpec(training=training, tasks=tuple(tasks), folder=str(folder))
        run_ranks(
            "pipeline.study.measure.rank", spec, folder, training.world_size, training.threads_per_rank,
            Limits(hang_seconds=training.hang_seconds), on_event, ROOT,
        )  # fmt: skip

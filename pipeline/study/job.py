"""A pinned efficiency study: its points, its folder and its MLflow run."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.errors import ConfigError
from pipeline.jobs.code_version import read_commit
from pipeline.jobs.console import Console
from pipeline.jobs.training.identity import describe_joined, semantics
from pipeline.jobs.training.job import open_run, resolve_dataset
from pipeline.jobs.training.provenance import read_versions
from pipeline.jobs.training.rank.group import takes_cuda
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.registration.tracking import reporting_unreachable
from pipeline.study.measure.group import make_point_config
from pipeline.study.measure.machine import Machine, measure_machine, read_processor_name
from pipeline.study.measure.results import PointResult
from pipeline.study.points.config import CharacterizeConfig
from pipeline.study.points.points import StudyPoint, list_points
from pipeline.study.quality import check_point_sweep
from pipeline.training.launch.processes import resolve_threads
from storage.artifacts import read_note, read_values, write_json

RESULT, MACHINE, CODE = "result.json", "machine.json", "code.json"
"""Files of a study's folder: its result, the machine with its ceilings, and the first commit and versions."""
AGAIN = "Once it answers, run the same command again to resume."


class StudyJob(BaseModel, frozen=True):
    """A pinned study."""

    folder: str
    settings: CharacterizeConfig
    points: tuple[StudyPoint, ...]
    snapshot_id: int | None
    """Snapshot to read. None: the study has a workload of its own."""

    @property
    def name(self) -> str:
        """Name for people."""
        return Path(self.folder).name


@dataclass
class OpenStudy:
    """A running study."""

    workspace: Workspace
    job: StudyJob
    run_id: str
    machine: Machine
    code: Mapping[str, Any]
    """`commit` and `versions` of the code that measures."""
    results: list[PointResult] = field(default_factory=list)

    @property
    def console(self) -> Console:
        """Console of the workspace."""
        return self.workspace.console

    @property
    def folder(self) -> Path:
        """Folder of the study."""
        return Path(self.job.folder)


def pin_study(workspace: Workspace, settings: CharacterizeConfig, snapshot_id: int | None, force: bool) -> StudyJob:
    """Pins the study of a config on this machine, and checks every point. Finds a study that was started before.

    Args:
        snapshot_id: None takes the newest.
        force: Starts a new study if the last one has ended.
    Raises:
        ConfigError: If there is nothing to measure, or a point does not fit the config.
    """
    config = workspace.config
    if not settings.axes:
        expected = "at least one axis with its values"
        raise ConfigError("characterize.axes", expected, "none", "Add one: `training.batch_rows: [512, 2048]`.")
    found = list_points(settings)
    check = check_point_sweep if settings.measure == "quality" else make_point_config
    configs = [check(config, settings, point) for point in found]
    joined: dict[str, Any] = {}
    if settings.workload is None:
        snapshot, data = resolve_dataset(workspace.with_config(configs[0].run), snapshot_id)
        snapshot_id, read = snapshot.snapshot_id, data["train"]
        joined = describe_joined(workspace.warehouse, read.joined, snapshot, read.selection.days)
    inputs = {
        "study": settings.model_dump(mode="json"), "config": semantics(workspace, evaluation=True),
        "snapshot_id": snapshot_id, "sweep": config.sweep.model_dump(mode="json"),
        "threads": config.training.threads_per_rank,
        "machine": [read_processor_name(), len(os.sched_getaffinity(0))], **joined,
    }  # fmt: skip
    identity = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    folder = workspace.latest_folder("characterize", f"{config.name}-{identity[:12]}", RESULT, force)
    return StudyJob(folder=str(folder), settings=settings, points=tuple(found), snapshot_id=snapshot_id)


def load_result(workspace: Workspace, job: StudyJob) -> dict[str, Any] | None:
    """Returns the result of a study that is done, else None."""
    path = Path(job.folder) / RESULT
    if not path.exists():
        return None
    workspace.console.log.info("skipped: study %s is done; force=true starts a new one", job.name)
    return read_note(path, dict[str, Any]) | {"status": "skipped"}


@contextmanager
def open_study(workspace: Workspace, job: StudyJob) -> Iterator[OpenStudy]:
    """Locks the study's folder and opens its MLflow run. Ends the run in any case."""
    config = workspace.config
    params: Mapping[str, Any] = config.flat() | {
        f"characterize.{key}": value for key, value in job.settings.model_dump(mode="json").items()
    }
    tags = {"mlflow.source.name": "flows.characterize", "dlrm.study": job.name, "git_commit": read_commit()}
    if job.snapshot_id is not None:
        tags["snapshot_id"] = str(job.snapshot_id)
    with exclusive_dir(Path(job.folder)) as folder:
        machine, code = load_machine_facts(workspace, folder), load_code_version(workspace, folder)
        title = job.settings.experiment or "study"
        with (
            open_run(folder, workspace, f"{title} of {config.name}", params, tags, AGAIN) as (run_id, _),
            reporting_unreachable(AGAIN),
        ):
            yield OpenStudy(workspace, job, run_id, machine, code)


class _Began(BaseModel, frozen=True):
    """What the file of a study's first commit holds."""

    commit: str
    versions: Mapping[str, str]


def load_code_version(workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Returns commit and versions that a study started with. Warns if they are others now."""
    path, now = folder / CODE, {"commit": read_commit(), "versions": read_versions()}
    if not path.exists():
        write_json(path, now)
    began = read_values(path, _Began)
    if began != now:
        workspace.console.log.warning(
            "earlier points were measured at commit %s, the code is at %s now", began["commit"], now["commit"]
        )
    return began


def load_machine_facts(workspace: Workspace, folder: Path) -> Machine:
    """Returns the machine with its ceilings. Measures it once for each study."""
    path = folder / MACHINE
    if path.exists():
        return read_note(path, Machine)
    training = workspace.config.training
    threads = resolve_threads(training.threads_per_rank, training.world_size) * training.world_size
    machine = measure_machine(threads, "cuda" if takes_cuda(training) else "cpu")
    write_json(path, machine.model_dump(mode="json"))
    return machine

"""Calibrates this machine: measures the training of some models once, to predict the speed of others."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from pydantic import BaseModel

from models.config import DLRMConfig
from pipeline.errors import TrainingError
from pipeline.jobs.code_version import read_commit
from pipeline.jobs.console import step
from pipeline.jobs.training.provenance import read_versions
from pipeline.jobs.training.rank.group import takes_cuda
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.study.estimate.calibration_points import draw_points
from pipeline.study.estimate.memory import DescribedMachine
from pipeline.study.estimate.predict import TERMS, Fit, StepSample, fit
from pipeline.study.measure.group import measure_points
from pipeline.study.measure.machine import Machine, measure_machine, read_memory_bytes, read_processor_name
from pipeline.study.measure.results import Load, PointResult
from pipeline.study.points.config import CharacterizeConfig, Workload
from pipeline.training.config import TrainConfig
from storage.artifacts import read_note, write_json

FAR = 4.0
"""A prediction beyond this multiple of the largest measured work is an extrapolation."""
BUSY_SECONDS, MOST_BUSY = 1.0, 0.15
"""How long the load of the machine is measured, and the most that others may use: threads wait for the slowest."""
LEAST_POINTS = 6
"""Measured points that a prediction needs."""
QUICK = CharacterizeConfig(workload=Workload(), warm_up_steps=2, steps=4, repeats=5, seconds=1)
"""How each point is measured. Takes about two seconds."""
OWN = (
    "launcher", "sync", "device", "threads_per_rank", "embedding_kernel", "table_optimizer", "table_precision",
    "dense_optimizer", "dense_precision", "compile", "vector_communication", "gradient_communication", "send_ids_ahead",
    "table_memory",
)  # fmt: skip
"""Keys of `training` that points take from the config. Another kernel or precision has another calibration."""


class Calibration(BaseModel, frozen=True):
    """Measurements of a machine, from which other models are predicted."""

    machine: Machine
    marks: Mapping[str, Any]
    """Machine, versions and settings for which it is valid."""
    commit: str
    results: tuple[PointResult, ...]
    """Of measured points."""

    @property
    def process_bytes(self) -> int:
        """Memory of a rank without a model."""
        return min(one.peak_bytes - one.model_bytes for result in self.results if (one := result.measurement))


class Speed:
    """Predicts the time of a step on a calibrated machine, and the error of the prediction."""

    def __init__(self, calibration: Calibration) -> None:
        self.samples = [
            StepSample(
                key=result.point.key, load=one.load, world_size=result.point.settings["training.world_size"],
                step_ms=one.step_ms.median,
            )
            for result in calibration.results if (one := result.measurement)
        ]  # fmt: skip
        precision = calibration.marks["training"]["dense_precision"]
        self.fit: Fit = fit(self.samples, calibration.machine, precision)
        names = {result.point.key: result.point.name for result in calibration.results}
        self.table: list[dict[str, Any]] = [
            {
                "point": names[one.key],
                "rows": one.load.rows,
                "sparse": one.load.sparse_features,
                "predicted ms": predicted,
                "measured ms": one.step_ms,
                "predicted / measured": predicted / one.step_ms,
            }
            for one in self.samples
            if (predicted := self.fit.unseen_ms.get(one.key))
        ]
        """The points, each predicted from the points of the other folds."""

    def predict_step_ms(self, load: Load, ranks: int) -> float:
        """Returns milliseconds per step on this machine."""
        return self.fit.predict(load, ranks).step_ms

    def scale_to(self, machine: DescribedMachine) -> Callable[[Load, int], float]:
        """Returns the same prediction for another machine, scaled by the ratio of ceilings."""
        return lambda load, ranks: self.fit.predict(load, ranks, machine).step_ms

    def find_extrapolations(self, load: Load, ranks: int) -> list[tuple[str, float]]:
        """Returns (part of a step, multiple of the largest measured work) for parts beyond `FAR`."""
        found = []
        for name, term in TERMS.items():
            most = max(term.amount(one.load, one.world_size) for one in self.samples)
            value = term.amount(load, ranks)
            if most > 0 and value > FAR * most:
                found.append((name, value / most))
        return found


@step("calibrate")
def calibrate(workspace: Workspace, count: int, force: bool) -> Calibration:
    """Loads the calibration of this machine, or makes it. Safe to repeat: measured points stay.

    Args:
        count: Points to measure. If fewer exist, the others are added.
        force: Measures all points again.
    Raises:
        TrainingError: If too few points could be measured.
    """
    config = workspace.config
    base = workspace.with_config(config.model_copy(update=_point_settings(config.training)))
    training = base.config.training
    marks = list_marks(training)
    name = hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()[:12]
    logger = workspace.console.log
    with exclusive_dir(workspace.home / "characterize" / f"calibration-{name}") as folder:
        path = folder / "calibration.json"
        if force:
            shutil.rmtree(folder / "points", ignore_errors=True)
            path.unlink(missing_ok=True)
        found = read_note(path, Calibration) if path.exists() else None
        points = draw_points(count, list_world_sizes(count_possible_ranks(training)))
        if found is not None and {point.key for point in points} <= {one.point.key for one in found.results}:
            logger.info("calibration of this machine: %s points, of commit %s", len(found.results), found.commit)
            if found.commit != (now := read_commit()):
                logger.warning(
                    "the code is at %s now, and its steps may take another time; force=true calibrates again", now
                )
            return found
        logger.info("calibrating this machine: trains %s models of all shapes for some steps each", count)
        busy = psutil.cpu_percent(interval=BUSY_SECONDS) / 100.0
        if busy > MOST_BUSY:
            logger.warning(
                "%.0f%% of the processors are busy with other work: measured times will be too long", 100 * busy
            )
        with workspace.console.progress("points") as progress:
            done = itertools.count(1)

            def on_result(result: PointResult, stored: bool) -> PointResult:
                progress("calibrate", next(done), len(points))
                return result

            results = measure_points(base, QUICK, points, folder, on_result)
        good = tuple(result for result in results if result.measurement is not None)
        if len(good) < min(LEAST_POINTS, count):
            reason = next((result.reason for result in results if result.reason), "nothing")
            raise TrainingError(
                "calibration", f"at least {min(LEAST_POINTS, count)} points measured", f"{len(good)}: {reason}",
                "Free memory, or raise points.",
            )  # fmt: skip
        machine = measure_machine(len(os.sched_getaffinity(0)), "cuda" if takes_cuda(training) else "cpu")
        made = Calibration(machine=machine, marks=marks, commit=read_commit(), results=good)
        write_json(path, made.model_dump(mode="json"))
    return made


def _point_settings(training: TrainConfig) -> dict[str, Any]:
    """Sections that all points share. Of the config's own keys they keep those that change the cost of any step."""
    own = TrainConfig(**{key: getattr(training, key) for key in OWN}, world_size=1)
    return {"model": DLRMConfig(), "training": own, "preprocessing": PreprocessingConfig()}


def list_marks(training: TrainConfig) -> dict[str, Any]:
    """Returns what a calibration is valid for: machine, versions and settings."""
    values = training.model_dump(mode="json")
    machine = {"cpu": read_processor_name(), "cores": len(os.sched_getaffinity(0)), "memory_bytes": read_memory_bytes()}
    if takes_cuda(training):
        machine |= {"devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}
    return {"machine": machine, "versions": read_versions(), "training": {key: values[key] for key in OWN}}


def count_possible_ranks(training: TrainConfig) -> int:
    """Returns the number of CUDA devices if ranks run on them, else of cores."""
    return torch.cuda.device_count() if takes_cuda(training) else len(os.sched_getaffinity(0))


def list_world_sizes(cores: int) -> list[int]:
    """Returns the numbers of ranks to measure: powers of two.

    Example:
        >>> list_world_sizes(6)
        [1, 2, 4]
    """
    return [1 << power for power in range(cores.bit_length())]

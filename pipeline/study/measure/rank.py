"""A rank of an efficiency study: measures speed, memory and the phases of a step, point after point.

A composition root like `training/rank`. The same ranks measure many points, since starting them takes longer than
most points. Steps are those of the trainer on the sharded model. Batches are in memory before the clock starts, or come
from the preprocessing service.
"""

import ctypes
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from models.config import DLRMConfig
from pipeline.data.batch import Batch
from pipeline.data.position import NO_TIMES, Position
from pipeline.errors import ConfigError, ContractError
from pipeline.jobs.training.rank.group import open_event_writer, run_rank
from pipeline.jobs.training.rank.model import build_model, build_unsharded, open_client
from pipeline.preprocessing.client import InlineSource, open_remote_source
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.transport.addresses import ServiceAddress
from pipeline.study.measure import phases
from pipeline.study.measure.cost import count_batch_load
from pipeline.study.measure.phases import BACKWARD, StepPart, StepSplit
from pipeline.study.measure.results import Measurement, Spread
from pipeline.study.points import workload
from pipeline.study.points.config import CharacterizeConfig
from pipeline.training.asynchronous import SharedLearner
from pipeline.training.config import TrainConfig
from pipeline.training.interaction import NumbaDots
from pipeline.training.launch.heartbeat import Heartbeat
from pipeline.training.restore import Restore
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.tables.bags import NumbaBags
from pipeline.training.tables.loops import LoopThreads
from pipeline.training.tables.plan import ShardingPlan
from pipeline.training.tables.sharding import iter_lookups
from pipeline.training.tables.torchrec_private import ranks_of
from pipeline.training.trainer import Trainer, TrainingData
from pipeline.transforms.plan.plan import Plan

BATCHES = 8
"""Different batches in memory, trained in turn. With fewer, the rows of the tables would stay in the cache."""
BATCHES_BYTES = 1 << 30
"""Most memory of these batches. There are at least four in any case."""
LEAST_REPEATS = 3
SPLIT_STEPS = 5
"""Steps whose time is split into phases."""
KEEP_NOTHING = dict.fromkeys(
    ("checkpoint_every_steps", "checkpoint_every_seconds", "average_from_step", "average_from")
)
REFUSALS = (ContractError, MemoryError, ValueError, RuntimeError)
"""Errors of a point that cannot be measured. The next point may succeed."""

Emit = Callable[[dict[str, Any]], None]


class MeasureTask(BaseModel, frozen=True):
    """A point as ranks measure it."""

    key: str
    model: DLRMConfig
    training: TrainConfig
    preprocessing: PreprocessingConfig
    seed: int
    plan: Plan
    study: CharacterizeConfig
    """How to measure, and the shape of the batches that are drawn in memory if there is no `data`."""
    data: DataSpec | None
    service: str | ServiceAddress | None = None
    """Address of the preprocessing service, which has `data` under the name `train`. None: the first batches are read
    before the clock starts."""
    placement: ShardingPlan | None = None


class MeasureSpec(BaseModel, frozen=True):
    """All that a rank needs to know."""

    training: TrainConfig
    """Settings of the group: every task has its ranks, threads and device."""
    tasks: tuple[MeasureTask, ...]
    folder: str


def main(path: str) -> None:
    """Measures as one rank of a group."""
    run_rank(path, MeasureSpec, measure_all)


def measure_all(spec: MeasureSpec, rank: int, device: torch.device, emit: Emit | None = None) -> None:
    """Measures all points. Emits an event at the beginning and the end of each."""
    emit = emit or open_event_writer()
    heartbeat = Heartbeat(emit)
    for task in spec.tasks:
        emit({"event": "point_begins", "key": task.key})
        heartbeat.report(f"measuring {task.key}")
        try:
            with MeasuredPoint(task, rank, device) as point:
                measurement = point.measure()
            emit({"event": "point", "key": task.key, "measurement": measurement.model_dump(mode="json")})
        except REFUSALS as error:
            if dist.get_world_size() > 1 and not isinstance(error, RefusedByAllError):
                raise  # the others may wait for this rank
            emit({"event": "point_failed", "key": task.key, "reason": _describe_error(error)})
    emit({"event": "result", "points": len(spec.tasks)})


class RefusedByAllError(RuntimeError):
    """A point that no rank starts, because one of them cannot."""


class MeasuredPoint:
    """One rank's part of a measurement. Frees all memory at the end."""

    def __init__(self, task: MeasureTask, rank: int, device: torch.device) -> None:
        self.task, self.rank, self.device = task, rank, device
        self.kept: list[Batch] = []
        self.trainer: Trainer | None = None
        self.steps: Iterator[tuple[Batch, Batch | None]] | None = None

    def __enter__(self) -> "MeasuredPoint":
        return self

    def __exit__(self, *error: object) -> None:
        if self.trainer is not None:
            release_trainer(self.trainer)
        self.trainer = self.steps = None
        self.kept = []
        give_memory_back()

    def measure(self) -> Measurement:
        """Measures the point. Speed and memory are those of the slowest and largest rank.

        Raises:
            RefusedByAllError: If a rank cannot get its batches or its model. Raised before any rank waits for another.
        """
        task = self.task
        self.agree_on(self.prepare)
        memory = Memory(self.device)
        began = time.perf_counter()
        self.build()
        for _ in range(task.study.warm_up_steps):
            self.step()
        warm = self.gather_slowest([time.perf_counter() - began])[0] / task.study.warm_up_steps
        seconds = self.repeat(warm)
        spread = Spread.of([1e3 * value for value in seconds])
        split = self.split(spread.median)
        peak, above = self.gather_slowest(memory.peaks())
        return self.make_measurement(seconds, split, (int(peak), int(above)))

    def prepare(self) -> None:
        """Does the work that can fail on a single rank."""
        build_unsharded(self.task)  # refuses shapes that do not fit together
        if self.task.service is None:
            self.kept = load_batches(self.task, self.rank)

    def agree_on(self, action: Callable[[], None]) -> None:
        """Runs an action. Raises on all ranks if it fails on one."""
        reason = ""
        try:
            action()
        except REFUSALS as error:
            reason = _describe_error(error)
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        if any(reasons):
            raise RefusedByAllError(next(filter(None, reasons)))

    def build(self) -> None:
        """Builds the trainer."""
        task = self.task
        torch.manual_seed(task.seed)
        model, _ = build_model(task, dist.get_world_size(), self.device, drawn=False)
        config = task.training.model_copy(update=KEEP_NOTHING)
        source = self.read_service() if task.service is not None else itertools.cycle(self.kept)
        data, nothing = TrainingData(lambda position: source), Restore(Checkpoints(Path()))
        self.trainer = Trainer(model, config, data, nothing, lambda event: None, task.seed, self.device)
        self.trainer.threads = None  # a measured step has the threads that the config gives it
        self.steps = self.trainer.steps()

    def read_service(self) -> Iterator[Batch]:
        """Yields the batches of the service, epoch after epoch."""
        task = self.task
        assert task.data is not None
        assert task.service is not None
        source = open_remote_source(task.service, task.preprocessing.connections)
        reader = open_client(task, source, "train", task.data, self.rank, shuffled=True)
        for epoch in itertools.count():
            yield from reader.batches(Position(epoch=epoch))

    def next(self) -> tuple[Batch, Batch | None]:
        """Returns the next batch on this rank's device, and the one after it."""
        assert self.steps is not None
        return next(self.steps)

    def step(self) -> None:
        """Runs a step of the trainer."""
        assert self.trainer is not None
        batch, coming = self.next()
        self.trainer.train_step(batch, coming)
        self.trainer.progress = self.trainer.progress.after(batch)

    def repeat(self, warm: float) -> list[float]:
        """Returns seconds per step on the slowest rank, one mean for each repeat.

        Args:
            warm: About the seconds of a step. Repeats get fewer steps if even the least number would take too long.
        """
        assert self.trainer is not None
        study, found, whole = self.task.study, list[float](), 0.0
        steps = study.steps
        if study.seconds is not None:
            steps = min(steps, max(int(study.seconds / LEAST_REPEATS / max(warm, 1e-6)), 1))
        while len(found) < study.repeats:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                self.step()
            self.trainer.times.await_device(self.device)
            (taken,) = self.gather_slowest([time.perf_counter() - began])
            self.trainer.times.take()
            found.append(taken / steps)
            whole += taken
            if study.seconds is not None and whole > study.seconds and len(found) >= LEAST_REPEATS:
                break
        return found

    def split(self, step_ms: float) -> StepSplit:
        """Splits the time of a step of this rank into phases."""
        assert self.trainer is not None
        config = self.task.training
        several = dist.get_world_size() > 1 and config.sync == "synchronous"
        parts = [StepPart(self, "next", "wait"), *list_parts(self.trainer)]
        # Steps of a period differ. Periods are alike.
        alike = config.easgd_period_steps if config.sync == "easgd" else 1

        def steps() -> None:
            for _ in range(alike):
                self.step()

        times = max(SPLIT_STEPS // alike, 2)
        found = phases.split_step(steps, parts, times, alike * step_ms, self.device, meet=several)
        return found._replace(outside_ms=found.outside_ms / alike)

    def gather_slowest(self, values: Sequence[float]) -> list[float]:
        """Returns the largest value over all ranks, for each number."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return [float(value) for value in largest.tolist()]

    def make_measurement(self, seconds: Sequence[float], split: StepSplit, memory: tuple[int, int]) -> Measurement:
        """Returns all results of the point."""
        task = self.task
        rows = task.training.batch_rows
        step = Spread.of([1e3 * value for value in seconds])
        speed = Spread.of([rows / value for value in seconds])
        kept = self.kept or [self.next()[0] for _ in range(BATCHES)]
        kinds = {table.table: table.kind for table in task.placement or ()}
        load = count_batch_load(
            task.model, len(task.plan.dense), task.plan.sparse, [batch.to(torch.device("cpu")) for batch in kept],
            task.training, kinds,
        )  # fmt: skip
        cores = task.training.world_size * (torch.get_num_threads() if self.device.type == "cpu" else 1)
        return Measurement(
            rows_per_second=speed, step_ms=step,
            split_ms={phase: share * step.median for phase, share in split.shares.items()},
            outside_share=min(split.outside_ms / step.median, 1.0),
            peak_bytes=memory[0], model_bytes=memory[1], load=load,
            rows_per_second_per_core=speed.median / cores, device=self.device.type, repeats=len(seconds),
        )  # fmt: skip


def load_batches(task: MeasureTask, rank: int) -> list[Batch]:
    """Returns this rank's share of different batches, all of full size.

    Raises:
        ConfigError: If there are too few rows for one batch.
    """
    rows, world_size = task.training.batch_rows, task.training.world_size
    shape = task.study.workload
    if task.data is None and shape is not None:
        sample = 4 * shape.dense_features + (8 * shape.lookups + 4) * shape.sparse_features
        count = max(min(BATCHES, BATCHES_BYTES * world_size // (rows * max(sample, 1))), 4)
        return workload.draw_batches(shape, rows, count, task.seed, rank, world_size)
    assert task.data is not None
    whole = task.preprocessing.model_copy(update={"on_corrupt": "fail"})  # nobody would hear of lost rows
    reader = open_client(task, InlineSource({"train": task.data}, whole), "train", task.data, rank, shuffled=True)
    first = itertools.islice(reader.batches(), BATCHES)
    kept = [replace(batch, times=NO_TIMES) for batch in first if batch.global_rows == rows]
    if not kept:
        raise ConfigError("training.batch_rows", "no more rows than there are to train on", f"{rows}", "Lower it.")
    return kept


def list_parts(trainer: Trainer) -> list[StepPart]:
    """Returns the calls that make up a step. Time in nested calls counts for the inner one."""
    inner: Any = get_unwrapped_module(trainer.model)
    learner, prefetcher = trainer.learner, trainer.step.prefetcher
    parts = [
        StepPart(inner, "pool", "embedding"),
        StepPart(learner.optimizer, "step", "optimizer"),
        StepPart(torch.autograd, "backward", BACKWARD),
        StepPart(dist.Work, "wait", "communication", compiled=True),
        *(StepPart(threads, "run", None, compiled=True) for threads in find_loop_threads(trainer.model)),
    ]
    if learner.replicated is not None:
        parts.append(StepPart(learner.replicated, "step", "optimizer"))
    if prefetcher is not None:
        parts += [StepPart(prefetcher, name, "communication") for name in ("announce", "send")]
    if isinstance(learner, SharedLearner):
        parts.append(StepPart(learner, "exchange", "communication"))
    if trainer.config.compile:
        return [*parts, StepPart(inner, "score", "mlp")]
    layers = [layer for layer in (inner.bottom, inner.top, inner.logit) if layer is not None]
    return [*parts, StepPart(inner, "score", "interaction"), *(StepPart(layer, "forward", "mlp") for layer in layers)]


def find_loop_threads(model: DistributedModelParallel) -> list[LoopThreads]:
    """Returns the threads of this rank's modules that run our own loops: tables, and the interaction."""
    modules = itertools.chain(model.modules(), *(lookup.modules() for lookup in iter_lookups(model)))
    return [module.loops for module in modules if isinstance(module, NumbaBags | NumbaDots)]


def release_trainer(trainer: Trainer) -> None:
    """Releases what a trainer leaves behind: threads of its kernels, its group, its compiled code."""
    for threads in find_loop_threads(trainer.model):
        threads.close()
    if isinstance(trainer.learner, SharedLearner):
        trainer.learner.close()
        dist.destroy_process_group(ranks_of(trainer.model))  # of this rank alone
    if trainer.config.compile:
        torch.compiler.reset()


def give_memory_back() -> None:
    """Returns unused memory to the system. Otherwise it would count for the next point."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Memory:
    """Peak memory since construction: resident memory of this process, or memory of its CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        give_memory_back()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            # Resets the high-water mark to the current use.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.before = self._peak()

    def peaks(self) -> tuple[float, float]:
        """Returns (peak bytes, peak above the bytes at construction)."""
        peak = self._peak()
        return peak, peak - self.before

    def _peak(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _describe_error(error: BaseException) -> str:
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1])

"""Speed, memory and where the time goes of many configurations, measured one after the other by the same ranks.

The third composition root beside `rank.py`: starting ranks takes longer than most points. Steps are those of the
trainer on the sharded model; batches are in memory before the clock starts, or come from the preprocessing service.
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
from pipeline.characterization import phases, workload
from pipeline.characterization.config import Workload
from pipeline.characterization.cost import LoadSetup, count_batch_load
from pipeline.characterization.machine import Power
from pipeline.characterization.phases import BACKWARD, StepPart, StepSplit
from pipeline.characterization.results import Measurement, Spread
from pipeline.data.batch import NO_TIMES, Batch, Position
from pipeline.errors import ConfigError, ContractError
from pipeline.jobs.training.rank import build_model, build_unsharded, open_client, open_event_writer, run_rank
from pipeline.preprocessing.client import InlineSource, ServiceSource
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.training.asynchronous import AsyncTrainer
from pipeline.training.config import TrainConfig
from pipeline.training.launch.heartbeat import Heartbeat
from pipeline.training.tables.bags import NumbaBags
from pipeline.training.tables.sharding import ShardingPlan, iter_lookups
from pipeline.training.trainer import Trainer
from pipeline.transforms.plan.plan import Plan

BATCHES = 8
"""Different batches in memory, trained in turn: rows of tables are not all in the processor's cache."""
BATCHES_BYTES = 1 << 30
"""Memory that they may take, but for the first four."""
LEAST_REPEATS = 3
SPLIT_STEPS = 5
"""Steps whose time is split."""
KEEP_NOTHING = {"checkpoint_every_steps": None, "checkpoint_every_seconds": None, "average_from_step": None}
REFUSALS = (ContractError, MemoryError, ValueError, RuntimeError)
"""What a point that cannot be measured raises; the next one may go well."""

Emit = Callable[[dict[str, Any]], None]


class MeasureTask(BaseModel, frozen=True):
    """A point, as ranks need to know it."""

    key: str
    model: DLRMConfig
    training: TrainConfig
    preprocessing: PreprocessingConfig
    seed: int
    plan: Plan
    workload: Workload | None
    """Batches are drawn in memory, in this shape; None: they are those of `data`."""
    data: DataSpec | None
    service: str | None = None
    """Address of the preprocessing service that has `data` by the name `train`; None: the first batches are read before
    the clock starts."""
    placement: ShardingPlan | None = None
    warm_up_steps: int
    steps: int
    repeats: int
    seconds: int | None


class MeasureSpec(BaseModel, frozen=True):
    """All that a rank needs to know."""

    training: TrainConfig
    """Of the group: ranks, threads and device are those of every task."""
    tasks: tuple[MeasureTask, ...]
    folder: str


def main(path: str) -> None:
    """Measures as one rank of a group."""
    run_rank(path, MeasureSpec, measure_all)


def measure_all(spec: MeasureSpec, rank: int, device: torch.device, emit: Emit | None = None) -> None:
    """All points; an event as each begins and ends."""
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
    """A point that no rank has begun, because one of them cannot."""


class MeasuredPoint:
    """One rank's part of a measurement; nothing of it stays in memory when it is left."""

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
        """Everything that is known of the point, the same on every rank.

        Raises:
            RefusedByAllError: If a rank cannot get its batches or its model; before any waits for another.
        """
        task = self.task
        self.agreed(self.prepare)
        memory = Memory(self.device)
        began = time.perf_counter()
        self.build()
        for _ in range(task.warm_up_steps):
            self.step()
        warm = self.slowest([time.perf_counter() - began])[0] / task.warm_up_steps
        power = Power(self.device.type)
        seconds = self.repeat(warm)
        watts = power.watts()
        spread = Spread.of([1e3 * value for value in seconds])
        split = self.split(spread.median)
        peak, above = self.slowest(memory.peaks())
        return self.measurement(seconds, split, (int(peak), int(above)), watts)

    def prepare(self) -> None:
        """What can fail on one rank alone."""
        build_unsharded(self.task)  # refuses shapes that do not fit
        if self.task.service is None:
            self.kept = load_batches(self.task, self.rank)

    def agreed(self, action: Callable[[], None]) -> None:
        """Does it, and goes on only if all ranks can."""
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
        """The trainer, ready to step."""
        task = self.task
        torch.manual_seed(task.seed)
        model, _ = build_model(task, dist.get_world_size(), self.device, drawn=False)
        kind = Trainer if task.training.sync == "synchronous" else AsyncTrainer
        config = task.training.model_copy(update=KEEP_NOTHING)
        source = self.from_service() if task.service is not None else itertools.cycle(self.kept)
        self.trainer = kind(
            model, config, lambda position: source, None, Path(), lambda event: None, task.seed, self.device
        )
        self.steps = self.trainer.steps()

    def from_service(self) -> Iterator[Batch]:
        """Batches of the service, epoch after epoch."""
        task = self.task
        assert task.data is not None
        assert task.service is not None
        reader = open_client(task, ServiceSource(task.service), "train", task.data, self.rank, shuffled=True)
        for epoch in itertools.count():
            yield from reader.batches(Position(epoch=epoch))

    def next(self) -> tuple[Batch, Batch | None]:
        """The next batch on this rank's device."""
        assert self.steps is not None
        return next(self.steps)

    def step(self) -> None:
        """One step of the trainer."""
        assert self.trainer is not None
        batch, coming = self.next()
        self.trainer.train_step(batch, coming)
        self.trainer.progress = self.trainer.progress.after(batch)

    def repeat(self, warm: float) -> list[float]:
        """Seconds of a step on the slowest rank, in the mean of each repeat.

        Args:
            warm: Seconds of a step, about; where even the least repeats would take too long they are made shorter.
        """
        assert self.trainer is not None
        task, found, whole = self.task, list[float](), 0.0
        steps = task.steps
        if task.seconds is not None:
            steps = min(steps, max(int(task.seconds / LEAST_REPEATS / max(warm, 1e-6)), 1))
        while len(found) < task.repeats:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                self.step()
            self.trainer.await_device()
            (taken,) = self.slowest([time.perf_counter() - began])
            self.trainer.times.clear()
            found.append(taken / steps)
            whole += taken
            if task.seconds is not None and whole > task.seconds and len(found) >= LEAST_REPEATS:
                break
        return found

    def split(self, step_ms: float) -> StepSplit:
        """Where the time of a step of this rank goes."""
        assert self.trainer is not None
        config = self.task.training
        several = dist.get_world_size() > 1 and config.sync == "synchronous"
        parts = [StepPart(self, "next", "wait"), *list_parts(self.trainer)]
        alike = config.easgd_period_steps if config.sync == "easgd" else 1  # so many in a row are like the next so many

        def steps() -> None:
            for _ in range(alike):
                self.step()

        times = max(SPLIT_STEPS // alike, 2)
        found = phases.split_step(steps, parts, times, alike * step_ms, self.device, meet=several)
        return found._replace(outside_ms=found.outside_ms / alike)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, number by number."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return [float(value) for value in largest.tolist()]

    def measurement(
        self, seconds: Sequence[float], split: StepSplit, memory: tuple[int, int], watts: float | None
    ) -> Measurement:
        """All figures together."""
        task = self.task
        rows = task.training.batch_rows
        step = Spread.of([1e3 * value for value in seconds])
        speed = Spread.of([rows / value for value in seconds])
        kept = self.kept or [self.next()[0] for _ in range(BATCHES)]
        kinds = {table.table: table.kind for table in task.placement or ()}
        load = count_batch_load(
            task.model, len(task.plan.dense), task.plan.sparse, [batch.to(torch.device("cpu")) for batch in kept],
            LoadSetup.model_validate(task.training), kinds,
        )  # fmt: skip
        cores = task.training.world_size * (torch.get_num_threads() if self.device.type == "cpu" else 1)
        return Measurement(
            rows_per_second=speed, step_ms=step,
            split_ms={phase: share * step.median for phase, share in split.shares.items()},
            outside_share=min(split.outside_ms / step.median, 1.0),
            peak_bytes=memory[0], model_bytes=memory[1], load=load,
            watts=watts, rows_per_second_per_core=speed.median / cores, device=self.device.type, repeats=len(seconds),
        )  # fmt: skip


def load_batches(task: MeasureTask, rank: int) -> list[Batch]:
    """This rank's share of different batches, all of them whole.

    Raises:
        ConfigError: If the rows are not enough for one batch.
    """
    rows, world_size = task.training.batch_rows, task.training.world_size
    if task.workload is not None:
        shape = task.workload
        sample = 4 * shape.dense_features + (8 * shape.lookups + 4) * shape.sparse_features
        count = max(min(BATCHES, BATCHES_BYTES * world_size // (rows * max(sample, 1))), 4)
        return workload.draw_batches(shape, rows, count, task.seed, rank, world_size)
    assert task.data is not None
    reader = open_client(
        task, InlineSource({"train": task.data}, task.preprocessing), "train", task.data, rank, shuffled=True
    )
    first = itertools.islice(reader.batches(), BATCHES)
    kept = [replace(batch, times=NO_TIMES) for batch in first if batch.global_rows == rows]
    if not kept:
        raise ConfigError("training.batch_rows", "no more rows than there are to train on", f"{rows}", "Lower it.")
    return kept


def list_parts(trainer: Trainer) -> list[StepPart]:
    """What a step is made of. Inside of a call the inner ones count."""
    inner: Any = get_unwrapped_module(trainer.model)
    parts = [
        StepPart(inner, "pool", "embedding"),
        StepPart(trainer.optimizer, "step", "optimizer"),
        StepPart(torch.autograd, "backward", BACKWARD),
        StepPart(dist.Work, "wait", "communication", compiled=True),
        *(StepPart(bags, "_run_parallel", None, compiled=True) for bags in find_own_kernels(trainer.model)),
    ]
    if trainer.replicated is not None:
        parts.append(StepPart(trainer.replicated, "step", "optimizer"))
    if trainer.prefetcher is not None:
        parts += [
            StepPart(trainer.prefetcher, "announce", "communication"),
            StepPart(trainer.prefetcher, "send", "communication"),
        ]
    if isinstance(trainer, AsyncTrainer):
        parts.append(StepPart(trainer, "exchange", "communication"))
    if trainer.config.compile:
        return [*parts, StepPart(inner, "score", "mlp")]
    layers = [layer for layer in (inner.bottom, inner.top, inner.logit) if layer is not None]
    return [*parts, StepPart(inner, "score", "interaction"), *(StepPart(layer, "forward", "mlp") for layer in layers)]


def find_own_kernels(model: DistributedModelParallel) -> list[NumbaBags]:
    """The kernels of this rank's tables that are ours."""
    return [module for lookup in iter_lookups(model) for module in lookup.modules() if isinstance(module, NumbaBags)]


def release_trainer(trainer: Trainer) -> None:
    """Ends what a trainer leaves running: threads of its kernels, its group, its compiled code."""
    for bags in find_own_kernels(trainer.model):
        if bags.pool is not None:
            bags.pool.shutdown()
    if isinstance(trainer, AsyncTrainer):
        trainer.close()
        dist.destroy_process_group(trainer.model._env.process_group)  # of this rank alone
    if trainer.config.compile:
        torch._dynamo.reset()


def give_memory_back() -> None:
    """What is not used any more goes back to the system, so that the next point does not find it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Memory:
    """The largest memory since this was made: resident of this process, or of its CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        give_memory_back()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark is what is used now
        self.before = self._peak()

    def peaks(self) -> tuple[float, float]:
        """(bytes, bytes above those at the beginning)."""
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

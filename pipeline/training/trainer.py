"""The training loop."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.data.batch import Batch
from pipeline.data.position import LostRows, Position, Times
from pipeline.errors import TrainingError
from pipeline.training.config import TrainConfig
from pipeline.training.graph import DenseGraph, build_graph
from pipeline.training.lanes import Lanes, lane_seed, one_thread
from pipeline.training.loss import logits_of, loss_sums
from pipeline.training.optim import (
    TABLES,
    LearningRates,
    ReplicatedTables,
    dense_optimizer,
    dense_parameters,
    replicated_tables,
)
from pipeline.training.staging import move_batches
from pipeline.training.state import checkpoint
from pipeline.training.state.async_checkpoint import AsyncCheckpointer
from pipeline.training.state.averaging import WeightAverage
from pipeline.training.state.checkpoint import BEST, LOWER, CheckpointError, Identity, local_parts
from pipeline.training.state.checkpoints import Checkpoints, StoredCheckpoints
from pipeline.training.state.export import export_weights
from pipeline.training.state.progress import LossSums, TrainingProgress, load_progress
from pipeline.training.tables.cached import drop_cache
from pipeline.training.tables.prefetch import InputDistPrefetcher, with_next
from pipeline.training.threads import choose_threads, has_same_bits
from storage.objects import ObjectFolder

RECENT_STEPS = 256
"""Number of last steps with times in memory."""
SKIPPED_IN_A_ROW = 10
"""Abort after this many consecutive batches with a non-finite loss."""


class Trainer:
    """Trains one model on the given batches.

    Args:
        batches: Position -> the remaining batches of this rank in that epoch.
        validate: Model -> loss sums over the validation rows. None: no validation.
        folder: Folder of the checkpoints.
        emit: Takes events as JSON values on rank 0, possibly from another thread. They go to the launcher.
        identity: What the checkpoints belong to. Checkpoints of another identity are refused.
        begin: Called if there is no checkpoint to resume from, to start from another training's. None: start from the
            initial weights.
        lost: Returns at the end of an epoch the row groups that were quarantined up to there. None: there are none.
        keeps_lost: Whether to go on from a checkpoint that lacks quarantined rows.
        store: Where checkpoints are. `folder` then holds copies of them. None: they are in `folder`.
        claim: Token with which the training has claimed those in the store.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        config: TrainConfig,
        batches: Callable[[Position], Iterator[Batch]],
        validate: Callable[[DistributedModelParallel], LossSums] | None,
        folder: Path,
        emit: Callable[[dict[str, Any]], None],
        seed: int,
        device: torch.device,
        identity: Identity | None = None,
        begin: "Callable[[Trainer], None] | None" = None,
        lost: Callable[[], tuple[LostRows, ...]] | None = None,
        keeps_lost: bool = True,
        store: ObjectFolder | None = None,
        claim: str | None = None,
    ) -> None:
        self.model, self.config, self.batches, self.validation = model, config, batches, validate
        self.emit, self.seed, self.device = emit, seed, device
        self.optimizer = dense_optimizer(model, config)
        replicated = replicated_tables(model)
        self.replicated = ReplicatedTables(replicated, config) if replicated else None
        self.rates = LearningRates(model, self.optimizer, config, self.replicated)
        self.dense = [parameter for _, parameter in dense_parameters(model)]
        self.lanes = None if config.lanes is None else Lanes(model, config, self.dense)
        self.draws = any(isinstance(module, nn.Dropout) and module.p > 0.0 for module in model.modules())
        rounds = config.table_precision == "fp16" and device.type == "cuda"  # FBGEMM rounds updates at random there
        self.reseeds = self.lanes is None and (self.draws or rounds)
        self.graph = build_graph(model, config, self.dense, device, self.draws)
        self.threads = choose_threads(model, config, device, self.report_threads)
        several = config.sync == "synchronous" and dist.get_world_size() > 1
        self.prefetcher = InputDistPrefetcher(model) if config.send_ids_ahead and several else None
        self.identity, self.begin = identity or {}, begin
        self.lost, self.keeps_lost = lost, keeps_lost
        self.checkpoints = Checkpoints(folder) if store is None else StoredCheckpoints(folder, store, claim)
        self.checkpointer = AsyncCheckpointer(config.checkpoint_async, self.checkpoints)
        self.progress = TrainingProgress()
        self.average = None if config.average_from_step is None else WeightAverage(model)
        parts = () if self.lanes is None else (len(self.lanes.own),)
        self.window = torch.zeros(*parts, 4, dtype=torch.float64, device=device)
        self.step_seconds = 0.0
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.times: list[Times] = []

    def train(self) -> TrainingProgress:
        """Trains to the end of the plan, starting from the last checkpoint if there is one."""
        with self.checkpointer:
            self.restore()
            while not self.done():
                self.train_epoch()
            self.use_all_threads()
            self.finish()
        self.require_steps()
        return self.progress

    def train_epoch(self) -> None:
        """Trains the rest of the epoch, or to the end of the plan if that comes first."""
        for batch, coming in self.steps():
            self.train_step(batch, coming)
            self.progress = self.progress.after(batch)  # the batch trained, not the batch prefetched
            if self.due(self.config.average_every_steps):
                self.take_average()
            if self.due(self.config.log_every_steps):
                self.log()
            if self.due(self.config.validate_every_steps):
                self.validate()
            seconds = self.config.checkpoint_every_seconds
            if self.due(self.config.checkpoint_every_steps) or self.checkpointer.due(seconds):
                self.save()
            self.checkpointer.check()
            if self.done():
                if self.prefetcher is not None:
                    self.prefetcher.drain()
                return
        self.end_epoch()

    def steps(self) -> Iterator[tuple[Batch, Batch | None]]:
        """Yields the remaining batches of the epoch, each with the next batch if its ids are prefetched."""
        batches = move_batches(self.batches(self.progress.position), self.device, self.model)
        if self.lanes is not None:  # a list that rows share adds their gradients first, but only if they share a rank
            batches = (batch.plain for batch in batches)
        return ((batch, None) for batch in batches) if self.prefetcher is None else with_next(batches)

    def require_steps(self) -> None:
        """Checks that rows sufficed for `max_steps`.

        Raises:
            TrainingError: If fewer updates were made and training was not stopped early.
        """
        wanted, patience = self.config.max_steps, self.config.patience
        stopped = patience is not None and self.progress.worse_validations >= patience
        if wanted is not None and self.progress.steps < wanted and not stopped:
            raise TrainingError(
                "training.max_steps",
                f"{wanted} steps",
                f"rows for {self.progress.steps}",
                "Raise epochs, or lower max_steps.",
            )

    def train_step(self, batch: Batch, coming: Batch | None = None) -> None:
        """Makes a step: forward, backward, update. The loss is the mean over the GLOBAL batch, not this rank's rows.

        If rows have weights, it is the weighted mean, so learning rates keep their meaning.

        Args:
            batch: A batch on this rank's device.
            coming: The next batch, if its ids are prefetched.
        """
        start = time.perf_counter()
        if self.reseeds:  # random numbers depend only on the step, so a resumed run repeats them
            words = [self.seed, self.progress.steps, dist.get_rank()]
            torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))
        self.rates.set(self.progress.steps, self.progress.steps_before)
        for parameter in self.dense:  # like the optimizer's zero_grad, without its hooks
            parameter.grad = None
        if self.replicated is not None:
            self.replicated.zero_grad()
        if self.prefetcher is not None:
            self.prefetcher.announce(coming)
        if self.lanes is not None:
            with one_thread():
                self.train_lanes(batch, self.lanes)
        elif self.graph is not None and self.graph.fits(batch):
            self.train_graph(batch, self.graph)
        else:
            self.train_whole(batch)
        self.times.append(batch.times)
        self.recent.append(time.perf_counter() - start)
        self.step_seconds += self.recent[-1]
        if self.threads is not None:
            check = partial(has_same_bits, self.model, self.config, self.dense, batch, self.threads.most)
            self.threads.after_step(self.recent[-1], check)

    def use_all_threads(self) -> None:
        """Ends the choice of threads by the time of a step."""
        if self.threads is not None:
            self.threads.restore()

    def report_threads(self, threads: int, before: float, now: float) -> None:
        """Emits a change of the number of threads, with the seconds of a step before and now."""
        values = {"threads": threads, "milliseconds_before": 1e3 * before, "milliseconds": 1e3 * now}
        self.emit({"event": "threads", "step": self.progress.steps + 1, **values})

    def train_whole(self, batch: Batch) -> None:
        """Trains this rank's rows in one piece. DDP averages the dense gradients over the ranks."""
        logits = logits_of(self.model, batch, self.config)
        if self.prefetcher is not None:
            self.prefetcher.send()
        losses = F.binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="none")
        if not self.skips(losses.detach()):
            self.update(losses, batch)
            self.window += loss_sums(logits.detach(), losses.detach(), batch.labels, batch.weights)

    def train_graph(self, batch: Batch, graph: DenseGraph) -> None:
        """Trains the rows as `train_whole` does, with the dense part as one CUDA graph."""
        pooled_BFE = graph.inner.pool(batch.sparse)
        results = graph.differentiate(pooled_BFE, batch)
        if self.prefetcher is not None:
            self.prefetcher.send()
        if not self.skips(results.losses):
            average = graph.begin_average()
            pooled_BFE.backward(results.pooled_gradient_BFE)  # updates the tables
            average()
            for parameter, gradient in zip(self.dense, results.gradients, strict=True):
                parameter.grad = gradient
            self.update_dense()
            self.window += results.sums

    def train_lanes(self, batch: Batch, lanes: Lanes) -> None:
        """Trains this rank's rows lane by lane."""
        batch = batch.plain
        pooled_BFE = lanes.pool(batch)
        if self.prefetcher is not None:
            self.prefetcher.send()
        seed = partial(lane_seed, self.seed, self.progress.steps) if self.draws else None
        results = lanes.differentiate(pooled_BFE, batch, seed)
        if not self.skips(results.losses):
            lanes.update_tables(results)
            lanes.set_gradients(results)
            self.update_dense()
            self.window += results.sums

    def update(self, losses: torch.Tensor, batch: Batch) -> None:
        """Runs the backward pass, which updates the sharded tables, and the optimizers of everything else."""
        # Gradients are averaged over ranks, so the mean over all rows needs the factor world_size.
        losses.backward(torch.full_like(losses, dist.get_world_size() / batch.whole))
        self.update_dense()

    def update_dense(self) -> None:
        """Clips the gradients of everything but sharded tables, and runs its optimizers."""
        if self.config.dense_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.dense, self.config.dense_gradient_norm)
        self.optimizer.step()
        if self.replicated is not None:
            self.replicated.step()

    @property
    def step_median(self) -> float:
        """Median seconds of the last steps, without the wait for batches. The first steps take longer."""
        return statistics.median(self.recent) if self.recent else 0.0

    def skips(self, losses: torch.Tensor) -> bool:
        """Whether to leave the batch out. All ranks agree before the backward pass, which updates the tables.

        Raises:
            TrainingError: After too many such batches in a row.
        """
        if self.config.on_nonfinite == "stop":  # `take_window` checks the loss before anything is saved
            return False
        bad = (~losses.isfinite()).any().to(torch.int32)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        counts = [self.progress.skipped_batches + 1, self.progress.skipped_in_a_row + 1]
        if not bad.item():
            counts = [self.progress.skipped_batches, 0]
        self.progress = self.progress.model_copy(
            update=dict(zip(("skipped_batches", "skipped_in_a_row"), counts, strict=True))
        )
        if self.progress.skipped_in_a_row == SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"loss at step {self.progress.steps + 1}", "a finite number",
                f"none in {SKIPPED_IN_A_ROW} batches in a row", LOWER,
            )  # fmt: skip
        return bool(bad.item())

    def take_average(self) -> None:
        """Adds the weights to their running mean, from `average_from_step` on."""
        first = self.config.average_from_step
        if self.average is not None and first is not None and self.progress.steps >= first:
            self.progress = self.progress.model_copy(update={"averaged": self.progress.averaged + 1})
            self.average.take(self.progress.averaged)

    def done(self) -> bool:
        """Whether training is complete or was stopped early."""
        config, progress = self.config, self.progress
        stopped = config.patience is not None and progress.worse_validations >= config.patience
        enough = config.max_steps is not None and progress.steps >= config.max_steps
        return progress.finished or stopped or enough or progress.position.epoch >= config.epochs

    def due(self, every: int | None) -> bool:
        """Whether something with this period is due at this step."""
        return every is not None and self.progress.steps % every == 0

    def end_epoch(self) -> None:
        """Moves on to the next epoch."""
        if self.progress.position.batches == 0:
            raise TrainingError(
                "training rows", "at least one batch an epoch", "none", "Check the split and the filter."
            )
        self.log()
        if self.config.validate_every_steps is None:
            self.validate()
        lost = self.progress.position.lost if self.lost is None else self.lost()
        self.progress = self.progress.after_epoch(lost)

    def log(self) -> None:
        """Reports the NE of the rows since the last report, and the progressive NE in the first epoch."""
        self.await_device()
        window = self.take_window()
        times = self.take_times() | self.checkpointer.take_times()
        values: dict[str, float | None] = {"train_ne_window": window.ne, **times}
        if self.config.on_nonfinite == "skip":
            values["skipped_batches"] = self.progress.skipped_batches
        if self.progress.position.epoch == 0:
            self.progress = self.progress.model_copy(update={"first_sight": self.progress.first_sight.plus(window)})
            values["train_ne_progressive"] = self.progress.first_sight.ne
        if window.rows:
            values["train_loss_window"] = window.loss / window.rows
            values["train_calibration_window"] = window.predictions / window.labels if window.labels else None
            self.report(values)

    def await_device(self) -> None:
        """Waits until a CUDA device has finished its steps, and counts the wait as time of these steps."""
        if self.device.type == "cuda":
            start = time.perf_counter()
            torch.cuda.synchronize(self.device)
            self.step_seconds += time.perf_counter() - start

    def take_window(self) -> LossSums:
        """Returns and resets the loss sums of all ranks.

        Raises:
            TrainingError: If the loss is not finite.
        """
        rows, loss, labels, predictions = self.total_window().tolist()
        if not math.isfinite(loss):
            raise TrainingError(f"loss at step {self.progress.steps}", "a finite number", f"{loss}", LOWER)
        return LossSums(rows=rows, loss=loss, labels=labels, predictions=predictions)

    def total_window(self) -> torch.Tensor:
        """Returns and resets the loss sums of all ranks, float64 [4]."""
        total = self.window.clone()
        if self.lanes is None:
            dist.all_reduce(total)
        else:
            total = self.lanes.add(total)
        self.window.zero_()
        return total

    def take_times(self) -> dict[str, float]:
        """Adds the time since the last call to the progress. Returns the stall fraction and the means per batch."""
        if not self.times:
            return {}
        waited = sum(times.wait for times in self.times)
        busy = self.step_seconds + waited
        update = {"busy_seconds": self.progress.busy_seconds + busy}
        update["wait_seconds"] = self.progress.wait_seconds + waited
        self.progress = self.progress.model_copy(update=update)
        means = {
            f"batch_{name}_seconds": float(np.mean([getattr(t, name) for t in self.times]))
            for name in Times.model_fields
        }
        self.step_seconds, self.times = 0.0, []
        return means | {"stall_fraction_window": waited / busy if busy else 0.0}

    def validate(self) -> None:
        """Validates the model, or its mean weights if there are any, and saves the best model so far."""
        if self.validation is None:
            return
        with self.average.applied() if self.average is not None and self.progress.averaged else nullcontext():
            self.model.eval()
            with torch.no_grad():
                sums = self.validation(self.model)
            self.model.train()
            if self.record_validation(sums):
                self.save(BEST)

    def record_validation(self, sums: LossSums) -> bool:
        """Records a validation in the progress. Returns whether it is the best so far.

        Raises:
            TrainingError: If the loss is not finite or NE is undefined.
        """
        ne, best = sums.ne, self.progress.best_ne
        if not math.isfinite(sums.loss):
            raise TrainingError(
                f"validation loss at step {self.progress.steps}", "a finite number", f"{sums.loss}", LOWER
            )
        if ne is None:
            raise TrainingError("validation rows", "both labels", "only one", "Choose other validation rows.")
        better = best is None or ne < best
        update: dict[str, Any] = {"worse_validations": 0 if better else self.progress.worse_validations + 1}
        update |= {"validated_step": self.progress.steps, "valid_ne": ne}
        if better:
            update |= {"best_ne": ne, "best_step": self.progress.steps}
        self.progress = self.progress.model_copy(update=update)
        self.report({"valid_ne": ne, "valid_calibration": sums.predictions / sums.labels})
        return better

    def report(self, values: dict[str, float | None]) -> None:
        """Emits metrics of this step."""
        metrics = values | {"train_rows_per_second": self.progress.speed, "stall_fraction": self.progress.stalled}
        self.emit({"event": "metrics", "step": self.progress.steps, "rows": self.progress.rows, "metrics": metrics})

    def state(self) -> dict[str, Any]:
        """Returns all tensors of model and optimizers by name. Of sharded tensors it has this rank's shards."""
        tensors: dict[str, Any] = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for parameter, slots in self.model.fused_optimizer.state_dict()["state"].items():
            tensors |= {
                f"tables/{parameter}/{slot}": value for slot, value in slots.items() if hasattr(value, "local_shards")
            }
        for table, weight in replicated_tables(self.model).items():
            assert self.replicated is not None
            tensors |= {
                f"tables/{TABLES}{table}.weight/{slot}": value for slot, value in self.replicated.state[weight].items()
            }
        for name, dense in dense_parameters(self.model):
            for slot, value in self.optimizer.state[dense].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"dense/{name}/{slot}"] = value
        if self.average is not None:
            tensors |= {f"average/{name}": tensor for name, tensor in self.average.means.items()}
        return tensors

    def save(self, name: str | None = None) -> None:
        """Writes a checkpoint of this step, or one with the given name."""
        if name is None:
            self.log()  # raises on a non-finite loss before anything is saved
        own = name or f"step-{self.progress.steps:010d}"
        event = {"event": "saved", "step": self.progress.steps}

        def sealed() -> None:
            if name is None:
                self.checkpoints.prune(self.config.keep_checkpoints, own)
                self.emit(event)

        self.checkpointer.save(own, self.state(), self.progress.model_dump(), self.identity, sealed)

    def restore(self) -> None:
        """Resumes from the newest intact checkpoint, which rank 0 looks for. Without one, calls `begin`."""
        found = None
        if dist.get_rank() == 0:
            found = self.checkpoints.find_latest(self.report_damaged)
        step = torch.tensor(-1 if found is None else int(found.removeprefix("step-")), device=self.device)
        dist.broadcast(step, 0)
        if step >= 0:
            self.load(self.checkpoints.fetch(f"step-{int(step):010d}", known=True))
            if not self.keeps_lost:
                self.progress.require_rows(self.checkpoints.folder)
            lost = sum(one.rows for one in self.progress.position.lost)
            self.emit({"event": "resumed", "step": self.progress.steps, "rows": self.progress.rows, "lost": lost})
        elif self.begin is not None:
            self.begin(self)

    def report_damaged(self, error: CheckpointError) -> None:
        """Emits the error of a checkpoint that does not verify."""
        self.emit({"event": "damaged", "error": str(error)})

    def start_from(self, folder: Path) -> None:
        """Starts at step 0 with the exported weights and the optimizer state of another training.

        Args:
            folder: A verified checkpoint.
        """
        self.make_dense_state()
        served = checkpoint.served_prefix(folder)
        own = {name: tensor for name, tensor in self.state().items() if not name.startswith("average/")}
        tensors = {name.replace("model/", served, 1): tensor for name, tensor in own.items()}
        checkpoint.load(folder, tensors, self.identity, optional=("model/", "average/"))
        drop_cache(self.model)
        before = load_progress(folder)
        self.progress = TrainingProgress(steps_before=before.steps_before + before.steps)

    def take_over(self, other: "Trainer") -> None:
        """Starts at step 0 with the final weights and optimizer state of another trainer.

        Args:
            other: A finished trainer of the same model with the same sharding plan.
        """
        self.make_dense_state()
        source = other.state()
        with torch.no_grad():
            for name, tensor in self.state().items():
                if not name.startswith("average/"):
                    for own, given in zip(local_parts(tensor), local_parts(source[name]), strict=True):
                        own.copy_(given)
        drop_cache(self.model)
        done = other.progress
        self.progress = TrainingProgress(steps_before=done.steps_before + (done.best_step or done.steps))

    def train_incremental(self, batches: Callable[[Position], Iterator[Batch]]) -> TrainingProgress:
        """Trains incrementally on other rows, from the current state. Ends with the mean weights if averaging is on."""
        self.batches = batches
        self.progress = TrainingProgress(steps_before=self.progress.steps_before + self.progress.steps)
        with self.checkpointer:
            while not self.done():
                self.train_epoch()
        self.use_all_threads()
        self.require_steps()
        if self.average is not None and self.progress.averaged:
            self.average.apply()
        return self.progress

    def load(self, folder: Path) -> None:
        """Loads tensors and progress of a checkpoint."""
        if any(name.startswith("dense/") for name in checkpoint.stored_shapes(folder)):
            self.make_dense_state()
        checkpoint.load(folder, self.state(), self.identity)
        drop_cache(self.model)
        self.progress = load_progress(folder)

    def finish(self) -> None:
        """Saves the training as finished, so the same command does not continue it. Then loads the best model.

        It may be one of an earlier attempt, saved after the checkpoint that this attempt resumed from.
        """
        if not self.progress.finished:
            if self.progress.validated_step != self.progress.steps:
                self.validate()
            self.progress = self.progress.model_copy(update={"finished": True})
            self.save()
        self.checkpointer.wait()
        final = self.progress
        if final.best_step is not None:
            self.load(self.checkpoints.fetch(BEST))
            if not self.keeps_lost:
                self.progress.require_rows(self.checkpoints.folder)
            best = self.progress.model_dump(include={"best_step", "best_ne"})
            self.progress = final.model_copy(update=best)
        elif self.average is not None and final.averaged:
            self.average.apply()

    def export(self, path: Path | None, written: Callable[[], None] = lambda: None) -> str | None:
        """Writes the whole weights; see `export_weights`. All ranks call it together."""
        return export_weights(self.model.state_dict(), path, written)

    def make_dense_state(self) -> None:
        """Makes the state of the dense optimizer by a step with zero gradients and learning rates."""
        for parameter in self.dense:
            parameter.grad = torch.zeros_like(parameter)
        rates = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        self.optimizer.step()
        for group, (rate, decay) in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"], group["weight_decay"] = rate, decay


def evaluate_sums(
    model: DistributedModelParallel, batches: Iterator[Batch], device: torch.device, config: TrainConfig
) -> LossSums:
    """Returns the loss sums of all ranks over some batches. Does not change the model."""
    total = torch.zeros(4, dtype=torch.float64, device=device)
    if config.lanes is not None:
        total = Lanes(model, config, ()).evaluate(batches)
    else:
        for batch in move_batches(batches, device, model):
            logits = logits_of(model, batch, config)
            losses = F.binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="none")
            total += loss_sums(logits, losses, batch.labels, batch.weights)
        dist.all_reduce(total)
    rows, loss, labels, predictions = total.tolist()
    return LossSums(rows=rows, loss=loss, labels=labels, predictions=predictions)

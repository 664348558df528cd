"""A rank of a backtest: evaluates the model on each next day, then trains it as the policy says.

A composition root like `training/rank`. Ranks stay alive from day to day, which makes hundreds of days affordable.
The weights are those of the daily runs. A test compares them bit for bit.
"""

import datetime
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from pipeline.evaluation.policy import ChampionStanding, Decision, Policy, decide
from pipeline.jobs.training.rank.group import open_event_writer, run_rank
from pipeline.jobs.training.rank.main import assemble
from pipeline.jobs.training.rank.model import add_sharding_plan, open_client
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.client import Client, InlineSource
from pipeline.preprocessing.dataset import DataSpec, fit_plan
from pipeline.training.config import TrainConfig
from pipeline.training.launch.heartbeat import Heartbeat
from pipeline.training.metrics import evaluate_sums
from pipeline.training.restore import take_over
from pipeline.training.state.progress import LossSums
from pipeline.training.trainer import Trainer
from storage.warehouse import Warehouse

KEEP_NONE = {"checkpoint_every_steps": None, "checkpoint_every_seconds": None}
"""Incremental training in a backtest keeps no checkpoints."""


class BacktestSpec(BaseModel, frozen=True):
    """All that a rank needs to know. A day's selections differ from those given here only in their days."""

    scratch: RankSpec
    """Training from scratch. Its plan is not fitted yet."""
    incremental: TrainConfig
    """Training of a model on new days."""
    new: DataSpec
    """Rows of a day for incremental training."""
    evaluated: DataSpec
    """Rows of a day that the model is evaluated on before it is trained on that day."""
    policy: Policy = Policy()
    rows: Mapping[datetime.date, int]
    """All days of the table and their numbers of rows."""
    first_days: tuple[datetime.date, ...]
    """Days of the first model."""
    days: tuple[datetime.date, ...]
    """Days to replay, in order."""
    judged_later: bool = True
    """Whether a model is judged on the day after its training, and serves from the day after that."""

    @property
    def training(self) -> TrainConfig:
        """Settings that ranks need to form a group."""
        return self.scratch.training


class BacktestRank:
    """One rank's part of a backtest: the current model, and how to make the next."""

    def __init__(self, spec: BacktestSpec, rank: int, device: torch.device, emit: Callable[[Any], None]) -> None:
        self.spec, self.rank, self.device, self.emit = spec, rank, device, emit
        self.heartbeat = Heartbeat(emit)
        self.trainer: Trainer | None = None
        self.plan = spec.scratch.train.plan
        self.trained_to = self.scratch_day = spec.first_days[-1]

    def run(self) -> None:
        """Replays all days. Emits an event for the first model and one for each day."""
        began = time.perf_counter()
        rows = self.train_from_scratch(self.spec.first_days)
        first = Decision(training="scratch", reason="the first model")
        self.emit_day(self.spec.first_days[-1], None, first, rows, time.perf_counter() - began)
        serving: LossSums | None = None  # the model that serves the day, which may be older than the newest
        for day, after in zip(self.spec.days, [*self.spec.days[1:], None], strict=True):
            sums = self.evaluate_day(day)
            served = serving or sums
            if self.spec.judged_later and after is not None:
                serving = self.evaluate_day(after)  # before training: the new model is judged on that day first
            decision = decide(self.spec.policy, self.make_standing(day, sums), day)
            began, rows = time.perf_counter(), 0
            if decision.training == "incremental":
                rows = self.train_incremental(self.list_new_days(day))
            elif decision.training == "scratch":
                rows = self.train_from_scratch(self.list_window_days(day))
                self.scratch_day = day
            if decision.training != "none":
                self.trained_to = day
            self.emit_day(day, served, decision, rows, time.perf_counter() - began)
        assert self.trainer is not None
        weights_sha256 = self.trainer.learner.export(None)
        if weights_sha256 is not None:
            self.emit({"event": "result", "weights_sha256": weights_sha256})

    def emit_day(
        self, day: datetime.date, sums: LossSums | None, decision: Decision, rows: int, seconds: float
    ) -> None:
        """Emits the result of a day. Rows trained count once for each epoch."""
        cost = {"rows": rows, "seconds": seconds}
        values = None if sums is None else sums.model_dump()
        self.emit({"event": "day", "day": f"{day}", "sums": values, "decision": decision.model_dump(), "cost": cost})

    def make_standing(self, day: datetime.date, sums: LossSums) -> ChampionStanding:
        """Returns what the policy decides by."""
        return ChampionStanding(
            trained_to=self.trained_to,
            scratch_day=self.scratch_day,
            new_rows=sum(self.spec.rows[new] for new in self.list_new_days(day)),
            ne=sums.ne,
            calibration=sums.predictions / sums.labels if sums.labels else None,
        )

    def list_new_days(self, day: datetime.date) -> list[datetime.date]:
        """Returns the days up to this one that the model was not trained on."""
        return [other for other in self.spec.rows if self.trained_to < other <= day]

    def list_window_days(self, day: datetime.date) -> list[datetime.date]:
        """Returns the days to train on from scratch."""
        upto = [other for other in self.spec.rows if other <= day]
        return upto if self.spec.policy.window_days is None else upto[-self.spec.policy.window_days :]

    def evaluate_day(self, day: datetime.date) -> LossSums:
        """Returns the loss sums of a day."""
        assert self.trainer is not None
        model = self.trainer.model
        batches = self.open_reader(select_days(self.spec.evaluated, [day]), shuffled=False).batches()
        model.eval()
        with torch.no_grad():
            sums = evaluate_sums(model, self.heartbeat.track(batches, "evaluating"), self.device, self.spec.incremental)
        model.train()
        return sums

    def train_from_scratch(self, days: Sequence[datetime.date]) -> int:
        """Replaces the model by one trained from scratch. Returns the rows that it was trained on."""
        spec = select_training_days(self.spec.scratch, days)
        self.plan = fit_plan(spec.train, Warehouse(spec.train.warehouse, Path(spec.train.home)))
        spec = add_sharding_plan(select_training_days(replace_plan(self.spec.scratch, self.plan), days), {})
        folder = Path(spec.folder) / "checkpoints"
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of the previous model
        dist.barrier()
        trainer = assemble(spec, self.rank, self.device, self.emit, self.heartbeat)
        progress = trainer.train()
        self.trainer = assemble(
            spec.model_copy(update={"training": self.spec.incremental.model_copy(update=KEEP_NONE), "valid": None}),
            self.rank, self.device, self.emit, self.heartbeat,
        )  # fmt: skip
        self.trainer.progress = take_over(self.trainer.learner, trainer.learner, progress)
        return progress.rows

    def train_incremental(self, days: Sequence[datetime.date]) -> int:
        """Trains the model on new days. Returns their rows."""
        assert self.trainer is not None
        reader = self.open_reader(select_days(self.spec.new, days), shuffled=True)
        return self.trainer.train_incremental(
            lambda position: self.heartbeat.track(reader.batches(position), "training")
        ).rows

    def open_reader(self, rows: DataSpec, shuffled: bool) -> Client:
        """Returns the batches of some rows, transformed by the model's plan."""
        data = rows.model_copy(update={"plan": self.plan})
        spec = self.spec.scratch.model_copy(update={"training": self.spec.incremental})
        source = InlineSource({"rows": data}, spec.preprocessing)
        return open_client(spec, source, "rows", data, self.rank, shuffled)


def select_days(data: DataSpec, days: Sequence[datetime.date]) -> DataSpec:
    """Returns the same selection of other days."""
    return data.model_copy(update={"selection": data.selection.model_copy(update={"days": tuple(days)})})


def select_training_days(spec: RankSpec, days: Sequence[datetime.date]) -> RankSpec:
    """Returns a training on other days."""
    valid = None if spec.valid is None else select_days(spec.valid, days)
    return spec.model_copy(update={"train": select_days(spec.train, days), "valid": valid})


def replace_plan(spec: RankSpec, plan: Any) -> RankSpec:
    """Returns a training with another plan."""
    parts = {"train": spec.train, "valid": spec.valid, "probe": spec.probe}
    return spec.model_copy(
        update={name: part.model_copy(update={"plan": plan}) for name, part in parts.items() if part is not None}
    )


def run_backtest_rank(spec: BacktestSpec, rank: int, device: torch.device) -> None:
    """Replays the days as one rank of a group."""
    BacktestRank(spec, rank, device, open_event_writer()).run()


if __name__ == "__main__":
    run_rank(sys.argv[1], BacktestSpec, run_backtest_rank)

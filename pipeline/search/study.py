"""The trials of a sweep in an Optuna database. A sweep that was killed resumes from it."""

import datetime
import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import BaseModel

from pipeline.search.config import Dimension, PruneConfig, SweepConfig
from pipeline.search.grid import count_trials, grid_points

State = Literal["complete", "pruned", "failed", "running"]
STATES: dict[TrialState, State] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}
NAME = "sweep"
"""Of the study in its file."""
LOCK_SECONDS = 60
"""How long to wait for the file while another process, such as a dashboard, holds its lock."""
FEWEST_FOR_IMPORTANCES = 4
STOPPED = "stopped"
"""Attribute of a trial that was chosen to be stopped. The decision is final, even if the process dies before it."""
BEST_SHARE = 0.25
"""Importance of a key: how much its values in the best trials, this share of all, differ from its values overall."""


class Draw(BaseModel, frozen=True):
    """A trial to run."""

    number: int
    params: Mapping[str, Any]
    """Dotted config key -> value."""


class TrialRecord(BaseModel, frozen=True):
    """State of a trial."""

    number: int
    state: State
    params: Mapping[str, Any]
    valid_ne: float | None
    """Best on the validation rows. None unless complete."""
    seconds: float | None
    notes: Mapping[str, Any]


class SearchStudy:
    """The trials of one sweep. Threads may share it, processes may not.

    The values of a trial are a function of the sweep's seed, the trial's number and the trials done before it, because
    each trial gets a new sampler. With one trial at a time, the same seed gives the same trials, even if the sweep was
    killed in between. With several at a time this holds for random, grid and the startup trials. tpe and gp then also
    depend on which trials happen to be done.

    Args:
        path: SQLite file, created if missing.
        start: The config's own values, for the first trial.
        points: Values of a grid's trials, in order. None: all combinations in a seeded order.
    """

    def __init__(
        self,
        path: Path,
        config: SweepConfig,
        start: Mapping[str, Any],
        points: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.config = config
        self.distributions = {key: make_distribution(dimension) for key, dimension in config.space.items()}
        grid = config.strategy == "grid"
        self.grid: Sequence[Mapping[str, Any]] = (grid_points(config) if points is None else points) if grid else []
        self.start = start if config.begin_with_config else {}
        self.storage = RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}})
        self.study = optuna.create_study(
            storage=self.storage, study_name=NAME, load_if_exists=True, pruner=make_pruner(config.prune)
        )
        self.lock = threading.RLock()
        self.running: set[int] = set()
        """Trials that run in this process."""

    @property
    def total(self) -> int:
        """Number of trials that there will be."""
        return count_trials(self.config)

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _id(self, number: int) -> int:
        """Returns the storage's id of a trial."""
        study = self.storage.get_study_id_from_name(NAME)
        return self.storage.get_trial_id_from_study_id_trial_number(study, number)

    def next(self) -> Draw | None:
        """Returns the next trial to run, or None if there are enough. Interrupted ones come first."""
        with self.lock:
            trials = self._trials()
            stale = (one for one in trials if one.state == TrialState.RUNNING and one.number not in self.running)
            trial = next(stale, None)
            if trial is None and len(trials) >= self.total:
                return None
            if trial is None:
                params = self._draw_params(len(trials))
                trial = create_trial(state=TrialState.RUNNING, params=params, distributions=self.distributions)
                self.study.add_trial(trial)
                trial = self._trials()[-1]
            self.running.add(trial.number)
            return Draw(number=trial.number, params=self._values(trial.params))

    def _draw_params(self, number: int) -> dict[str, Any]:
        """Draws all values of a new trial. They are written at once, so a kill changes none of them."""
        memory = optuna.create_study(sampler=make_sampler(self.config, number))
        memory.add_trials(self._trials())
        fixed = self.grid[number] if self.grid else self.start if number == 0 else {}
        if fixed:
            memory.enqueue_trial({key: encode_value(self.config.space[key], value) for key, value in fixed.items()})
        return memory.ask(self.distributions).params

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {key: decode_value(self.config.space[key], params[key]) for key in self.config.space if key in params}

    def report(self, number: int, rows: int, ne: float) -> bool:
        """Records the NE of a running trial after this many rows. Returns whether to stop the trial.

        Repeated reports at the same rows, as after a resume, count once.
        """
        if self.config.prune is None:
            return False
        with self.lock:
            look = rows // self.config.prune.every_rows
            if look <= max(self._trials()[number].intermediate_values, default=0):
                return False
            self.storage.set_trial_intermediate_value(self._id(number), look, ne)
            return self.falls_behind(number)

    def falls_behind(self, number: int) -> bool:
        """Whether to stop a running trial by what it has reported, also before an interruption.

        Saves the decision at once: a stopped trial stops no other.
        """
        if self.config.prune is None:
            return False
        with self.lock:
            trial = self._trials()[number]
            if STOPPED in trial.user_attrs:
                return True
            stopped = bool(self.study.pruner.prune(self.study, trial))  # a numpy value for some
            if stopped:
                self.note(number, **{STOPPED: True})
            return stopped

    def note(self, number: int, **notes: Any) -> None:
        """Saves attributes of a running trial."""
        with self.lock:
            for key, value in notes.items():
                self.storage.set_trial_user_attr(self._id(number), key, value)

    def finish(self, number: int, valid_ne: float) -> None:
        """Marks a running trial as complete."""
        self._tell(number, TrialState.COMPLETE, valid_ne)

    def prune(self, number: int) -> None:
        """Marks a running trial as stopped."""
        self._tell(number, TrialState.PRUNED)

    def fail(self, number: int, error: str) -> None:
        """Marks a running trial as failed. It is not retried."""
        self.note(number, error=error)
        self._tell(number, TrialState.FAIL)

    def _tell(self, number: int, state: TrialState, value: float | None = None) -> None:
        with self.lock:
            self.study.tell(number, value, state)

    def records(self) -> list[TrialRecord]:
        """Returns all trials by number."""
        with self.lock:
            return [self._record(trial) for trial in self._trials()]

    @property
    def done(self) -> list[TrialRecord]:
        """The trials that are complete, pruned or failed."""
        return [record for record in self.records() if record.state != "running"]

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        complete = trial.state == TrialState.COMPLETE
        return TrialRecord(
            number=trial.number,
            state=STATES[trial.state],
            params=self._values(trial.params),
            valid_ne=trial.value if complete else None,
            seconds=(trial.duration or datetime.timedelta()).total_seconds() if trial.state.is_finished() else None,
            notes=trial.user_attrs,
        )

    def twin(self, draw: Draw) -> TrialRecord | None:
        """Returns a complete trial with the same values."""
        return next((one for one in self.records() if one.state == "complete" and one.params == draw.params), None)

    @property
    def best(self) -> TrialRecord | None:
        """The complete trial with the lowest NE, the first of equals."""
        done = [(one.valid_ne, one.number, one) for one in self.records() if one.valid_ne is not None]
        return min(done)[2] if done else None

    def importances(self) -> dict[str, float]:
        """Returns key -> its share in what makes trials good, largest first. Empty for few trials or equal NEs.

        Source:
            Watanabe, Bansal, Hutter 2023, PED-ANOVA, arXiv:2304.10255.
        """
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances  # slow: imports scikit-learn

        values = [trial.valid_ne for trial in self.records() if trial.valid_ne is not None]
        if len(values) < FEWEST_FOR_IMPORTANCES or len(set(values)) == 1:
            return {}
        evaluator = PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE)
        return {key: float(share) for key, share in get_param_importances(self.study, evaluator=evaluator).items()}


def make_distribution(dimension: Dimension) -> BaseDistribution:
    """Converts a dimension for Optuna. Choices become JSON strings: Optuna takes scalars only, and 1 equals true."""
    if dimension.choices is not None:
        return CategoricalDistribution([encode_value(dimension, choice) for choice in dimension.choices])
    low, high, log, step = dimension.low, dimension.high, dimension.log, dimension.step
    assert low is not None
    assert high is not None
    if dimension.is_whole:
        return IntDistribution(int(low), int(high), log=log, step=int(step or 1))
    return FloatDistribution(float(low), float(high), log=log, step=step)


def encode_value(dimension: Dimension, value: Any) -> Any:
    """Converts a config value for the database."""
    return value if dimension.choices is None else json.dumps(value, sort_keys=True)


def decode_value(dimension: Dimension, value: Any) -> Any:
    """Converts a database value for the config."""
    return value if dimension.choices is None else json.loads(value)


def make_sampler(config: SweepConfig, number: int) -> BaseSampler:
    """Returns the sampler of one trial, seeded by config and number."""
    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    if config.strategy == "tpe":
        return TPESampler(seed=seed, n_startup_trials=config.startup_trials)
    if config.strategy == "gp":
        return GPSampler(seed=seed, n_startup_trials=config.startup_trials)
    return RandomSampler(seed=seed)  # a grid fixes all values


def make_pruner(config: PruneConfig | None) -> BasePruner:
    """Returns the pruner. Its steps are comparisons, `every_rows` apart."""
    if config is None:
        return NopPruner()
    warmup = math.ceil(config.warmup_rows / config.every_rows)
    if config.method == "median":
        return MedianPruner(n_startup_trials=config.startup_trials, n_warmup_steps=warmup)
    if config.method == "leader":
        return LeaderPruner(config.tolerance, warmup)
    return SuccessiveHalvingPruner(min_resource=max(warmup, 1), reduction_factor=config.reduction_factor)


class LeaderPruner(BasePruner):
    """Stops a trial that is worse than another one at the last comparison both have reached.

    Optuna's pruners either wait for complete trials, which is too late when trials run side by side, or always pass the
    first trial that reports. A stopped or failed trial stops no other. At least one running trial is therefore left,
    unless it fails later.

    Args:
        tolerance: Allowed difference, as a share of the better NE.
        warmup: Comparisons before any trial is stopped.
    """

    def __init__(self, tolerance: float, warmup: int) -> None:
        self.tolerance, self.warmup = tolerance, warmup

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether to stop the trial."""
        others = study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.COMPLETE))
        left = (other for other in others if other.number != trial.number and STOPPED not in other.user_attrs)
        return any(self._leads(other, trial) for other in left)

    def _leads(self, other: FrozenTrial, trial: FrozenTrial) -> bool:
        theirs, ours = other.intermediate_values, trial.intermediate_values
        look = max(theirs.keys() & ours.keys(), default=0)
        return look > 0 and look >= self.warmup and ours[look] > theirs[look] * (1.0 + self.tolerance)

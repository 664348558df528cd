"""Finds which runs and versions read which columns of a table, from the plans that MLflow stores."""

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException

from pipeline.catalog.usage import ColumnImportance, Run, Usage, Version, importance_by_column
from pipeline.errors import RegistryError
from pipeline.jobs.training.job import PLAN
from pipeline.registration.aliases import list_versions
from pipeline.registration.tracking import FEATURES, Tracker, is_not_found
from pipeline.transforms.plan.plan import Plan

MEASURED_RUNS = 20
"""Most runs whose feature importance is read, the newest finished ones."""


def load_usage(tracker: Tracker, model: str) -> Usage:
    """Returns runs of the experiment and versions of the model with their columns. Leaves out runs without a plan.

    Args:
        model: Name in the registry.
    Raises:
        TrackingError: If MLflow does not answer.
    """
    plans = _Plans(tracker)
    runs, measured = [], 0
    for run in _load_runs(tracker):
        plan = plans.load(run)
        if plan is None:
            continue
        importance: dict[str, ColumnImportance] = {}
        if run.info.status == "FINISHED" and measured < MEASURED_RUNS:
            importance, measured = (
                importance_by_column(plan, _load_importance(tracker, str(run.info.run_id))),
                measured + 1,
            )
        runs.append(
            Run(
                run_id=run.info.run_id,
                name=f"{run.info.run_name} ({run.info.run_id[:8]})",
                at=datetime.datetime.fromtimestamp(run.info.start_time / 1000, datetime.UTC),
                columns=frozenset(plan.columns),
                importance=importance,
            )
        )
    return Usage(runs=tuple(runs), versions=tuple(_load_versions(tracker, model, plans)))


class _Plans:
    """Loads plans of runs, each one once."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.known: dict[str, Plan | None] = {}

    def load(self, run: MlflowRun) -> Plan | None:
        """Returns the plan of a run; None for a run that trained nothing."""
        key = run.data.tags.get("plan_hash")
        if key is None:
            return None
        if self.known.get(key) is None:
            # None also for a plan of other software.
            self.known[key] = _read(partial(self.tracker.read_record, str(run.info.run_id), PLAN, Plan))
        return self.known[key]


def _load_runs(tracker: Tracker) -> list[MlflowRun]:
    """Returns all runs of the experiment, the newest first."""
    found: list[MlflowRun] = []
    token: str | None = None
    while True:
        order = ["attributes.start_time DESC"]
        some = tracker.client.search_runs([tracker.experiment_id], order_by=order, page_token=token)
        found += some
        token = some.token
        if not token:
            return found


def _load_versions(tracker: Tracker, model: str, plans: _Plans) -> list[Version]:
    numbers = list_versions(tracker, model)
    if not numbers:
        return []
    aliases: dict[int, list[str]] = {}
    for alias, number in tracker.client.get_registered_model(model).aliases.items():
        aliases.setdefault(int(number), []).append(alias)
    found = []
    for number in numbers:
        version = tracker.get_version(model, str(number))
        run = None if version is None else _read(partial(tracker.client.get_run, str(version.run_id)))
        plan = plans.load(run) if run is not None else None
        if plan is not None:
            named = tuple(sorted(aliases.get(number, ())))
            found.append(Version(model=model, version=number, aliases=named, columns=frozenset(plan.columns)))
    return found


def _load_importance(tracker: Tracker, run_id: str) -> list[tuple[str, ColumnImportance]]:
    measured = _read(partial(tracker.read_json, run_id, FEATURES)) or []
    return [
        (one["name"], ColumnImportance.model_validate({key: one[key] for key in ColumnImportance.model_fields}))
        for one in measured
        if None not in [one.get(key) for key in ("name", *ColumnImportance.model_fields)]
    ]


def _read(read: Callable[[], Any]) -> Any:
    """Returns what MLflow has; None if it is missing, for example because someone deleted the run."""
    try:
        return read()
    except RegistryError:
        return None
    except MlflowException as error:
        if not is_not_found(error):
            raise
        return None

"""Finds which runs and versions read which columns of a table, from the plans that MLflow stores."""

import datetime
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException

from pipeline.catalog.usage import ColumnImportance, Run, Usage, Version, importance_by_column
from pipeline.errors import RegistryError
from pipeline.jobs.training.job import PLAN
from pipeline.registration.retention import list_all_versions
from pipeline.registration.tracking import FEATURES, Tracker, is_not_found
from pipeline.transforms.plan.plan import Plan

MOST_RUNS = 1_000
"""Newest runs that are looked at."""
PLAN_HASH = "plan_hash"
"""Tag of runs and of the versions that they made."""
MEASURED_RUNS = 20
"""Most runs whose feature importance is read, the newest finished ones."""


def load_usage(tracker: Tracker, model: str) -> Usage:
    """Returns the newest runs of the experiment and all versions of the model with their columns, if they have a plan.

    Args:
        model: Name in the registry.
    Raises:
        TrackingError: If MLflow does not answer.
    """
    plans = _Plans(tracker)
    runs, measured = [], 0
    for run in _load_runs(tracker):
        plan = plans.load(run.data.tags, str(run.info.run_id))
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

    def load(self, tags: Mapping[str, str], run_id: str) -> Plan | None:
        """Returns the plan of a run; None for a run that trained nothing.

        Args:
            tags: Of the run, or of the version that it made.
        """
        key = tags.get(PLAN_HASH)
        if key is None:
            return None
        if self.known.get(key) is None:
            # None also for a plan of other software.
            self.known[key] = _read(partial(self.tracker.read_record, run_id, PLAN, Plan))
        return self.known[key]


def _load_runs(tracker: Tracker) -> list[MlflowRun]:
    """Returns the newest runs of the experiment, the newest first."""
    order = ["attributes.start_time DESC"]
    return list(tracker.client.search_runs([tracker.experiment_id], max_results=MOST_RUNS, order_by=order))


def _load_versions(tracker: Tracker, model: str, plans: _Plans) -> list[Version]:
    every = list_all_versions(tracker, model)
    if not every:
        return []
    aliases: dict[int, list[str]] = {}
    for alias, number in tracker.client.get_registered_model(model).aliases.items():
        aliases.setdefault(int(number), []).append(alias)
    found = []
    for one in every:
        tags, number = one.tags, int(one.version)
        if PLAN_HASH not in tags:  # registered by hand
            run = _read(partial(tracker.client.get_run, str(one.run_id)))
            tags = {} if run is None else run.data.tags
        plan = plans.load(tags, str(one.run_id))
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

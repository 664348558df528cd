"""Flow: retraining policies over the same past days -> their next-day NE, calibration and cost side by side."""

import datetime
from collections.abc import Mapping
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.ingest import ingest
from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.evaluation.series import BacktestResult
from pipeline.jobs.recurring import backtest as backtesting
from pipeline.jobs.recurring.backtest import Rehearsed, pinned_rehearsal, rehearse
from pipeline.jobs.training.job import warehouse_of
from pipeline.jobs.training.summary import flow_run_name


@flow(name="backtest", flow_run_name=flow_run_name)
def backtest(
    config: RunConfig | str = "configs/flights_daily.yaml",
    overrides: Mapping[str, Any] | None = None,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    policies: list[str] | None = None,
) -> dict[str, Any]:
    """Past days in; what each policy of retraining would have brought on the day after, and what it costs, out.

    All policies begin with the same first model, of the days of the split. Each day is judged as a whole before the
    model is trained on it (Modyn's composite model: on every day the newest one counts); no gate stands in between. A
    policy that was rehearsed before is not rehearsed again, so a run that was killed goes on with the next policy.

    Args:
        config: The run's config, or the path of its YAML file; its split must be `hash` with days.
        overrides: Dotted key -> value, put over the config.
        start: First day to judge; None: the first one after the split's days.
        end: Last day to judge; None: the last one of the table.
        policies: Names in `recurring.policies`; None: all of them. The others are compared with the first.
    """
    settings = load(config, overrides)
    known = settings.recurring.policies
    names = list(known) if policies is None else policies
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        expected = f"names in recurring.policies: {', '.join(known) or 'it has none'}"
        raise ConfigError("argument 'policies'", expected, ", ".join(unknown) or "none", "Add them there.")
    ingest(settings)
    rehearsed = pin(settings, start, end)
    courses = [course(settings, rehearsed, name) for name in names]
    return show(settings, rehearsed, courses)


@task(cache_policy=NO_CACHE, task_run_name="pin")
def pin(config: RunConfig, start: datetime.date | None, end: datetime.date | None) -> Rehearsed:
    """The days to rehearse on. Safe to repeat: it reads, and tags the snapshot once."""
    rehearsed = pinned_rehearsal(config, start, end)
    snapshot = rehearsed.spec.judged.snapshot
    warehouse_of(config).tag(snapshot, f"rehearsal-{snapshot.snapshot_id}")
    return rehearsed


@task(cache_policy=NO_CACHE, task_run_name="rehearse {name}")
def course(config: RunConfig, rehearsed: Rehearsed, name: str) -> BacktestResult:
    """One policy over all days. Safe to repeat: a finished one is read from its file."""
    return rehearse(config, rehearsed, name, config.recurring.policies[name])


@task(cache_policy=NO_CACHE, task_run_name="show")
def show(config: RunConfig, rehearsed: Rehearsed, courses: list[BacktestResult]) -> dict[str, Any]:
    """Table and figure. Safe to repeat: it makes another MLflow run."""
    return backtesting.show(config, rehearsed, courses, config.recurring.policies)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(backtest)

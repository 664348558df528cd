"""Flow: retraining policies over the same past days -> their next-day NE, calibration and cost side by side."""

import datetime
from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.ingest import ingest
from flows.runtime.console import flow_run_name, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.recurring.backtest import chosen_policies, run_backtest


@flow(name="backtest", flow_run_name=flow_run_name)
def backtest(
    config: RunConfig | str = "configs/flights_daily.yaml",
    overrides: Mapping[str, Any] | None = None,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    policies: list[str] | None = None,
) -> dict[str, Any]:
    """Replays past days under each retraining policy: quality on the next day, and what it costs.

    All policies start with the same first model, trained on the days of the split. Each day is evaluated as a whole
    before the model is trained on it (Modyn's composite model: on every day the newest one counts). No gate stands in
    between. A finished policy is not run again, so an interrupted backtest resumes with the next policy.

    Args:
        config: The run's config, or the path of its YAML file; its split must be `hash` with days.
        overrides: Dotted key -> value, put over the config.
        start: First day to evaluate; None: the first one after the split's days.
        end: Last day to evaluate; None: the last one of the table.
        policies: Names in `recurring.policies`; None: all of them. The others are compared with the first.
    """
    workspace = open_workspace(load(config, overrides))
    names = chosen_policies(workspace.config.recurring.policies, policies)
    ingest(workspace.config)
    return run_backtest(workspace, start, end, names)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(backtest)

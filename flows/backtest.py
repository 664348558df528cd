"""Flow: replays retraining policies over past days and compares next-day NE, calibration and cost."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("backtest")

import datetime
from collections.abc import Mapping
from typing import Any

from flows.ingest import ingest
from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.recurring.backtest import choose_policies, run_backtest


@flow("backtest")
def backtest(
    config: RunConfig | str = "configs/flights_daily.yaml",
    overrides: Mapping[str, Any] | None = None,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    policies: list[str] | None = None,
) -> dict[str, Any]:
    """Replays past days under each retraining policy and reports next-day quality and cost.

    All policies start from the same first model, trained on the days of the split. The model is evaluated on each whole
    day before it is trained on that day (Modyn's composite model: on every day the newest one counts). There is no
    gate. Finished policies are skipped, so an interrupted backtest resumes with the next one.

    Args:
        config: The run's config, or the path of its YAML file; its split must be `hash` with days.
        overrides: Dotted key -> value; overrides the config.
        start: First day to evaluate; None: the first day after those of the split.
        end: Last day to evaluate; None: the last day of the table.
        policies: Names in `recurring.policies`; None: all of them. The first is the baseline for the others.
    """
    workspace = open_workspace(load(config, overrides))
    names = choose_policies(workspace.config.recurring.policies, policies)
    ingest(workspace.config)
    return run_backtest(workspace, start, end, names)

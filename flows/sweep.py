"""Flow: a config and the values that its keys may take -> the best of many trainings, as a config."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from pipeline.config import RunConfig, load
from pipeline.jobs.search.sweep import finished, opened, pinned_sweep
from pipeline.jobs.search.sweep_result import conclude
from pipeline.jobs.search.sweep_run import run_trials
from pipeline.jobs.training.summary import flow_run_name


@flow(name="sweep", flow_run_name=flow_run_name)
def sweep(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """A snapshot in, the best config by the validation rows out, as a file that flows.train takes.

    Nothing is registered. A sweep that was cut short goes on where it was, and one whose `sweep.trials` was raised.

    Args:
        config: The run's config with its section `sweep`, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        snapshot_id: Snapshot to read; None takes the newest. One that was cut short before days were ingested goes on
            by its own.
        again: Begins anew where the same sweep is done.
    """
    settings = load(config, overrides)
    job = pinned_sweep(settings, snapshot_id, again)
    done = finished(job, settings)
    if done is not None:
        return done
    with opened(settings, job) as work:
        run_trials(work)
        return conclude(work)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(sweep)

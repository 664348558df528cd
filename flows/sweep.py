"""Flow: a config and the values that its keys may take -> the best of many trainings, as a config."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows import sweeping
from flows.config import RunConfig, load
from flows.record import flow_run_name


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
        snapshot_id: Snapshot to read; None takes the newest.
        again: Begins anew where the same sweep is done.
    """
    settings = load(config, overrides)
    job = sweeping.pinned_sweep(settings, snapshot_id, again)
    done = sweeping.finished(job, settings)
    if done is not None:
        return done
    with sweeping.opened(settings, job) as work:
        sweeping.run_trials(work)
        return sweeping.conclude(work)


if __name__ == "__main__":
    from flows import cli

    cli.main(sweep)

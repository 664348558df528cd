"""Flow: candidates -> explored on a sample, compared on all rows; the winner trained again, gated and registered."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from pipeline.config import RunConfig, load
from pipeline.jobs.search import release as releasing
from pipeline.jobs.training.summary import flow_run_name
from pipeline.search.release import select_best


@flow(name="release", flow_run_name=flow_run_name)
def release(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """A snapshot in, the best candidate out: as a registered version, champion if the gate promotes it (`gate.rule`).

    A release that was cut short goes on where it was; candidates that are done with a stage are not trained again.

    Args:
        config: The run's config with its section `release`, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        snapshot_id: Snapshot to read; None takes the newest. One that was cut short before days were ingested goes on
            by its own.
        again: Begins anew where the same release is done or has failed.
    """
    settings = load(config, overrides)
    job = releasing.pinned_release(settings, snapshot_id, again)
    done = releasing.finished(job, settings)
    if done is not None:
        return done
    with releasing.opened(settings, job) as work:
        explored = releasing.run_stage(work, "explore", tuple(work.candidates))
        names = select_best(explored, settings.release.keep)
        compared = releasing.run_stage(work, "compare", names) if len(names) > 1 else explored
        winner = releasing.retrain(work, compared[0].name, again)
        return releasing.conclude(work, winner)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(release)

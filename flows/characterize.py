"""Flow: a grid of configurations -> what each costs on this machine, and why."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from pipeline.config import RunConfig, load
from pipeline.jobs.study.job import finished, opened, pinned_study
from pipeline.jobs.study.report import conclude
from pipeline.jobs.study.run import run_points
from pipeline.jobs.training.summary import flow_run_name


@flow(name="characterize", flow_run_name=flow_run_name)
def characterize(
    config: RunConfig | str = "configs/paper/e2_batch.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    again: bool = False,
    report: str | None = None,
) -> dict[str, Any]:
    """A config with its section `characterize` in; each point's speed, time by part, memory and use of the machine out.

    A study that was cut short goes on where it was.

    Args:
        config: The run's config with its section `characterize`, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        snapshot_id: Snapshot to read where the study has no workload of its own; None takes the newest.
        again: Begins anew where the same study is done.
        report: Folder that text, table and figures are written to, beside MLflow; None: the study's own.
    """
    settings = load(config, overrides)
    job = pinned_study(settings, snapshot_id, again)
    done = None if report else finished(job)
    if done is not None:
        return done
    with opened(settings, job) as work:
        run_points(work)
        return conclude(work, report)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(characterize)

"""Flow: a finished run, or two of them, as one HTML file."""

from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger

from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.jobs.training.job import tracker_of
from pipeline.jobs.training.reporting import PAGE, page_of
from pipeline.jobs.training.summary import flow_run_name
from pipeline.registration.aliases import CHAMPION, find_holder
from pipeline.registration.tracking import Tracker
from storage.artifacts import inside, write_text


@flow(name="report", flow_run_name=flow_run_name)
def report(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    run: str | int | None = None,
    against: str | int | None = None,
) -> dict[str, Any]:
    """A report below `home/reports`; of two runs their qualities, curves and configs side by side.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        run: Version of the model, or id of an MLflow run; None: the champion.
        against: Another one to put beside it.
    """
    settings = load(config, overrides)
    tracker, name = tracker_of(settings), settings.model_name
    asked = [run or find_holder(tracker, name), *([against] if against else [])]
    runs = [_run_id(tracker, name, one) for one in asked]
    path = inside(settings.home_path / "reports", f"{name}-{'-'.join(str(one) for one in asked)}.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page_of(tracker, *runs))
    get_run_logger().info("%s: %s", PAGE, path)
    return {"status": "ok", "path": str(path), "runs": runs}


def _run_id(tracker: Tracker, name: str, asked: str | int | None) -> str:
    """The MLflow run that is meant by its id, or by the number of the version that it made."""
    version = None if asked is None else tracker.get_version(name, str(asked))
    if version is not None:
        return str(version.run_id)
    if asked is None or str(asked).isdigit():
        given = f"no {CHAMPION}" if asked is None else f"{asked}"
        raise ConfigError("argument 'run'", f"a version of model '{name}'", given, "Name one.")
    return str(asked)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(report)

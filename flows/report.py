"""Flow: a finished run, or two of them, as one HTML file."""

from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger

from flows.config import RunConfig, load
from flows.job import tracker_of
from flows.record import flow_run_name
from flows.reporting import PAGE, page_of
from pipeline.errors import ConfigError
from pipeline.registration.aliases import CHAMPION, holder
from storage.artifacts import write_text


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
    asked = [holder(tracker, name) if run is None else run, *([] if against is None else [against])]
    runs: list[str] = []
    for one in asked:
        version = None if one is None else tracker.version(name, str(one))
        if one is None or (version is None and str(one).isdigit()):
            given = f"no {CHAMPION}" if one is None else f"{one}"
            raise ConfigError("argument 'run'", f"a version of model '{name}'", given, "Name one.")
        runs.append(str(one) if version is None else str(version.run_id))
    path = settings.home_path / "reports" / f"{name}-{'-'.join(str(one) for one in asked)}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page_of(tracker, *runs))
    get_run_logger().info("%s: %s", PAGE, path)
    return {"status": "ok", "path": str(path), "runs": runs}


if __name__ == "__main__":
    from flows import cli

    cli.main(report)

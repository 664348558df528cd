"""Quality of a point of the efficiency study: NE with the config's own values, and with those that a sweep finds."""

from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, TrainingError
from pipeline.jobs.search.sweep import check_space, read_own_values, run_sweep
from pipeline.jobs.search.trials import STUDY
from pipeline.jobs.workspace import Workspace
from pipeline.search.study import SearchStudy
from pipeline.study.measure.group import make_point_config
from pipeline.study.points.config import CharacterizeConfig
from pipeline.study.points.load import StudyConfig
from pipeline.study.points.points import StudyPoint


def sweep_point(
    workspace: Workspace,
    section: CharacterizeConfig,
    point: StudyPoint,
    parent: str | None = None,
    snapshot_id: int | None = None,
) -> dict[str, Any]:
    """Sweeps the config with a point's settings. A finished sweep is not repeated.

    Args:
        parent: Parent of the sweep's MLflow run, which gets the point's name.
        snapshot_id: Snapshot to read. None takes the newest.
    Returns:
        ne: of trial 0, which has the config's own values. tuned_ne and params: of the best trial, which may be trial 0.
        sweep and mlflow_run_id: of the sweep.
    Raises:
        StorageError: If there is no table yet.
        TrainingError: If the trial with the config's own values has no NE.
    """
    settings = check_point_sweep(workspace.config, section, point).run
    result = run_sweep(workspace.with_config(settings), snapshot_id, force=False)
    tracker, run_id = workspace.with_config(settings).tracking, result["mlflow_run_id"]
    if parent is not None:
        tracker.tag(run_id, {"mlflow.parentRunId": parent, "mlflow.runName": point.name})
    study = SearchStudy(Path(result["config_path"]).parent / STUDY, settings.sweep, {})
    own, best = study.records()[0], result["best"]
    if own.valid_ne is None:
        where, actual = f"trial 0 of sweep {result['study']}", str(own.notes.get("error", own.state))
        raise TrainingError(where, "an NE with the config's own values", actual, "Correct the config.")
    return {
        "ne": own.valid_ne,
        "tuned_ne": best["valid_ne"],
        "params": best["params"],
        "sweep": result["study"],
        "mlflow_run_id": run_id,
    }


def check_point_sweep(config: RunConfig, section: CharacterizeConfig, point: StudyPoint) -> StudyConfig:
    """Returns the config of a point. Checks that the first trial of its sweep takes the config's own values.

    Raises:
        ConfigError: If it does not, or if the sweep is wrong in another way.
    """
    settings = make_point_config(config, section, point)
    check_space(settings.run)
    search = settings.sweep
    if search.strategy == "grid" or not search.begin_with_config:
        actual = "strategy=grid" if search.strategy == "grid" else "begin_with_config=false"
        raise ConfigError("sweep", "a first trial with the config's own values", actual, "Leave it out.")
    if search.prune is not None and search.parallel > 1:
        expected = "1 with `prune`: other trials may stop the one with the config's own values"
        raise ConfigError("sweep.parallel", expected, f"{search.parallel}", "Set it to 1, or sweep.prune to null.")
    own = read_own_values(settings.run)
    for key in search.space:
        if key not in own:
            where = f"sweep.space '{key}' at {point.name}"
            raise ConfigError(where, "the config's own value among its values", "others", "Widen it.")
    return settings

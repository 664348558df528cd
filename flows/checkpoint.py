"""Flow: the checkpoints of a config's runs, listed, verified or exported."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from prefect import flow, get_run_logger
from safetensors.torch import save_file

from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.jobs.training.summary import flow_run_name
from pipeline.training.state import checkpoint as store
from pipeline.training.state.checkpoint import BEST, CheckpointError
from storage.artifacts import atomic_file

Which = int | Literal["newest", "best"]


@flow(name="checkpoint", flow_run_name=flow_run_name)
def checkpoint(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    action: Literal["list", "verify", "export"] = "list",
    step: Which = "newest",
    run: str | None = None,
) -> dict[str, Any]:
    """The checkpoints below `home`/runs in, a list or a file of whole weights out. Nothing is changed or removed.

    Args:
        config: The run's config, or the path of its YAML file; its name says which runs are meant.
        overrides: Dotted key -> value, put over the config.
        action: list; verify, which fails if one is damaged; export, which writes the weights of one as safetensors.
        step: What to export.
        run: Folder of one run; None: all runs of the name, and for the export the one that wrote last.
    """
    settings = load(config, overrides)
    folders = _folders(settings, run)
    if action == "export":
        return {"status": "ok", "action": action} | _export(settings, folders, step)
    found = []
    for folder in folders:
        with suppress(FileNotFoundError):  # a training at work has removed it for a newer one
            found.append({"run": folder.parents[1].name, **store.describe(folder)})
    damaged = [entry["error"] for entry in found if entry["error"] is not None]
    for error in damaged:
        get_run_logger().warning("%s", error)
    if action == "verify" and damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(found)} checkpoints of '{settings.name}'", "whole ones", "; ".join(damaged),
            "Remove them: training goes on from the newest whole one.",
        )  # fmt: skip
    return {"status": "ok", "action": action, "checkpoints": found, "damaged": len(damaged)}


def _folders(config: RunConfig, run: str | None) -> list[Path]:
    """Checkpoints of the runs that are meant, each run's by step and the best one after them."""
    root = config.home_path / "runs"
    ours = re.compile(rf"{config.name}-[0-9a-f]{{12}}-\d+")
    runs = sorted(folder for folder in root.glob("*") if ours.fullmatch(folder.name))
    if run is not None:
        known = ", ".join(folder.name for folder in runs) or "none"
        runs = [folder for folder in runs if folder.name == run]
        if not runs:
            raise ConfigError(f"run '{run}'", f"a run of '{config.name}' in '{root}'", f"{known}", "Name one of them.")
    best = [[folder / "checkpoints" / BEST] for folder in runs]
    found = [store.list_checkpoints(folder / "checkpoints") + last for folder, last in zip(runs, best, strict=True)]
    return [folder for folders in found for folder in folders if folder.is_dir()]


def _export(config: RunConfig, folders: list[Path], which: Which) -> dict[str, Any]:
    """Writes the weights of one checkpoint beside its run's other files."""
    fitting = [folder for folder in folders if _matches(folder, which)]
    if not fitting:
        known = ", ".join(f"{folder.parents[1].name}/{folder.name}" for folder in folders) or "none"
        raise ConfigError(f"step '{which}'", f"a checkpoint of '{config.name}'", known, "Name one, or train first.")
    folder = max(fitting, key=lambda path: (path.stat().st_mtime, path.name))
    weights = store.export(folder)
    path = folder.parents[1] / "exports" / f"{folder.name}.safetensors"
    with atomic_file(path) as temporary:
        save_file(weights, temporary)
    progress = store.read_progress(folder)
    return {
        "run": folder.parents[1].name,
        "checkpoint": folder.name,
        "step": progress["steps"],
        "path": str(path),
        "tensors": len(weights),
        "bytes": path.stat().st_size,
    }


def _matches(folder: Path, which: Which) -> bool:
    if which == "best":
        return folder.name == BEST
    match = store.STEP.match(folder.name)
    return match is not None and which in ("newest", int(match[1]))


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(checkpoint)

"""Lists and verifies the checkpoints of a config's runs, and exports the weights of one."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.errors import ConfigError
from pipeline.jobs.console import format_rows
from pipeline.jobs.workspace import Workspace
from storage.artifacts import atomic_file
from storage.scratch import ScratchFolder

if TYPE_CHECKING:
    from pipeline.training.state.checkpoints import StoredCheckpoints

PLAIN, DAILY = "[0-9a-f]{12}", r"\d{4}-\d{2}-\d{2}-[0-9a-f]{12}-[0-9a-f]{8}"
"""What follows the key of a model in the folder of a training by flows.train, and by flows.recurring."""
Which = int | Literal["newest", "best"]


def list_checkpoints(workspace: Workspace, run: str | None, verify: bool) -> dict[str, Any]:
    """Describes each checkpoint and reports damaged ones.

    Args:
        run: Folder of one run. None: all runs of the config's model.
        verify: Raises if one is damaged.
    Raises:
        CheckpointError: If one is damaged and `verify` is set.
    """
    from pipeline.training.state import checkpoint as store  # PyTorch takes seconds to import

    found = _describe_stored(workspace, run, verify)
    known = {(entry["run"], entry["name"]) for entry in found}
    for folder in _folders(workspace, run, bool(found)):
        place = (folder.parents[1].name, folder.name)
        with suppress(FileNotFoundError):  # a running training has just removed it
            if place not in known:  # the others are copies
                found.append({"run": place[0], **store.describe(folder)})
    if found:
        workspace.console.log.info("checkpoints:\n%s", format_rows([_as_row(entry) for entry in found]))
    damaged = [entry["error"] for entry in found if entry["error"] is not None]
    for error in damaged:
        workspace.console.log.warning("%s", error)
    if verify and damaged:
        raise store.CheckpointError(
            f"{len(damaged)} of {len(found)} checkpoints of '{workspace.config.model_name}'", "whole ones",
            "; ".join(damaged), "Remove them: training resumes from the newest whole one.",
        )  # fmt: skip
    action = "verify" if verify else "list"
    return {"status": "ok", "action": action, "checkpoints": found, "damaged": len(damaged)}


def _as_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the line of a checkpoint in the table."""
    row = {key: "–" if entry[key] is None else entry[key] for key in ("run", "name", "step", "time")}
    ne = entry["valid_ne"]
    return row | {
        "MB": "–" if entry["bytes"] is None else f"{entry['bytes'] / 1e6:,.1f}",
        "valid NE": "–" if ne is None else f"{ne:.4f}",
        "state": entry["state"],
    }


def export_checkpoint(workspace: Workspace, run: str | None, which: Which) -> dict[str, Any]:
    """Writes the weights of one checkpoint as safetensors into the folder `exports` of its run.

    Args:
        run: Folder of one run. None: the run that wrote last.
    """
    from safetensors.torch import save_file

    from pipeline.training.state import checkpoint as store
    from pipeline.training.state.progress import load_progress

    with _copies(workspace) as copies:
        stored = _fetch_stored(workspace, run, which, copies)
        folders = stored or _folders(workspace, run)
        fitting = [folder for folder in folders if _matches(folder, which)]
        if not fitting:
            known = ", ".join(f"{folder.parents[1].name}/{folder.name}" for folder in folders) or "none"
            expected = f"a checkpoint of '{workspace.config.model_name}'"
            raise ConfigError(f"step '{which}'", expected, known, "Name one, or train first.")
        folder = max(fitting, key=lambda path: (path.stat().st_mtime, path.name))
        name = folder.parents[1].name
        weights, progress = store.export(folder), load_progress(folder)
        path = workspace.home / "runs" / name / "exports" / f"{folder.name}.safetensors"
        with atomic_file(path) as temporary:
            save_file(weights, temporary)
    return {
        "status": "ok",
        "action": "export",
        "run": name,
        "checkpoint": folder.name,
        "step": progress.steps,
        "path": str(path),
        "tensors": len(weights),
        "bytes": path.stat().st_size,
    }


def _copies(workspace: Workspace) -> ScratchFolder:
    """Returns a folder for copies of stored checkpoints, apart from those that a training reads."""
    return ScratchFolder("checkpoints-", workspace.home / "tmp")


def _stored(workspace: Workspace, run: str | None, copies: Path) -> "dict[str, StoredCheckpoints]":
    """Returns run -> its checkpoints in `storage.path`, of the selected runs that any machine has put there.

    Args:
        copies: Folder of this machine for copies.
    """
    from pipeline.training.state.checkpoints import StoredCheckpoints  # PyTorch takes seconds to import

    everything = workspace.stored(workspace.home / "runs")
    if everything is None:
        return {}
    names = sorted({name.partition("/")[0] for name in everything.names()})
    chosen = [name for name in names if _ours(workspace).fullmatch(name) and run in (None, name)]
    places = {name: f"{name}/checkpoints" for name in chosen}
    return {name: StoredCheckpoints(copies / place, everything.child(place)) for name, place in places.items()}


def _describe_stored(workspace: Workspace, run: str | None, verify: bool) -> list[dict[str, Any]]:
    """Describes the checkpoints in `storage.path`.

    Args:
        verify: Copies each to this machine for a moment, which verifies it.
    """
    from pipeline.training.state.checkpoint import CheckpointError

    found = []
    with _copies(workspace) as copies:
        for name, kept in _stored(workspace, run, Path(copies)).items():
            for one in kept.names():
                entry = {"run": name, **kept.describe(one)}
                if verify and entry["error"] is None:
                    try:
                        kept.fetch(one)
                        entry["state"] = "verified"
                    except CheckpointError as damage:
                        entry |= {"state": "damaged", "error": str(damage)}
                found.append(entry)
    return found


def _fetch_stored(workspace: Workspace, run: str | None, which: Which, copies: str) -> list[Path]:
    """Copies the chosen checkpoint from `storage.path`, and returns its folder. Empty: there is none.

    Raises:
        ConfigError: If several runs are there and none is named: the times of copies do not tell which wrote last.
    """
    stored = _stored(workspace, run, Path(copies))
    if len(stored) > 1:
        raise ConfigError(
            "run", f"one of the runs in {workspace.config.storage.path}", ", ".join(stored), "Name it: run=NAME."
        )
    fitting = [(kept, name) for kept in stored.values() for name in kept.names() if _matches(Path(name), which)]
    return [kept.fetch(name) for kept, name in fitting[-1:]]


def _ours(workspace: Workspace) -> re.Pattern[str]:
    return re.compile(rf"{workspace.config.model_key}-({DAILY}|{PLAIN})-\d+")


def _folders(workspace: Workspace, run: str | None, elsewhere: bool = False) -> list[Path]:
    """Returns the checkpoints of the selected runs here, those of each run by step, and its best one last.

    Args:
        elsewhere: Whether the run is in the store, so that it need not be here.
    """
    from pipeline.training.state import checkpoint as store

    name, root = workspace.config.model_name, workspace.home / "runs"
    runs = sorted(folder for folder in root.glob("*") if _ours(workspace).fullmatch(folder.name))
    if run is not None:
        known = ", ".join(folder.name for folder in runs) or "none"
        runs = [folder for folder in runs if folder.name == run]
        if not runs and not elsewhere:
            raise ConfigError(f"run '{run}'", f"a run of '{name}' in '{root}'", known, "Name one of them.")
    found = [
        path
        for folder in runs
        for path in (*store.list_checkpoints(folder / "checkpoints"), folder / "checkpoints" / store.BEST)
    ]
    return [folder for folder in found if folder.is_dir()]


def _matches(folder: Path, which: Which) -> bool:
    from pipeline.training.state import checkpoint as store

    if which == "best":
        return folder.name == store.BEST
    match = store.STEP.match(folder.name)
    return match is not None and which in ("newest", int(match[1]))

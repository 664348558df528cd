"""Flow: lists, verifies or exports the checkpoints of a config's runs."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("checkpoint")

from collections.abc import Mapping
from typing import Any, Literal

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.checkpoints import Which, export_checkpoint, list_checkpoints


@flow("checkpoint")
def checkpoint(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    action: Literal["list", "verify", "export"] = "list",
    step: Which = "newest",
    run: str | None = None,
) -> dict[str, Any]:
    """Lists or verifies the checkpoints below `home`/runs and in `storage.path`, or exports the weights of one.

    Changes no checkpoint. One of `storage.path` is copied to this machine for a moment, to be verified or exported.

    Args:
        config: The run's config, or the path of its YAML file; its name selects the runs.
        overrides: Dotted key -> value; overrides the config.
        action: list; verify, which fails if one is damaged; or export, which writes the weights of one as safetensors.
        step: Step of the checkpoint to export, or newest, or best.
        run: Folder of one run; None: all runs of the name. An export then takes the run that wrote last.
    """
    workspace = open_workspace(load(config, overrides))
    if action == "export":
        return export_checkpoint(workspace, run, step)
    return list_checkpoints(workspace, run, verify=action == "verify")

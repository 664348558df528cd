"""Flow: the checkpoints of a config's runs, listed, verified or exported."""

from collections.abc import Mapping
from typing import Any, Literal

from prefect import flow

from flows.runtime.console import flow_run_name, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.checkpoints import Which, export_checkpoint, list_checkpoints


@flow(name="checkpoint", flow_run_name=flow_run_name)
def checkpoint(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    action: Literal["list", "verify", "export"] = "list",
    step: Which = "newest",
    run: str | None = None,
) -> dict[str, Any]:
    """Lists or verifies the checkpoints below `home`/runs, or exports the weights of one. It changes none of them.

    Args:
        config: The run's config, or the path of its YAML file; its name says which runs are meant.
        overrides: Dotted key -> value, put over the config.
        action: list; verify, which fails if one is damaged; export, which writes the weights of one as safetensors.
        step: What to export.
        run: Folder of one run; None: all runs of the name, and for the export the one that wrote last.
    """
    workspace = open_workspace(load(config, overrides))
    if action == "export":
        return export_checkpoint(workspace, run, step)
    return list_checkpoints(workspace, run, verify=action == "verify")


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(checkpoint)

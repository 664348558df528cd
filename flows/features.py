"""Flow: the catalogue of a table's features, and what is declared about them."""

from collections.abc import Mapping
from typing import Any, Literal

from prefect import flow
from pydantic import PositiveInt

from flows.runtime.console import flow_run_name, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.tables.catalog import Action, State, run_action


@flow(name="features", flow_run_name=flow_run_name)
def features(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    action: Action = "list",
    name: str | None = None,
    state: State | None = None,
    kind: Literal["number", "id", "ids", "text", "other"] | None = None,
    owner: str | None = None,
    description: str | None = None,
    reason: str | None = None,
    instead: str | list[str] | None = None,
    by: str | None = None,
    unused_days: PositiveInt = 30,
    only_unused: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Lists or shows the features of the warehouse table, proposes some to retire, or declares something about one.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        action: list; show, one feature day by day; propose, features to retire; set, what is declared of a feature;
            deprecate; history, what was declared.
        name: The feature to show, set or deprecate, or the one to show the history of.
        state: beta, experimental, active or deprecated.
        kind: Of a feature that has no column yet.
        owner: Who answers for the feature.
        description: What it holds.
        reason: Why it is deprecated.
        instead: Features to read instead of a deprecated one.
        by: Who declares it; None: the user.
        unused_days: Days without a run that reads a feature, after which it is proposed.
        only_unused: Refuses to deprecate what a serving version reads.
        force: Declares a feature deprecated that is so already, with other words.
    """
    words = {"state": state, "kind": kind, "owner": owner, "description": description, "reason": reason}
    changes: dict[str, Any] = {key: value for key, value in words.items() if value is not None}
    if instead is not None:
        changes["alternatives"] = (instead,) if isinstance(instead, str) else tuple(instead)
    options = {"by": by, "only_unused": only_unused, "force": force, "unused_days": unused_days}
    return run_action(open_workspace(load(config, overrides)), action, name, changes, options)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(features)

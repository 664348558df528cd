"""Flow: lists a table's features and records what is declared about them."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("features")

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveInt

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.features.catalog import Action, State, run_action


@flow("features")
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
    """Lists or shows features of the warehouse table, proposes features to retire, or declares something about one.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        action: list; show, one feature day by day; propose, features to retire; set, what a person declares about a
            feature; deprecate; or history, all earlier declarations.
        name: The feature to show, set or deprecate, or print the history of.
        state: beta, experimental, active or deprecated.
        kind: Kind of a feature that has no column yet.
        owner: Who is responsible for the feature.
        description: What the feature holds.
        reason: Why the feature is deprecated.
        instead: Features to read instead of a deprecated one.
        by: Who declares it; None: the current user.
        unused_days: Proposes a feature for retirement if no run has read it for this many days.
        only_unused: Refuses to deprecate a feature that a serving version reads.
        force: Declares a deprecated feature deprecated again, with a new reason or new alternatives.
    """
    words = {"state": state, "kind": kind, "owner": owner, "description": description, "reason": reason}
    changes: dict[str, Any] = {key: value for key, value in words.items() if value is not None}
    if instead is not None:
        changes["alternatives"] = (instead,) if isinstance(instead, str) else tuple(instead)
    options = {"by": by, "only_unused": only_unused, "force": force, "unused_days": unused_days}
    return run_action(open_workspace(load(config, overrides)), action, name, changes, options)

"""Moves the champion alias for a person."""

from typing import Any

from pipeline.errors import ConfigError
from pipeline.jobs.workspace import Workspace
from pipeline.registration import aliases


def promote_version(
    workspace: Workspace, version: int | None, reason: str, alias: str = aliases.CHAMPION
) -> dict[str, Any]:
    """Gives a version the alias champion, or another one, and records the move. Skips a version that has the alias.

    Raises:
        ConfigError: If no version is named.
    """
    model = workspace.config.model_name
    if version is None:
        raise ConfigError("argument 'version'", f"the version that becomes {alias}", "none", "Add version=N.")
    done = aliases.move_alias(workspace.tracking, model, alias, version, "person", reason)
    if done is None:
        workspace.console.log.info("skipped: %s version %s is %s already", model, version, alias)
        return {"status": "skipped", "model": model, "alias": alias, "version": version}
    workspace.console.log.info("%s version %s is %s, version %s was", model, version, alias, done.previous)
    return {"status": "ok", "model": model} | done.model_dump()


def roll_back(workspace: Workspace) -> dict[str, Any]:
    """Makes the previous champion the champion again and records the move."""
    model = workspace.config.model_name
    done = aliases.rollback(workspace.tracking, model)
    workspace.console.log.info("%s version %s is champion again", model, done.version)
    return {"status": "ok", "model": model} | done.model_dump()

"""Moves the champion alias for a person."""

from typing import Any

from pipeline.errors import ConfigError
from pipeline.jobs.workspace import Workspace
from pipeline.registration import aliases


def promote_version(workspace: Workspace, version: int | None, reason: str) -> dict[str, Any]:
    """Makes a version the champion and records the move. Skips a version that is champion.

    Raises:
        ConfigError: If no version is named.
    """
    model = workspace.config.model_name
    if version is None:
        raise ConfigError("argument 'version'", "the version that becomes champion", "none", "Add version=N.")
    done = aliases.move_alias(workspace.tracking, model, aliases.CHAMPION, version, "person", reason)
    if done is None:
        workspace.console.log.info("skipped: %s version %s is champion already", model, version)
        return {"status": "skipped", "model": model, "alias": aliases.CHAMPION, "version": version}
    workspace.console.log.info("%s version %s is champion, version %s was", model, version, done.previous)
    return {"status": "ok", "model": model} | done.model_dump()


def roll_back(workspace: Workspace) -> dict[str, Any]:
    """Makes the previous champion the champion again and records the move."""
    model = workspace.config.model_name
    done = aliases.rollback(workspace.tracking, model)
    workspace.console.log.info("%s version %s is champion again", model, done.version)
    return {"status": "ok", "model": model} | done.model_dump()

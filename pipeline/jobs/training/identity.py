"""Names of trainings by what decides their result: the snapshot, the config's semantics, the joined sources."""

import hashlib
import json
from typing import Any

from pipeline.data.joined.source import source_identity
from pipeline.jobs.workspace import Workspace


def semantics(workspace: Workspace, evaluation: bool = False) -> dict[str, Any]:
    """Returns the config's semantics, and what its joined feature sources hold now.

    Args:
        evaluation: Adds what the evaluation rows are read for: for work with a result that compares evaluations.
    """
    config = workspace.config
    values = config.semantics()
    if evaluation:
        values["evaluation"] = config.evaluation.model_dump(include={"slices", "group_by", "true_probability"})
    found = [source_identity(pinned, workspace.warehouse) for pinned in workspace.feature_joins()]
    return values | {"joined_contents": found} if found else values


def identity(workspace: Workspace, snapshot_id: int) -> str:
    """Names a training by its inputs: snapshot and semantics."""
    return digest({"snapshot_id": snapshot_id, "config": semantics(workspace)})


def digest(values: dict[str, Any]) -> str:
    """Hash of JSON values, 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]

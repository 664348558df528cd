"""Identifies a training by what it learns from: rows, plan and the config's semantics, not snapshot or layout."""

import datetime
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pipeline.data.config import PARTS, Part
from pipeline.data.joined.source import PinnedSource, contents_by_day
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec
from storage.names import without_folders
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse

LEARNED: tuple[Part, ...] = ("train", "valid")
"""Parts of a split that a training learns from: `valid` decides when it stops."""
ROWS = ("split", "filter", "sampling")
"""Keys of a config that select rows. `describe_rows` describes the selected rows."""


def semantics(workspace: Workspace, evaluation: bool = False) -> dict[str, Any]:
    """Returns the config's semantics, without the folders of files: they may lie elsewhere on another machine.

    Args:
        evaluation: Adds what the evaluation rows are read for: for work with a result that compares evaluations.
    """
    config = workspace.config
    values = config.semantics()
    for key in ("joined", "histories", "windows"):
        for log in values["features"][key]:
            log["path"] = without_folders(log["path"])
    if evaluation:
        values["evaluation"] = config.evaluation.model_dump(include={"slices", "group_by", "true_probability"})
    return values


def describe_rows(
    warehouse: Warehouse, data: Mapping[Part, DataSpec], parts: Iterable[Part] = PARTS
) -> dict[str, dict[str, Any]]:
    """Returns part -> its days with the content of their rows, and the selection from these rows.

    The content includes the rows of feature sources that may join to a day. The same rows in other files or in a later
    snapshot give the same description.
    """
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        if part in data:
            selection, contents = data[part].selection, warehouse.day_contents(data[part].snapshot)
            days = {f"{day}": contents[day] for day in selection.days}
            joined = describe_joined(warehouse, data[part].joined, data[part].snapshot, selection.days)
            found[part] = {"days": days, **selection.model_dump(mode="json", exclude={"days"}), **joined}
    return found


def describe_joined(
    warehouse: Warehouse, joined: Iterable[PinnedSource], rows: SnapshotRef | None, days: Collection[datetime.date]
) -> dict[str, Any]:
    """Returns the content of feature sources that rows of some days can read. Empty without sources.

    Args:
        rows: The table of the rows. None: any table.
    """
    found = [contents_by_day(pinned, warehouse, rows, days) for pinned in joined]
    return {"joined": [{f"{day}": contents[day] for day in days} for contents in found]} if found else {}


def identity(workspace: Workspace, rows: Mapping[str, Any], plan_hash: str) -> str:
    """Hashes everything that decides the weights of a model, and the model's name.

    Args:
        rows: From `describe_rows`, for the parts that the training learns from.
        plan_hash: Of the plan before it is fitted.
    """
    config = {key: value for key, value in semantics(workspace).items() if key not in ROWS}
    return digest({"model": workspace.config.model_name, "rows": rows, "plan": plan_hash, "config": config})


def name_test_rows(warehouse: Warehouse, data: Mapping[Part, DataSpec]) -> str:
    """Returns a hash that identifies the evaluation rows."""
    return digest(describe_rows(warehouse, data, ["test"]))


def digest(values: Mapping[str, Any]) -> str:
    """Hash of JSON values, 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]

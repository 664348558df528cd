"""The list of the row groups that a training gave up, with their reasons."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from pipeline.data.position import LostRows
from pipeline.errors import ContractError, StorageError
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.splits import Split
from storage.artifacts import holding, write_text

QUARANTINE_FILE = "quarantine.jsonl"


class _Entry(LostRows, frozen=True):
    """A line of the list of quarantined row groups. It says more."""

    data: str


ENTRY: TypeAdapter[dict[str, Any]] = TypeAdapter(Annotated[dict[str, Any], holding(_Entry)])


def read_quarantine(folder: Path) -> list[dict[str, Any]]:
    """Returns the row groups that a folder lists as quarantined, each with its data, epoch, rows and reason.

    Raises:
        StorageError: If the list is damaged.
    """
    file = folder / QUARANTINE_FILE
    try:
        return [ENTRY.validate_json(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    except ValidationError:
        remedy = "Remove it: a training knows which rows it has lost, and only their reasons are gone."
        raise StorageError(f"file '{file}'", "what a training has written", "other content", remedy) from None


def list_as_quarantined(folder: Path, split: Split, request: Request, error: ContractError) -> list[dict[str, Any]]:
    """Adds the row groups of a split to the list, once, however often a run is resumed. Returns their entries."""
    known = {group_key(entry): entry for entry in read_quarantine(folder)}
    about = {"data": request.data, "epoch": request.position.epoch, "reason": str(error)}
    entries = [fragment.model_dump(mode="json") | about for fragment in split.fragments]
    for entry in entries:
        known.setdefault(group_key(entry), entry)
    write_text(folder / QUARANTINE_FILE, "".join(f"{json.dumps(entry)}\n" for entry in known.values()))
    return entries


def group_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what tells an entry from others."""
    return tuple(entry[key] for key in ("data", "epoch", "path", "row_group"))

"""Who read what of a table: one small file for each run, which a proposal for the layout goes by."""

import datetime
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from storage.artifacts import write_text


class Read(BaseModel, frozen=True, use_attribute_docstrings=True):
    """What a run read of a table."""

    table: str
    by: str
    """The flow that read."""
    at: datetime.datetime
    columns: tuple[str, ...]
    rows: int
    bytes_read: int
    """Of the columns named, compressed, as they lie in the files."""
    bytes_stored: int
    """Of all columns of the same rows."""
    reads: int
    """Stretches of files that were read: columns that lie side by side are one."""
    seconds: float
    """Of the workers, for reading and decoding."""


def keep(folder: Path, read: Read) -> None:
    """Adds a run to those that are known of its table."""
    write_text(folder / read.table / f"{read.at:%Y%m%d-%H%M%S}-{uuid4().hex[:8]}.json", read.model_dump_json() + "\n")


def known(folder: Path, table: str, since: datetime.datetime) -> list[Read]:
    """Runs that read a table since some time, oldest first; files that are none of ours are passed over."""
    found = []
    for path in sorted((folder / table).glob("*.json")):
        try:
            found.append(Read.model_validate_json(path.read_bytes()))
        except ValidationError:
            continue
    return [read for read in found if read.at >= since]

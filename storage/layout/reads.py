"""Records which columns each run reads of a table, one small file per run, as input for layout proposals."""

import datetime
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from storage.artifacts import write_text


class ReadRecord(BaseModel, frozen=True, use_attribute_docstrings=True):
    """The columns that a run read from a table, and what that cost."""

    table: str
    by: str
    """The flow that read."""
    at: datetime.datetime
    columns: tuple[str, ...]
    rows: int
    bytes_read: int
    """Compressed bytes of `columns` in the files."""
    bytes_stored: int
    """Compressed bytes of all columns of the same rows."""
    reads: int
    """Contiguous reads of files. Adjacent columns are one."""
    seconds: float
    """Seconds that the workers spent reading and decoding."""


def record_read(folder: Path, read: ReadRecord) -> None:
    """Adds a run to the records of its table."""
    write_text(folder / read.table / f"{read.at:%Y%m%d-%H%M%S}-{uuid4().hex[:8]}.json", read.model_dump_json() + "\n")


def load_reads(folder: Path, table: str, since: datetime.datetime) -> list[ReadRecord]:
    """Loads the reads of a table since a time, oldest first. Skips files that are not records."""
    found = []
    for path in sorted((folder / table).glob("*.json")):
        try:
            found.append(ReadRecord.model_validate_json(path.read_bytes()))
        except ValidationError:
            continue
    return [read for read in found if read.at >= since]

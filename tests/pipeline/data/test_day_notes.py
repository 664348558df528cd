"""Notes of days, as other versions of the project have written them."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.day_notes import INGEST, DayNote, InputFiles, day_notes, open_days
from pipeline.errors import DataError
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse
from tests.homes import rows_of, write_days

DAY = datetime.date(2024, 1, 1)
NOTE = DayNote(rows=InputFiles.of([("a.csv", 3, 1)]), outcomes=InputFiles(), definition="d", open=True)


def noted(home: Path, note: Any) -> DayNote:
    warehouse = Warehouse(WarehouseConfig(), home)
    snapshot = write_days(warehouse, rows_of(DAY, x=[1]), notes={DAY: {INGEST: note}})
    assert open_days(warehouse, snapshot) == ({DAY} if note.get("open") else set())
    return day_notes(warehouse, snapshot)[DAY]


@pytest.mark.parametrize("field", DayNote.model_fields)
def test_a_note_without_a_field_is_that_of_an_earlier_version(tmp_path: Path, field: str) -> None:
    written = NOTE.model_dump(mode="json")
    del written[field]
    found = noted(tmp_path, written)
    assert found.model_dump(exclude={field}) == NOTE.model_dump(exclude={field})
    assert not getattr(found, field) or getattr(found, field) == InputFiles()


@pytest.mark.parametrize(("field", "value"), [("rows", 7), ("definition", None), ("open", "perhaps"), ("sources", [])])
def test_a_note_of_another_form_is_one_sentence(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(DataError) as refused:
        noted(tmp_path, NOTE.model_dump(mode="json") | {field: value})
    assert str(refused.value).startswith(
        f"note of day 2024-01-01 of table 'events': expected the input of a day as this version notes it, got {value!r} at "
    )

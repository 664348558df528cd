"""The tester of the door finds what was wrong before: each mended fault is put back, and it complains."""

import inspect
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.formats import alike, checksums, csv, files, json, numbers, reading, types
from pipeline.errors import ContractError
from pipeline.extraction import days, samples
from tests.fuzz import door
from tests.fuzz.harness import play, play_many
from tests.fuzz.inputs import INPUTS

Change = tuple[Callable[..., Any], str, str]
"""A function, a part of its text, and what stands in its place."""
UNCOUNTED: list[Change] = [
    (csv.count_csv, "first, several = dialect.names[0], len(dialect.names) > 1", "return 0"),
    (reading._copy, "if found != rows:", "rows = found\n    if False:"),
]
"""Rows are not counted a second time."""
FAULTS: dict[str, list[Change]] = {
    "lines with # are comments": [(csv.copy_csv, 'comment=""', 'comment="#"'), *UNCOUNTED],
    "lines that do not fit are dropped": [
        (csv.copy_csv, "strict_mode=True", "strict_mode=True, ignore_errors=True"), *UNCOUNTED,
    ],
    "whole numbers are rounded because another file has fractions": [
        (types._target, "found):\n        return _number(name, items, where, rows, listed)", 'found):\n        return "DOUBLE"'),
    ],
    "decimals are rounded": [
        (samples._type_decimals, '"DOUBLE" if fractions else "VARCHAR" if (most or 0) >= 2**63 else "BIGINT"', '"DOUBLE"'),
    ],
    "NA is null": [(csv.copy_csv, "skiprows=0", 'na_values=["", "NA", "null", "nan"]')],
    "one value among lists makes text of all": [(json._exact, 'if "ARRAY" not in types or "OBJECT" in types:', "if True:")],
    "text that looks like a number becomes one": [
        (
            types.fits_text,
            "CASE WHEN length({value}) <= {EXACT_LENGTH} THEN regexp_full_match({value}, '{DECIMAL}') ELSE {same} END",
            "TRY_CAST({value} AS DOUBLE) IS NOT NULL",
        ),
    ],
    "true and false are no text": [(types._candidates, '["double"] if stored in _EXACT else []', '["BOOLEAN"]')],
    "hidden files are read": [(files._is_hidden, "return any(", "return False and any(")],
    "checksums are not compared": [(checksums._verify, "!= page.checksum:", "!= page.checksum and False:")],
    "columns that cannot be stored end the ingest": [(samples.unstorable_columns, "if not odd:", "if True:")],
    "rows of many days lose their order": [
        (days.days_condition, "spans: list[list[datetime.date]] = []", """return DAY + " IN (" + ", ".join(f"DATE '{one.day}'" for one in days) + ")" """),
    ],
    "ids of 64 bits in JSON are rounded": [
        (json._copy_json, 'kinds[name].removesuffix("[]") == "HUGEINT"', "False"), (json._may_be_large, "return True", "return False"),
    ],
    "whole numbers of both signs are refused": [(json._narrow, 'kind.replace("HUGEINT", "BIGINT")', "kind")],
    "lists and single numbers of both signs are rounded": [
        (json._exact, """if structure == '["HUGEINT"]' else lists""", "if False else lists"),
    ],
    "a JSON line unlike the first ones is not noticed": [(alike.are_alike, "if not _are_alike(", "if False and _are_alike(")],
    "text is a fraction if it can be read as one": [(numbers._are_printed, "return False", "pass")],
    "a column without a value has a type": [(types._has_value, "return kind != NOTHING and", "return kind != NOTHING or")],
}  # fmt: skip
"""Fault -> the changes that put it back."""
CASES = 60
"""Each fault is found within so many cases."""


def put_back(monkeypatch: pytest.MonkeyPatch, changes: list[Change]) -> None:
    """Changes functions in place, also for those who have imported them."""
    for function, old, new in changes:
        text = inspect.getsource(function)
        made: dict[str, Any] = {}
        exec(compile(text.replace(old, new), f"{function.__name__} with a fault", "exec"), function.__globals__, made)
        monkeypatch.setattr(function, "__code__", made[function.__name__].__code__)


def first_found(folder: Path, most: int) -> int | None:
    """Plays cases until one complains. Returns how many that took, or None if none did."""
    with door.door(folder) as case:
        for number in range(most):
            try:
                play("door", case, number)
            except ContractError:
                raise
            except Exception:
                return number + 1
    return None


def test_each_fault_can_be_put_back() -> None:
    """At night each is found. By day, whoever changes one of these functions learns that it stands here."""
    for changes in FAULTS.values():
        for function, old, _ in changes:
            assert inspect.getsource(function).count(old) == 1, f"{function.__name__} has another text"


@pytest.mark.nightly
@pytest.mark.extra
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_put_back_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    put_back(monkeypatch, FAULTS[fault])
    assert first_found(tmp_path, CASES) is not None


@pytest.mark.slow
@pytest.mark.extra
def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    cases = 400 // door.TABLES
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        halves = [
            pool.submit(play_many, "door", INPUTS["door"], tmp_path / f"{half}", range(half, cases, 2))
            for half in (0, 1)
        ]
        found = halves[0].result() + halves[1].result()
    assert found["read"] + found["refused"] == cases

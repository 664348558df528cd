"""Looks at a table of a test as `flows.suggest` does."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from pipeline.data.config import SplitConfig
from pipeline.data.profile import types_of
from pipeline.suggestion.choose import Suggestion, suggest
from pipeline.suggestion.facts import TableFacts, find_row_key, observe
from pipeline.suggestion.splits import ChosenSplit, choose_split
from storage.query import connect


def look(rows: pa.Table, folder: Path, given: SplitConfig | None = None) -> tuple[TableFacts, ChosenSplit]:
    """Returns the facts of rows with the label `label`, and the split chosen for them."""
    with connect([], folder / "tmp", "512MB") as connection:
        connection.register("rows", rows)
        observed = observe(connection, lambda names: "rows", types_of(connection, rows), rows.num_rows, "label")  # fmt: skip
        split = choose_split(
            observed, given, lambda: find_row_key(connection, lambda names: "rows", observed, ["label"])
        )
    return observed, split


def suggest_for(rows: pa.Table, folder: Path, apart: Mapping[str, str] | None = None) -> Suggestion:
    """Returns the suggestion for rows with the label `label`."""
    observed, split = look(rows, folder)
    return suggest(observed, "label", split, apart)

"""What each column of a table tells of the label by itself."""

from collections.abc import Mapping
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.alone import MOST_ROWS, Alone, Floats, look_at_groups, look_at_lists, look_at_numbers
from pipeline.data.profile import Rows
from storage.query import quote

AT_A_TIME = 30
"""How many columns are in memory at once."""


def look_at_columns(
    connection: duckdb.DuckDBPyConnection, rows: Rows, kinds: Mapping[str, str], label: str, total: int
) -> dict[str, Alone]:
    """Returns column -> what it tells by itself, on every nth row if there are many.

    Args:
        kinds: Column -> number, id, text, ids or time. A column of another kind is no feature.
        total: How many rows there are.
    """
    step, found = max(1, total // MOST_ROWS), dict[str, Alone]()
    names = [name for name in kinds if name != label]
    for start in range(0, len(names), AT_A_TIME):
        part = names[start : start + AT_A_TIME]
        table = _read(connection, rows, {name: kinds[name] for name in part}, label, step)
        labels = table[label].to_numpy().astype(np.float64)
        found |= {name: _look(table[name].combine_chunks(), kinds[name], labels) for name in part}
    return found


def _read(
    connection: duckdb.DuckDBPyConnection, rows: Rows, kinds: Mapping[str, str], label: str, step: int
) -> pa.Table:
    values = [f"{_value(name, kind)} AS {quote(name)}" for name, kind in kinds.items()]
    source, needed = rows([label, *kinds]), ", ".join(map(quote, [label, *kinds]))
    if step > 1:
        numbered = f"SELECT {needed}, row_number() OVER () AS __nth FROM {source}"
        source = f"(SELECT * FROM ({numbered}) WHERE __nth % {step} = 0)"
    query = f"SELECT {', '.join([quote(label), *values])} FROM {source} WHERE {quote(label)} IS NOT NULL"
    return connection.sql(query).to_arrow_table()


def _value(name: str, kind: str) -> str:
    column = quote(name)
    made = {"time": f"CAST(epoch({column}) AS DOUBLE)", "number": f"CAST({column} AS DOUBLE)"}
    return made.get(kind, f"CAST({column} AS BIGINT)" if kind == "id" else column)


def _look(column: Any, kind: str, labels: Floats) -> Alone:
    if kind in ("number", "time"):
        values = np.array(column.to_numpy(zero_copy_only=False), np.float64)
        return look_at_numbers(np.where(np.isfinite(values), values, np.nan), labels)
    if kind == "ids":
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        return look_at_lists(np.concatenate([[0], np.cumsum(lengths)]), _codes(pc.list_flatten(column)), labels)
    groups = look_at_groups(_codes(column), labels)
    if kind == "text":
        return groups
    numbers = look_at_numbers(np.array(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)), labels)
    return max(groups, numbers, key=lambda one: (one.leaks, one.auc))


def _codes(column: Any) -> Any:
    coded = pc.dictionary_encode(column)
    chunk = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    return pc.fill_null(chunk.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)

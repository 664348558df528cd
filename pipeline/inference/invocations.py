"""Bodies of MLflow's scoring protocol -> rows, as MLflow's server reads them, but faster.

Most bodies are plain: one type in each column and no number that a float cannot hold. These become columns at once.
MLflow's own code reads all others, so that each row gets the answer or the error that the pyfunc gives.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import InputError
from pipeline.inference.model import LoadedModel
from pipeline.inference.request import EXACT_FLOAT

if TYPE_CHECKING:
    from pipeline.inference.mlflow_bodies import MlflowReader

Columns = Mapping[str, Sequence[Any]]


class InvocationReader:
    """Reads bodies for one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._mlflow: MlflowReader | None = None

    def read(self, body: bytes) -> pa.Table:
        """Returns the rows of a JSON body.

        Raises:
            InputError: If the body or one of its rows is not what the model takes.
        """
        sent = plain_columns(body, self.loaded.columns)
        if sent is not None:
            with suppress(InputError):  # MLflow may see the value otherwise
                rows = self.loaded.table_of(sent)
                if not self._loses_digits(rows, sent):
                    return rows
        return self.read_through_mlflow(body)

    def _loses_digits(self, rows: pa.Table, sent: Columns) -> bool:
        """Whether pandas, which MLflow uses, makes floats of large ids because a null or a float is among them."""
        for name, kind in self.loaded.columns.items():
            if kind == "long" and name in sent:
                ends = pc.min_max(rows.column(name)).as_py()
                if (ends["min"] or 0) < 0 or (ends["max"] or 0) >= EXACT_FLOAT:  # ids from 2**63 on are negative here
                    kinds = {type(value) for value in sent[name]}
                    sizes = (abs(value) for value in sent[name] if type(value) is int)
                    if kinds & {float, type(None)} and list not in kinds and max(sizes, default=0) >= EXACT_FLOAT:
                        return True
        return False

    def read_through_mlflow(self, body: bytes) -> pa.Table:
        """Returns the rows of a JSON body as MLflow's server reads it.

        Raises:
            InputError: As `read`.
        """
        if self._mlflow is None:
            from pipeline.inference.mlflow_bodies import MlflowReader  # takes seconds to import

            self._mlflow = MlflowReader(self.loaded.columns, self.loaded.table_of)
        return self._mlflow.read(body)


def plain_columns(body: bytes, known: Collection[str] = ()) -> Columns | None:
    """Returns the columns of a body that MLflow certainly reads in the same way. None: MLflow has to read it.

    Args:
        known: Columns that the model reads.
    Example:
        >>> plain_columns(b'{"dataframe_split": {"columns": ["a", "b"], "data": [[1, "x"], [2, null]]}}')
        {'a': (1, 2), 'b': ('x', None)}
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(request, dict) or len(request) != 1:
        return None
    [(form, sent)] = request.items()
    readers = {"dataframe_split": _of_split, "dataframe_records": of_records, "inputs": _of_inputs}
    columns = readers[form](sent) if form in readers else None
    if columns and form == "inputs":  # MLflow makes arrays of the columns that its signature does not name
        others = (value for name, values in columns.items() if name not in known for value in values)
        columns = None if any(type(value) in (list, dict) for value in others) else columns
    # MLflow takes some requests without a number for a single row, and its frames forget how many rows there were.
    return columns if columns and any(type(values[0]) in (int, float) for values in columns.values()) else None


def _of_split(sent: Any) -> Columns | None:
    if not isinstance(sent, dict) or sent.keys() != {"columns", "data"}:
        return None
    names, rows = sent["columns"], sent["data"]
    if not isinstance(names, list) or not isinstance(rows, list) or not rows:
        return None
    if not all(type(name) is str for name in names) or len({*names}) < len(names):
        return None
    if not all(type(row) is list and len(row) == len(names) for row in rows):
        return None
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def of_records(sent: Any) -> Columns | None:
    """Returns the columns of a list of rows. None: it is none, or has no row or no column."""
    if not isinstance(sent, list) or not sent or not all(type(row) is dict for row in sent):
        return None
    first = sent[0].keys()
    if len(first) > 1 and all(row.keys() == first for row in sent):
        return dict(zip(first, zip(*map(itemgetter(*first), sent), strict=True), strict=True))
    names = dict.fromkeys(name for row in sent for name in row)
    return {name: [row.get(name) for row in sent] for name in names} or None


def _of_inputs(sent: Any) -> Columns | None:
    if not isinstance(sent, dict) or not sent or not all(type(values) is list for values in sent.values()):
        return None
    lengths = {len(values) for values in sent.values()}
    return sent if len(lengths) == 1 and lengths != {0} else None

"""Rows as MLflow's own code reads them. It takes seconds to import, so servers answer plain bodies before."""

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.pyfunc import PyFuncModel
from mlflow.pyfunc.scoring_server import SUPPORTED_FORMATS, infer_and_parse_data
from mlflow.types.schema import AnyType, ColSpec, DataType, Schema

from pipeline.errors import InputError
from pipeline.inference.request import Rows

TEXT = 0
"""Column of the frame that MLflow makes from a single text."""
REMEDY = "Send one of dataframe_split, dataframe_records, inputs and instances, as docs/serving.md shows."


class MlflowReader:
    """Reads bodies as MLflow's server does.

    Args:
        columns: The raw columns of the model, with their types.
        table_of: Converts rows as a caller sends them.
    """

    def __init__(self, columns: Mapping[str, str], table_of: Callable[[Rows], pa.Table]) -> None:
        signature = signature_of(columns)
        reader = SimpleNamespace(predict=lambda rows: table_of(as_sent(rows, columns)))
        self.schema, self.model = signature.inputs, PyFuncModel(Model(signature=signature), reader)

    def read(self, body: bytes) -> pa.Table:
        """Returns the rows of a JSON body.

        Raises:
            InputError: If the body or one of its rows is not what the model takes.
        """
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError("body", "JSON text", f"{error}"[:120], "Correct the text.") from None
        if not isinstance(request, dict):
            raise InputError("body", "a JSON object", type(request).__name__, REMEDY)
        parts = {name: value for name, value in request.items() if name in SUPPORTED_FORMATS}
        try:
            return self.model.predict(infer_and_parse_data(parts, self.schema))
        except InputError:
            raise
        except Exception as error:  # pandas raises almost any exception
            raise InputError("body", "rows in MLflow's schema", f"'{_reason(error):.200}'", REMEDY) from None


def _reason(error: Exception) -> str:
    return " ".join(str(error.message if isinstance(error, MlflowException) else error).split())


def signature_of(columns: Mapping[str, str]) -> ModelSignature:
    """Returns MLflow's signature: the names of the raw columns. Their types are in the model's metadata.

    Every column is optional and of any type, and so all values reach the model. MLflow's own check names no row, knows
    no defaults, refuses nulls among integers, and makes one row of a dict of lists if a column is an array. It turns a
    text into a column of its own, which is lost unless the signature names it.
    """
    names: list[Any] = [TEXT, *columns]  # first: only there MLflow accepts 0 as a name
    inputs: list[Any] = [ColSpec(AnyType(), name=name, required=False) for name in names]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema([ColSpec(DataType.double, name="probability")]))


def as_sent(rows: Rows, columns: Mapping[str, str]) -> Rows:
    """Restores rows that MLflow made a frame of one row: a text, or a dict of lists of text.

    Raises:
        InputError: If they may have been one row or none.
    """
    if not isinstance(rows, pd.DataFrame) or len(rows) != 1 or not len(rows.columns):
        return rows
    cells: dict[Any, Any] = rows.iloc[0].to_dict()
    if isinstance(cells.get(TEXT), str):
        return str(cells[TEXT])
    if not all(isinstance(cell, list) and all(isinstance(item, str) for item in cell) for cell in cells.values()):
        return rows
    if any(columns.get(name) in ("double", "string", "timestamp") for name in cells):  # these have no lists
        return cells
    if any(cells.values()):
        return rows
    raise InputError(
        "input",
        "one row or none",
        "empty lists, which may be either",
        "Send null in place of one empty list, or no rows.",
    )

"""The pyfunc: raw rows in, probabilities out. MLflow saves this file and runs it where the model is served."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow.models
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import torch
from mlflow.pyfunc import PythonModel, PythonModelContext
from safetensors.torch import load_file

from models.config import DLRMConfig
from models.dlrm import DLRM, Bag
from pipeline.batch import sparse_tensor
from pipeline.errors import InputError
from pipeline.transforms.plan import Plan

BATCH_ROWS = 8_192
EXACT_FLOAT = 2.0**53
"""From here on a float may stand for several ids."""
WEIGHTS, PLAN, MODEL = "weights.safetensors", "plan.json", "model.json"
TYPES: Mapping[str, pa.DataType] = {
    "double": pa.float64(),
    "long": pa.int64(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us"),
    "list<double>": pa.list_(pa.float64()),
    "list<long>": pa.list_(pa.int64()),
    "list<string>": pa.list_(pa.string()),
}
"""Types of raw columns, as they stand in the model's record."""


class LoadedModel:
    """Weights, plan and shape of a trained model, ready to score on CPU.

    Args:
        folder: Holds weights.safetensors, plan.json and model.json.
    """

    def __init__(self, folder: Path) -> None:
        record = json.loads((folder / MODEL).read_text(encoding="utf-8"))
        self.columns: dict[str, str] = record["columns"]
        self.plan = Plan.model_validate_json((folder / PLAN).read_text(encoding="utf-8"))
        bags = [Bag(feature.name, feature.table, feature.rows, feature.pooling) for feature in self.plan.sparse]
        self.model = DLRM(DLRMConfig.model_validate(record["model"]), len(self.plan.dense), bags)
        self.model.load_state_dict(load_file(folder / WEIGHTS))
        self.model.eval()

    def score(self, rows: pa.Table) -> npt.NDArray[np.float64]:
        """Probabilities of raw rows, float64 [N]."""
        scores = [self._score(rows.slice(start, BATCH_ROWS)) for start in range(0, rows.num_rows, BATCH_ROWS)]
        return np.concatenate(scores) if scores else np.empty(0, np.float64)

    def _score(self, rows: pa.Table) -> npt.NDArray[np.float64]:
        return self.score_parts(*self.parts(rows))

    def parts(self, rows: pa.Table) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layers above the tables take: dense numbers float32 [B, D] and pooled vectors float32 [B, F, E]."""
        transformed = self.plan.apply(rows)
        sparse = sparse_tensor([feature.name for feature in self.plan.sparse], transformed.sparse)
        with torch.no_grad():
            return torch.from_numpy(transformed.dense), self.model.pool(sparse)

    def score_parts(self, dense: torch.Tensor, vectors: torch.Tensor) -> npt.NDArray[np.float64]:
        """Probabilities of rows whose parts are at hand, float64 [B]."""
        with torch.no_grad():
            logits = self.model.score(dense, vectors)
        result: npt.NDArray[np.float64] = torch.sigmoid(logits.double()).numpy()
        return result

    def table_of(self, rows: pd.DataFrame) -> pa.Table:
        """Raw rows as the warehouse holds them; columns the model does not read are left out.

        Raises:
            InputError: If a column is absent, or a value is of the wrong kind; names row and column.
        """
        absent = [name for name in self.columns if name not in rows.columns]
        if absent:
            raise InputError(
                "input", f"columns {', '.join(self.columns)}", f"none named {', '.join(absent)}", "Add them."
            )
        return pa.table({name: _array(name, kind, rows[name].tolist()) for name, kind in self.columns.items()})


class Scorer(PythonModel):
    """MLflow's view of a LoadedModel."""

    def load_context(self, context: PythonModelContext) -> None:
        """Loads the model from the artifact folder `model`."""
        self.loaded = LoadedModel(Path(context.artifacts["model"]))

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Raw rows -> a column `probability`."""
        return pd.DataFrame({"probability": self.loaded.score(self.loaded.table_of(model_input))})


def _array(name: str, kind: str, values: Sequence[Any]) -> pa.Array:
    """A column of Python values as Arrow; None and NaN are null."""
    try:
        return pa.array([_plain(value, kind) for value in values], TYPES[kind])
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        for row, value in enumerate(values):
            try:
                pa.array([_plain(value, kind)], TYPES[kind])
            except (pa.ArrowException, ValueError, TypeError, OverflowError):
                raise InputError(f"row {row}, column '{name}'", kind, repr(value)[:60], _remedy(kind, value)) from None
        raise


def _remedy(kind: str, value: Any) -> str:
    if kind == "long" and isinstance(value, float):
        return "A null in the column made it a float; send ids as [id]."
    return "Correct the value, or leave it null."


def _plain(value: Any, kind: str) -> Any:
    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and np.isnan(value)):
        return None
    if kind == "timestamp":
        return _utc(value)
    if kind.startswith("list"):
        return [_plain(item, kind[5:-1]) for item in value]
    if kind == "long" and isinstance(value, bool):
        return int(value)
    if kind == "long" and isinstance(value, list | tuple | np.ndarray) and len(value) <= 1:
        return _plain(value[0], kind) if len(value) else None
    if kind == "long" and isinstance(value, float):  # pandas turns integers beside a null into floats
        if not value.is_integer() or abs(value) >= EXACT_FLOAT:
            raise ValueError("a float that has lost digits")
        return int(value)
    return value


def _utc(value: Any) -> pd.Timestamp:
    """A time or date, or its ISO text, in UTC and without saying so, as the warehouse holds it."""
    if not isinstance(value, str | datetime.date | np.datetime64):  # a number would be taken for nanoseconds
        raise TypeError("not a time")
    time = pd.Timestamp(value)
    return (time if time.tzinfo is None else time.tz_convert(None)).floor("us")


mlflow.models.set_model(Scorer())

"""A packed model in memory: raw rows in, probabilities out."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from safetensors.torch import load_file

from models.config import DLRMConfig, SparseFeature
from models.plain import IdLists, PlainDLRM
from models.quantised import QuantisedBags
from models.tables import TABLES, PlainBags, tables_of
from pipeline.errors import ConfigError, InputError
from pipeline.inference.files import MODEL, PLAN, WEIGHTS
from pipeline.inference.request import TYPES, Rows, table_of
from pipeline.transforms.column import Column
from pipeline.transforms.kernels.weights import unpack
from pipeline.transforms.plan.plan import Plan

if TYPE_CHECKING:
    from pipeline.inference.events import EventColumns

BATCH_ROWS = 8_192


def plan_of(folder: Path) -> Plan:
    """Reads the transform plan of a packed model."""
    return Plan.model_validate_json((folder / PLAN).read_text(encoding="utf-8"))


class LoadedModel:
    """A trained model with its plan, ready to score on CPU. int8 tables stay int8 in memory.

    The tables are pages of the file, which processes share and the system may drop, so they may be larger than the
    memory. Nobody may change the file. Deleting it is fine.

    Args:
        folder: Has weights.safetensors, plan.json and model.json.
        weights: Replaces the file of the weights, and is used as it is.
        logs: Files of event logs, as in `EventColumns`. Rows then have no histories and windows of these.
    Raises:
        ConfigError: If the logs do not fit the model.
    """

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, torch.Tensor] | None = None,
        logs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        record = json.loads((folder / MODEL).read_text(encoding="utf-8"))
        self.columns: dict[str, str] = record["columns"]
        self.defaults: dict[str, Any] = record["defaults"]
        self.plan = plan_of(folder)
        self.events = _open_events(record, logs) if logs else None
        features, config = self.plan.sparse, DLRMConfig.model_validate(record["model"])
        self.width = config.embedding_width
        bags = QuantisedBags if record["weights"] == "int8" else PlainBags
        self.model = PlainDLRM(config, len(self.plan.dense), features, bags(tables_of(features), self.width, "meta"))
        weights = load_file(folder / WEIGHTS) if weights is None else weights
        # The layers are small, and their kernels are faster with aligned numbers.
        weights = {name: value if name.startswith(TABLES) else value.clone() for name, value in weights.items()}
        self.model.load_state_dict(weights, assign=True)
        self.model.eval()

    def score(self, rows: pa.Table) -> npt.NDArray[np.float64]:
        """Returns the probabilities of raw rows, float64 [N]."""
        parts = (rows.slice(start, BATCH_ROWS) for start in range(0, rows.num_rows, BATCH_ROWS))
        scores = [self._score(self.complete(part)) for part in parts]
        return np.concatenate(scores) if scores else np.empty(0, np.float64)

    def _score(self, rows: pa.Table) -> npt.NDArray[np.float64]:
        return self.score_parts(*self.parts(rows))

    def parts(self, rows: pa.Table) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the input of the layers above the tables: dense float32 [B, D], pooled vectors float32 [B, F, E]."""
        return self.pool(self.plan, rows)

    def pool(self, plan: Plan, rows: pa.Table) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `parts` of the features of a plan, which may be some of the model's."""
        transformed = plan.apply(rows)
        with torch.no_grad():
            lists = {
                feature.name: _lists_of(feature, column)
                for feature, column in zip(plan.sparse, transformed.sparse, strict=True)
            }
            vectors = self.model.pool_lists(lists) if lists else torch.empty(rows.num_rows, 0, self.width)
            return torch.from_numpy(transformed.dense), vectors

    def score_parts(self, dense: torch.Tensor, vectors: torch.Tensor) -> npt.NDArray[np.float64]:
        """Returns the probabilities of rows from their `parts`, float64 [B]."""
        with torch.no_grad():
            logits = self.model.score(dense, vectors)
        result: npt.NDArray[np.float64] = torch.sigmoid(logits.double()).numpy()
        return result

    @property
    def inputs(self) -> dict[str, str]:
        """The columns of a caller's rows, with their types."""
        if self.events is None:
            return self.columns
        return {name: kind for name, kind in self.columns.items() if name not in self.events.made} | self.events.needed

    def table_of(self, rows: Rows) -> pa.Table:
        """Converts the columns in `inputs` to the warehouse's types. Others are dropped.

        Raises:
            InputError: If a column without a default is absent, or a value of it is of the wrong kind. It names row
                and column.
        """
        return table_of(rows, self.inputs, self.defaults)

    def complete(self, rows: pa.Table) -> pa.Table:
        """Returns converted rows with the histories and windows of the logs. A few thousand: the lists may be long."""
        if self.events is None:
            return rows
        made, kinds = self.events.add(rows), self.columns.items()
        return pa.table({name: made.column(name).cast(TYPES[kind], safe="double" not in kind) for name, kind in kinds})

    def probabilities(self, rows: Rows) -> npt.NDArray[np.float64]:
        """Returns the probabilities of rows as a caller sends them, float64 [N]. All are finite.

        Raises:
            InputError: As `table_of`, or if the probability of a row is not finite.
        """
        return check_finite(self.score(self.table_of(rows)))


def _open_events(record: Mapping[str, Any], logs: Mapping[str, Any]) -> "EventColumns":
    from pipeline.inference.events import EventColumns, EventRecord  # servers without logs need no reader of files

    if "events" not in record:
        raise ConfigError("events", "a model with histories or windows", "none of them", "Leave the logs out.")
    return EventColumns(EventRecord.model_validate(record["events"]), logs, record["columns"])


def check_finite(found: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns probabilities if all are finite.

    Raises:
        InputError: If one is not. It names the row.
    """
    bad = np.flatnonzero(~np.isfinite(found))
    if len(bad):
        remedy = "Send numbers of the size that the model was trained on."
        raise InputError(f"row {bad[0]}", "a finite probability", f"{found[bad[0]]}", remedy)
    return found


def _lists_of(feature: SparseFeature, column: Column) -> IdLists:
    assert column.offsets is not None, "sparse features are lists"
    offsets = torch.from_numpy(column.offsets)
    if not feature.weighted:
        return IdLists(torch.from_numpy(column.values), offsets)
    ids, weights = map(torch.from_numpy, unpack(column.values))
    return IdLists(ids, offsets, weights)

"""Plan: ordered ops checked against a schema. The same plan runs in training, scoring and serving."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, model_validator

from models.config import SparseFeature
from pipeline.errors import ConfigError
from pipeline.transforms.column import Column
from pipeline.transforms.kernels.weights import unpack
from pipeline.transforms.kinds import Kind
from pipeline.transforms.ops import PlannedOp
from pipeline.transforms.ops.op import Counts
from pipeline.transforms.plan.fit import Learner, fit_ops, needs_fit
from pipeline.transforms.plan.graph import Graph
from pipeline.transforms.plan.schedule import ColumnKey, Schedule, Seconds, upstream_columns
from pipeline.transforms.schema import FeatureSchema


class TransformedRows(BaseModel, frozen=True, arbitrary_types_allowed=True):
    """Rows ready to be batched.

    Shapes:
        dense: float32 [N, D]. sparse: one Column of N lists per feature, ids int64. Those of a feature with weights
        are packed with them: see `pipeline.transforms.kernels.weights`.
    """

    dense: np.ndarray
    sparse: tuple[Column, ...]

    def __len__(self) -> int:
        return len(self.dense)


class Plan(BaseModel, frozen=True):
    """The ops that turn raw columns into tensors. `build_plan` builds it; every model is saved with it, as JSON."""

    ops: tuple[PlannedOp, ...]
    """Ordered: each reads raw columns or outputs of earlier ops."""
    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    raw: Mapping[str, tuple[Kind, ...]]
    """Raw columns to read, and the kinds to read them as: numbers, ids or scores."""
    direct: Mapping[str, str] = {}
    """Features without ops of their own -> the column that they are."""
    absent: tuple[str, ...] = ()
    """Columns of `raw` that the table did not have. They are null in every row, even if a later table has them."""

    @model_validator(mode="after")
    def _one_size_per_table(self) -> Self:
        for feature in self.sparse:
            poolings = sorted({other.pooling for other in self.sparse if other.table == feature.table})
            if len(poolings) > 1:
                raise ConfigError(
                    f"table '{feature.table}'",
                    "one pooling for all its features",
                    " and ".join(poolings),
                    "Give them the same.",
                )
            sizes = sorted({other.rows for other in self.sparse if other.table == feature.table})
            if len(sizes) > 1:
                raise ConfigError(
                    f"table '{feature.table}'",
                    "one size for all its features",
                    f"sizes {sizes}",
                    "Give them the same bound.",
                )
        return self

    @property
    def features(self) -> list[str]:
        """Names of the features, dense ones first."""
        return [*self.dense, *self._sparse_names]

    @property
    def columns(self) -> list[str]:
        """Raw columns to read."""
        return [name for name in self.raw if name not in self.absent]

    def with_absent_columns(self, rows: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
        """Returns the rows with the absent columns, null in every row."""
        for name in self.absent:
            rows = rows.drop_columns([name]) if name in rows.schema.names else rows
            kind = _type_of(self.raw[name])
            rows = rows.append_column(pa.field(name, kind), pa.nulls(rows.num_rows, kind))
        return rows

    @property
    def hash(self) -> str:
        """SHA-256 of the plan's content. Equal plans make equal tensors."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    @cached_property
    def schedule(self) -> Schedule:
        """The order in which the ops run. It is derived, so it is neither saved nor hashed."""
        return Schedule(self.ops, [self._key(name) for name in self.features])

    def apply(
        self, rows: pa.Table | pa.RecordBatch, counts: Counts | None = None, seconds: Seconds | None = None
    ) -> TransformedRows:
        """Transforms raw rows. Returns as many rows, in the same order.

        Args:
            counts: Collects the number of values that a declared rule changed.
            seconds: Collects the cost of each kind of op, and of 'arrow', the conversion of raw columns.
        Raises:
            DataError: If a column holds values of a kind that cannot be read as declared.
        """
        counts = Counter() if counts is None else counts
        columns = self.schedule.run(self.with_absent_columns(rows), counts, Counter() if seconds is None else seconds)
        return self.collect(columns, rows.num_rows, counts)

    def collect(self, columns: Mapping[str, Column], rows: int, counts: Counts) -> TransformedRows:
        """Collects the columns that `schedule` makes. Numbers that are not finite become 0 and are counted."""
        dense = np.zeros((rows, len(self.dense)), np.float32)
        for i, name in enumerate(self.dense):
            with np.errstate(over="ignore"):  # too large for float32 becomes infinite here, then 0 and counted
                values = columns[self._key(name)].values.astype(np.float32)
            finite = np.isfinite(values)
            if not finite.all():
                counts[f"not_finite {name}"] += int(len(values) - finite.sum())
                values = np.where(finite, values, np.float32(0.0))
            dense[:, i] = values
        return TransformedRows(dense=dense, sparse=tuple(columns[self._key(name)] for name in self._sparse_names))

    def ids(self, sparse: Iterable[Column]) -> tuple[Column, ...]:
        """Returns the sparse features without their weights."""
        return tuple(
            Column(unpack(column.values)[0], column.offsets) if feature.weighted else column
            for feature, column in zip(self.sparse, sparse, strict=True)
        )

    def unfitted(self) -> list[Learner]:
        """Returns the ops that have yet to learn their numbers."""
        return [op for op in self.ops if needs_fit(op)]

    def columns_of(self, feature: str) -> frozenset[str]:
        """Returns the raw columns that a feature is made of."""
        return self._raw_of([self._key(feature)])

    def columns_of_op(self, op: PlannedOp) -> frozenset[str]:
        """Returns the raw columns that an op reads, directly or through other ops."""
        return self._raw_of(op.inputs)

    def fit_columns(self) -> frozenset[str]:
        """Returns the raw columns that the unfitted ops read, directly or through other ops."""
        return self._raw_of(name for op in self.unfitted() for name in op.inputs)

    def fit(self, chunks: Callable[[], Iterable[pa.Table]], temporary: Path | None = None) -> "Plan":
        """Returns a plan whose ops have learned their numbers, in one pass over the chunks per level of chained fits.

        Args:
            temporary: Folder for data that does not fit into memory. None uses one of the system's.
        """
        plan = self
        while unfitted := plan.unfitted():
            waiting = {op.output for op in unfitted}
            ready = [op for op in unfitted if not upstream_columns(plan.ops, op.inputs) & waiting]
            ops = fit_ops(plan.ops, ready, lambda: map(self.with_absent_columns, chunks()), temporary)
            plan = plan.model_copy(update={"ops": tuple(ops.get(op.output, op) for op in plan.ops)})
        return plan

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy with a schedule of its own. Pydantic alone would pass on the cached one."""
        copy = super().model_copy(update=update, deep=deep)
        copy.__dict__.pop("schedule", None)
        return copy

    @property
    def _sparse_names(self) -> list[str]:
        return [feature.name for feature in self.sparse]

    def _raw_of(self, names: Iterable[str]) -> frozenset[str]:
        keys = map(ColumnKey.parse, upstream_columns(self.ops, names))
        return frozenset(key.column for key in keys if key.kind in self.raw.get(key.column, ()))

    def _key(self, feature: str) -> str:
        return self.direct.get(feature, feature)


def build_plan(schema: FeatureSchema, table: pa.Schema) -> Plan:
    """Builds the plan of a schema over a table's columns.

    Raises:
        ConfigError: If the schema does not fit the table, or contradicts itself.
    """
    graph = Graph(schema, table)
    return Plan(
        ops=tuple(graph.ops),
        dense=tuple(graph.dense),
        sparse=tuple(graph.sparse),
        raw=graph.raw,
        direct=graph.direct,
        absent=tuple(graph.absent),
    )


def _type_of(uses: tuple[Kind, ...]) -> pa.DataType:
    """Returns a type that can be read as all these kinds."""
    if "dense" in uses:
        return pa.int64() if len(uses) > 1 else pa.float64()
    return pa.list_(pa.float64() if "scores" in uses else pa.int64())

"""Names what decides the content of a cached column. Equal keys mean equal bytes."""

import hashlib
import os
from collections.abc import Mapping, Sequence

import numpy as np

from models.config import SparseFeature
from pipeline.data.joined.reader import FeatureJoinReader, Reader
from pipeline.data.selection import Selection
from pipeline.processes.code import hash_code
from pipeline.transforms.ops import PlannedOp
from pipeline.transforms.ops.discrete import GetLocalHour
from pipeline.transforms.ops.zones import zone_offsets
from pipeline.transforms.plan.plan import Plan
from pipeline.transforms.plan.schedule import upstream_columns
from storage.reader import READ_ROWS, Fragment, compared_columns
from storage.snapshot.parquet import local_path

LABEL, WEIGHT, SESSION = ":label", ":weight", ":session"
"""Columns that are no features. No feature's name holds a colon."""
ROOMS = ("models", "pipeline/data", "pipeline/preprocessing", "pipeline/transforms", "storage")
"""Folders with the code that makes columns."""
LIBRARIES = ("numba", "numpy", "pyarrow")
CODE = hash_code(ROOMS, LIBRARIES)


class CacheKeys:
    """The keys of a dataset's columns.

    Args:
        sources: LABEL and, if there are such columns, WEIGHT and SESSION -> the column of the table that it is.
    Attributes:
        columns: Name of a column -> its key, in the order of batches: dense features, sparse ones, the others.
        counters: Name of a feature -> the names under which its ops count values.
    """

    def __init__(self, plan: Plan, selection: Selection, sources: Mapping[str, str], reader: Reader) -> None:
        self.plan, self.sources, self.reader = plan, sources, reader
        self._table = (reader.inner if isinstance(reader, FeatureJoinReader) else reader).table
        self._ops = {op.output: _hash(_describe_op(op)) for op in plan.ops}
        self._rows = _hash([CODE, READ_ROWS, *_describe_selection(selection, reader)])
        sparse = {feature.name: feature for feature in plan.sparse}
        self.columns = {name: self._key_feature(name, sparse.get(name)) for name in plan.features}
        self.columns |= {kind: _hash([kind, reader.identify(name)]) for kind, name in sources.items()}
        self.counters = {name: count_names(plan, name) for name in plan.features}

    def rows(self, fragment: Fragment) -> str | None:
        """Returns the key of the selected rows of a fragment. None: a file of it cannot be found.

        Names of data files are unique. Sizes and times of local files tell one that was replaced nevertheless.
        """
        paths = [fragment.path, *fragment.deletes, *(one.path for one in fragment.values)]
        try:
            stamps = [_stamp(path) for path in paths]
        except OSError:
            return None
        schema = self._table.metadata.current_schema_id if fragment.values else None
        return _hash([self._rows, fragment.model_dump_json(), stamps, schema])

    def _key_feature(self, name: str, feature: SparseFeature | None) -> str:
        """Returns the key of a feature: of its ops with all that they learned, and of the columns that they read."""
        plan = self.plan
        ops = [self._ops[op.output] for op in ops_of(plan, name)]
        raw = [[one, plan.raw[one], self._identify(one)] for one in sorted(plan.columns_of(name))]
        made = "float32" if feature is None else id_type(feature)
        return _hash([name, plan.direct.get(name, name), made, ops, raw])

    def _identify(self, column: str) -> str:
        return "absent" if column in self.plan.absent else self.reader.identify(column)


def ops_of(plan: Plan, feature: str) -> list[PlannedOp]:
    """Returns the ops that make a feature, in order."""
    names = upstream_columns(plan.ops, [plan.direct.get(feature, feature)])
    return [op for op in plan.ops if op.output in names]


def count_names(plan: Plan, feature: str) -> frozenset[str]:
    """Returns the names under which changed values of a feature are counted."""
    return frozenset([f"not_finite {feature}", *(f"{op.kind} {op.output}" for op in ops_of(plan, feature))])


def id_type(feature: SparseFeature) -> str:
    """Returns the type in which the ids of a feature are kept."""
    return "int64" if feature.weighted or feature.rows > np.iinfo(np.int32).max else "int32"


def _describe_op(op: PlannedOp) -> list[object]:
    zone = op.time_zone if isinstance(op, GetLocalHour) else None
    rules = [] if zone is None else [array.tolist() for array in zone_offsets(zone)[:2]]
    return [op.model_dump_json(), rules]


def _describe_selection(selection: Selection, reader: Reader) -> Sequence[object]:
    """Returns what decides which rows of a day are selected."""
    expression = selection.expression()
    read = dict.fromkeys([*compared_columns(expression), *selection.key_columns()])
    return [selection.model_dump_json(exclude={"days"}), f"{expression}", [reader.identify(name) for name in read]]


def _stamp(path: str) -> tuple[int, int] | None:
    """Returns size and time of a local file. Looking at one of an object store would take a round trip."""
    local = local_path(path)
    if local is None:
        return None
    status = os.stat(local)
    return status.st_size, status.st_mtime_ns


def _hash(values: Sequence[object]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:32]

"""FeatureSchema: the dense and sparse features, the label and the weight of a row."""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, model_validator

from pipeline.errors import ColumnError, closest_names
from pipeline.marks import APART
from pipeline.transforms.joins import AnySource, EventWindow, FeatureJoin, History
from pipeline.transforms.kinds import Kind
from pipeline.transforms.ops import AnyOp
from pipeline.transforms.ops.dense import FillNull, Standardise
from pipeline.transforms.ops.op import Reads
from storage.keys import expand_keys
from storage.names import Names

COLUMN = "{column}"
NAMED_KEYS = re.compile(r"([A-Za-z_]\w*)\[([^\[\]]+)\]")
"""`dense[user_age, 5..7]`."""
KEY_RANGE = re.compile(r"\d+(\.\.\d+)?")


class FeatureGroup(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Columns with the same transforms."""

    columns: Names
    """Names or patterns: `int_*`, `cat_?`. A pattern matches the table's columns in their order, then derived ones."""
    name: str = COLUMN
    """Feature name. `{column}` stands for the column. Set it to use a column in several groups."""
    transforms: tuple[AnyOp, ...] = ()
    on_missing: Annotated[Literal["fail", "default"], APART] = "fail"
    """How to treat a column that is named here (not matched by a pattern) but is not in the table. fail refuses to
    train. default reads it as null in every row, and serving ignores it."""

    def read_kind(self, otherwise: Kind) -> Kind:
        """Returns the kind to read its columns as: that of the first op that does not accept any kind."""
        kinds: list[Any] = [op.reads[0] for op in self.transforms if op.reads[0] != "either"]
        return kinds[0] if kinds else otherwise


class DenseGroup(FeatureGroup):
    """Numbers. Each column becomes one input of the bottom MLP."""

    transforms: tuple[AnyOp, ...] = (Standardise(), FillNull())
    """Ops in order. A value that is not finite after the last one becomes 0 and is counted."""


class SparseGroup(FeatureGroup):
    """Ids or lists of ids. Each column becomes one feature that looks up an embedding table."""

    transforms: tuple[AnyOp, ...] = ()
    """Ops in order. The last one must bound the ids (sigrid_hash, bucketize, clamp). The bound is the table's size."""
    table: str = COLUMN
    """Embedding table. Groups and columns that name the same table share its rows."""
    pooling: Literal["sum", "mean"] = "sum"
    """How the vectors of a list become one vector."""
    weights: str | None = None
    """Column with a number for each id, by which its vector is multiplied: `{column}_scores`, or an output of a
    compute_score that makes scores. `mean` then divides by the sum of their absolute values. Transforms must keep the
    places of ids: first_x, sigrid_hash, clamp, enumerate, or map_id with `unknown`. A number that is missing or not
    finite, and all numbers of a row that has not as many as ids, become 0 and are counted."""


def input_kinds(op: AnyOp) -> Reads:
    """Returns the kind of each input of an op. An op of any number of inputs repeats its last kind."""
    return (*op.reads, *op.reads[-1:] * (len(op.inputs) - len(op.reads)))


class FeatureSchema(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The columns of the warehouse table that become features, label and weight."""

    label: str = "label"
    """Column of outcomes: 0 or 1."""
    weight: str | None = None
    """Column with the number of rows that each row counts for, 0.0001 to 10,000. It weights losses, gradients and all
    metrics. None counts each row once."""
    derived: tuple[AnyOp, ...] = ()
    """Ops with `inputs` and an `output`, in any order. Each makes a column that groups can name."""
    joined: tuple[FeatureJoin, ...] = ()
    """Feature sources. Groups can name their columns as if they were in the table."""
    histories: tuple[History, ...] = ()
    """Event logs. Groups can name the lists that are cut from them as if they were in the table."""
    windows: tuple[EventWindow, ...] = ()
    """Event logs. Groups can name the counts, sums and means of their events as if they were in the table."""
    dense: tuple[DenseGroup, ...] = ()
    sparse: tuple[SparseGroup, ...] = Field(min_length=1)
    allow_deprecated: Annotated[bool, APART] = False
    """Whether to train on features that the catalog marks as deprecated."""
    map_keys: Annotated[Mapping[str, Mapping[str, NonNegativeInt]], APART] = {}
    """Names for keys of maps: map -> name -> key. Groups can then say `dense[age]` or `dense[user_*]` instead of
    `dense[17]`."""

    @model_validator(mode="before")
    @classmethod
    def _put_keys(cls, values: Any) -> Any:
        """Replaces names of keys by the keys. What is trained and recorded does not depend on names."""
        named = values.get("map_keys") if isinstance(values, dict) else None
        if not named or not isinstance(named, Mapping):
            return values

        def put(group: Any) -> Any:
            columns = group.get("columns") if isinstance(group, dict) else None
            if not isinstance(columns, str | list | tuple):
                return group
            return group | {
                "columns": [put_keys(one, named) for one in ([columns] if isinstance(columns, str) else columns)]
            }

        groups = {kind: values[kind] for kind in ("dense", "sparse") if isinstance(values.get(kind), list | tuple)}
        return values | {kind: [put(group) for group in found] for kind, found in groups.items()}

    @property
    def sources(self) -> tuple[AnySource, ...]:
        """All sources of columns that the table lacks, or has from a materialization."""
        return (*self.joined, *self.logs)

    @property
    def logs(self) -> tuple[History | EventWindow, ...]:
        """All uses of event logs."""
        return (*self.histories, *self.windows)

    def named_columns(self) -> list[str]:
        """Returns the names and patterns of all columns that features read."""
        groups = [name for group in (*self.dense, *self.sparse) for name in group.columns]
        weights = [
            group.weights.replace(COLUMN, column)
            for group in self.sparse
            if group.weights is not None
            for name in group.columns
            for column in spelled_keys(name)
        ]
        return [*groups, *weights, *(name for op in self.derived for name in op.inputs)]


def spelled_keys(name: str) -> list[str]:
    """Returns the columns that a spelling of a map's keys means if there is such a map, else the name as it is.

    Example:
        >>> spelled_keys("ids[4, 5]"), spelled_keys("cat_*")
        (['ids_4', 'ids_5'], ['cat_*'])
    """
    return expand_keys(name, (), [name.partition("[")[0]])


def put_keys(text: Any, named: Mapping[str, Any]) -> Any:
    """Replaces names of a map's keys by the keys, also several names that match a pattern.

    Raises:
        ColumnError: If the map has no key of a name.
    Example:
        >>> put_keys("dense[user_*, 5..7]", {"dense": {"user_age": 17, "user_size": 18}})
        'dense[17, 18, 5..7]'
    """
    found = NAMED_KEYS.fullmatch(text) if isinstance(text, str) else None
    keys = named.get(found[1]) if found is not None else None
    if found is None or not isinstance(keys, Mapping):
        return text
    put: list[str] = []
    for part in (part.strip() for part in found[2].split(",")):
        matching = [f"{key}" for name, key in keys.items() if fnmatch.fnmatchcase(f"{name}", part)]
        if not matching and KEY_RANGE.fullmatch(part) is None:
            raise unknown_column("features.map_keys", part, [*map(str, keys)], f"the name of a key of map '{found[1]}'")
        put += matching or [part]
    return f"{found[1]}[{', '.join(put)}]"


def resolve(
    patterns: Iterable[str], known: Iterable[str], where: str, what: str = "a column of the table"
) -> list[str]:
    """Returns the names that match the patterns, in the order of the patterns, then of `known`, each once.

    Raises:
        ColumnError: If a name or pattern matches nothing. Lists the closest names.
    Example:
        >>> resolve(["cat_*", "age"], ["age", "cat_a", "cat_b"], "features")
        ['cat_a', 'cat_b', 'age']
    """
    known = list(known)
    found: dict[str, None] = {}
    for pattern in patterns:
        names = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise unknown_column(where, pattern, known, what)
        found |= dict.fromkeys(names)
    return list(found)


def unknown_column(where: str, name: str, known: Sequence[str], what: str = "a column of the table") -> ColumnError:
    """Returns the error about a missing column, which names the closest ones."""
    return ColumnError(
        f"{where} '{name}'", what, "none of that name", f"Closest: {closest_names(name, known)}. Correct the name."
    )

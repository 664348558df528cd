"""FeatureSchema: which columns are dense, which are sparse, which is the label."""

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from pipeline.data.columns import Names
from pipeline.errors import ColumnError, ConfigError, closest_names
from pipeline.transforms.kinds import Kind
from pipeline.transforms.ops import AnyOp
from pipeline.transforms.ops.dense import FillNull, Standardise
from pipeline.transforms.ops.op import Reads

COLUMN = "{column}"


class FeatureJoin(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A side source whose columns are joined to the rows by key: features that the table does not have, or not yet."""

    path: str | tuple[str, ...] | None = None
    """Parquet or CSV files: a path, a glob, or several; below the project root unless absolute."""
    table: str | None = None
    """Another table of the warehouse, instead of files."""
    on: Names
    """Key columns, in the rows and in the side source; unique there, within a day where it has days."""
    columns: Names = ("*",)
    """Names or patterns of the columns to add."""
    day_column: str | None = None
    """Column of the side source (date, timestamp or ISO text) with the day whose rows it is joined to: a process then
    holds days of it, not all. None: joined to all days."""
    prefix: str = ""
    """Put before the names of the added columns."""
    stored: bool = False
    """Whether `flows.enrich` has written the columns into the table; they are read there then, and not joined."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.table is None):
            raise ConfigError("features.joined", "either `path` or `table`", "both or neither", "Give exactly one.")
        if self.table is not None and self.day_column not in (None, "day"):
            raise ConfigError(
                f"features.joined '{self.table}'", "day_column 'day', by which a table is parted, or none",
                f"'{self.day_column}'", "Correct day_column.",
            )  # fmt: skip
        return self

    @property
    def name(self) -> str:
        """The source as the user knows it."""
        return self.table or (self.path if isinstance(self.path, str) else ", ".join(self.path or ()))

    def may_add(self, pattern: str) -> bool:
        """Whether a column of this name, or one that this pattern takes, may be among the added ones."""
        names = [f"{self.prefix}{name}" for name in self.columns]
        return any(fnmatch.fnmatchcase(pattern, name) or fnmatch.fnmatchcase(name, pattern) for name in names)


class FeatureGroup(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Columns that are treated alike."""

    columns: Names
    """Names or patterns: `int_*`, `cat_?`. A pattern takes the table's columns in their order, then derived ones."""
    name: str = COLUMN
    """Feature name; `{column}` stands for the column, so that a column can be used more than once."""
    transforms: tuple[AnyOp, ...] = ()
    on_missing: Literal["fail", "default"] = "fail"
    """What a column becomes that is named, not meant by a pattern, and that the table does not have: fail refuses to
    train, default reads it as null throughout and takes no notice of it when the model is served."""

    def read_kind(self, otherwise: Kind) -> Kind:
        """As what its columns are read: as the first op wants them that does not take any kind."""
        kinds: list[Any] = [op.reads[0] for op in self.transforms if op.reads[0] != "either"]
        return kinds[0] if kinds else otherwise


class DenseGroup(FeatureGroup):
    """Numbers; each column becomes one input of the bottom MLP."""

    transforms: tuple[AnyOp, ...] = (Standardise(), FillNull())
    """Ops in order. What is still not finite after the last one becomes 0 and is counted."""


class SparseGroup(FeatureGroup):
    """Ids or lists of ids; each column becomes one bag of an embedding table."""

    transforms: tuple[AnyOp, ...] = ()
    """Ops in order; the last ids must be bounded (sigrid_hash, bucketize, clamp): the bound is the table's size."""
    table: str = COLUMN
    """Embedding table; groups and columns that name the same one share its rows."""
    pooling: Literal["sum", "mean"] = "sum"
    """How the vectors of a list become one."""


def input_kinds(op: AnyOp) -> Reads:
    """Kind of each input of an op, as far as it says; one that takes any number wants all the others like the last."""
    return (*op.reads, *op.reads[-1:] * (len(op.inputs) - len(op.reads)))


class FeatureSchema(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Columns of the warehouse table and what they are for."""

    label: str = "label"
    """Column of outcomes, 0 or 1."""
    weight: str | None = None
    """Column that says how many rows each row stands for, 0.0001 to 10,000: losses, gradients and all metrics are
    weighted by it. None: each counts once."""
    derived: tuple[AnyOp, ...] = ()
    """Columns made of others, in any order: ops with `inputs` and an `output`, which the groups can then name."""
    joined: tuple[FeatureJoin, ...] = ()
    """Side sources whose columns the groups can name without their being in the table."""
    dense: tuple[DenseGroup, ...] = ()
    sparse: tuple[SparseGroup, ...] = Field(min_length=1)
    allow_deprecated: bool = False
    """Whether to train on features that `flows.features` has declared deprecated."""


def resolve(
    patterns: Iterable[str], known: Iterable[str], where: str, what: str = "a column of the table"
) -> list[str]:
    """Columns (or what else) that the patterns name, in the order of the patterns, then of the table, each once.

    Raises:
        ConfigError: If a name is absent or a pattern takes nothing; names the closest columns.
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
    """The complaint about a column that is not there; names the closest ones."""
    return ColumnError(
        f"{where} '{name}'", what, "none of that name", f"Closest: {closest_names(name, known)}. Correct the name."
    )

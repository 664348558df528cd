"""Graph: orders a schema's ops over a table's columns and checks them before the first row is read."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import pyarrow as pa

from models.config import SparseFeature
from pipeline.errors import ColumnError, ConfigError
from pipeline.transforms.kinds import KINDS, Kind
from pipeline.transforms.ops import PlannedOp
from pipeline.transforms.ops.discrete import GetLocalHour
from pipeline.transforms.ops.op import VALUE
from pipeline.transforms.ops.weigh import Weigh
from pipeline.transforms.plan.schedule import ColumnKey
from pipeline.transforms.schema import (
    COLUMN,
    DenseGroup,
    FeatureSchema,
    SparseGroup,
    input_kinds,
    resolve,
    unknown_column,
)
from storage.arrow import is_bytes, is_list, is_text, is_uuid
from storage.keys import expand_keys, map_names
from storage.names import NAME

MOST_WEIGHTED_IDS = 1 << 32
"""Ids that a list with weights can hold: see `pipeline.transforms.kernels.weights`."""


class MadeColumn(NamedTuple):
    """A column of the graph: its name in the plan, its kind, and the bound of its ids, if any."""

    key: str
    kind: Kind
    limit: int | None = None


class Graph:
    """The ops of a schema, ordered: each reads raw columns or outputs of earlier ops.

    Raises:
        ConfigError: If a column is missing or of the wrong kind, an op does not fit its inputs, derived columns form a
            cycle or are unused, ids have no bound, or the label is read.
    """

    def __init__(self, schema: FeatureSchema, table: pa.Schema) -> None:
        self.schema, self.table = schema, table
        self.ops: list[PlannedOp] = []
        self.dense: list[str] = []
        self.sparse: list[SparseFeature] = []
        self.direct: dict[str, str] = {}
        self.absent: dict[str, None] = {}
        self._raw: dict[str, set[Kind]] = {}
        self._made: dict[str, MadeColumn] = {}
        self._derived = {op.output: op for op in schema.derived}
        self._check_outputs()
        for dense in schema.dense:
            for column in self._resolve(dense, "features.dense column"):
                self.dense.append(self._bind(dense, column, "dense")[0])
        for sparse in schema.sparse:
            for column in self._resolve(sparse, "features.sparse column"):
                self._add_sparse(sparse, column)
        _unique([*self.dense, *(feature.name for feature in self.sparse)])
        self._check_use()

    @property
    def raw(self) -> dict[str, tuple[Kind, ...]]:
        """Raw columns to read, and the kinds to read them as."""
        return {column: tuple(kind for kind in KINDS if kind in kinds) for column, kinds in self._raw.items()}

    def _resolve(self, group: DenseGroup | SparseGroup, where: str) -> list[str]:
        known = [*self.table.names, *self._derived]
        if group.on_missing == "default":
            missing = [name for name in group.columns if name not in known and NAME.fullmatch(name)]
            self.absent |= dict.fromkeys(missing)
            known += missing
        maps = map_names(self.table)
        columns = [name for pattern in group.columns for name in expand_keys(pattern, known, maps)]
        return resolve(columns, known, where)

    def _add_sparse(self, group: SparseGroup, column: str) -> None:
        name, limit = self._bind(group, column, "sparse")
        if limit is None:
            raise ConfigError(
                f"features.sparse '{name}'",
                "bounded ids",
                "ids of any size",
                "End its transforms with sigrid_hash, bucketize or clamp.",
            )
        table = group.table.replace(COLUMN, name if group.table == COLUMN else column)
        _check_name("table", table, "Set the group's `table`.")
        weighted = self._is_weighted(group)
        if weighted and limit > MOST_WEIGHTED_IDS:
            raise ConfigError(
                f"features.sparse '{name}'", f"at most {MOST_WEIGHTED_IDS} ids with weights", f"{limit}",
                "Choose a smaller bound.",
            )  # fmt: skip
        self.sparse.append(SparseFeature(name, table, limit, group.pooling, weighted))

    def _bind(
        self, group: DenseGroup | SparseGroup, column: str, wanted: Literal["dense", "sparse"]
    ) -> tuple[str, int | None]:
        """Adds the ops of one column. Returns the feature's name and the bound of its ids."""
        name = group.name.replace(COLUMN, column)
        _check_name("feature", name, "Set the group's `name`.")
        stored = made = self._derive(column) if column in self._derived else self._read(column, group.read_kind(wanted))
        weighted = isinstance(group, SparseGroup) and self._is_weighted(group)
        for i, template in enumerate(group.transforms):
            _check_step(template, name, made.kind)
            if i == 0:
                self._check_unit(template, name, column)
            is_last = i == len(group.transforms) - 1 and not weighted
            made = self._add(template, (made,), name if is_last else str(ColumnKey(name, str(i))))
        if made.kind != wanted:
            remedy = (
                "Aggregate them with compute_score." if made.kind == "scores" else f"Move it to features.{made.kind}."
            )
            raise ConfigError(f"feature '{name}'", f"{wanted} values after the last op", f"{made.kind} values", remedy)
        if isinstance(group, SparseGroup) and weighted:
            scores = () if group.weights is None else (self._scores(group, column, name), stored)
            made = self._add(Weigh(mean=group.pooling == "mean"), (made, *scores), name)
        elif not group.transforms:
            self.direct[name] = made.key
        return name, made.limit

    def _is_weighted(self, group: SparseGroup) -> bool:
        """Whether ids of a group have weights: their own, or those of a mean in a model with weights; see Weigh."""
        some = any(other.weights is not None for other in self.schema.sparse)
        return group.weights is not None or (some and group.pooling == "mean")

    def _scores(self, group: SparseGroup, column: str, name: str) -> MadeColumn:
        """Returns the column with the weights of a group's column."""
        assert group.weights is not None
        moving = next((op for op in group.transforms if not op.in_place), None)
        if moving is not None:
            raise ConfigError(
                f"{moving.kind} on '{name}'", "transforms that keep the places of ids, which have weights",
                "one that may not", "Move it to features.derived, or remove `weights`.",
            )  # fmt: skip
        scores = group.weights.replace(COLUMN, column)
        if column in self.absent and scores not in self.table.names:
            self.absent[scores] = None
            return self._read(scores, "scores")
        made = self._input(f"weights of '{name}'", scores, "scores", ())
        if made.kind != "scores":
            raise ConfigError(
                f"weights of '{name}'",
                "lists of numbers",
                f"'{scores}' with {made.kind} values",
                "Name another column.",
            )
        return made

    def _read(self, column: str, kind: Kind) -> MadeColumn:
        """Adds a raw column."""
        if column not in self.absent:
            _check_type(column, self.table.field(column).type, kind)
        self._raw.setdefault(column, set()).add(kind)
        return MadeColumn(str(ColumnKey(column, kind)), kind)

    def _derive(self, output: str, above: tuple[str, ...] = ()) -> MadeColumn:
        """Adds a derived column after the columns that it reads."""
        if output in above:
            cycle = " -> ".join([*above[above.index(output) :], output])
            raise ConfigError("features.derived", "ops without a cycle", f"{cycle}", "Remove one of its inputs.")
        if output not in self._made:
            op = self._derived[output]
            _check_count(op)
            self._check_unit(op, output, op.inputs[0])
            wanted = input_kinds(op)
            where = f"{op.kind} of '{op.output}'"
            inputs = [self._input(where, *pair, (*above, output)) for pair in zip(op.inputs, wanted, strict=True)]
            for name, kind, made in zip(op.inputs, wanted, inputs, strict=True):
                if kind not in ("either", made.kind):
                    raise ConfigError(
                        f"{op.kind} of '{output}'",
                        f"{kind} values",
                        f"'{name}' with {made.kind} values",
                        "Name another input, or insert an op.",
                    )
            self._made[output] = self._add(op, inputs, str(ColumnKey(output, "derived")))
        return self._made[output]

    def _check_unit(self, op: PlannedOp, output: str, column: str) -> None:
        """Refuses a unit for timestamps and dates, which are read as seconds."""
        if isinstance(op, GetLocalHour) and op.time_unit != "seconds" and column in self.table.names:
            kind = self.table.field(column).type
            if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
                raise ConfigError(
                    f"get_local_hour of '{output}'", f"no time_unit for '{column}' of type {kind}", op.time_unit,
                    "Remove time_unit: timestamps have a unit of their own.",
                )  # fmt: skip

    def _input(self, where: str, name: str, kind: Kind | Literal["either"], above: tuple[str, ...]) -> MadeColumn:
        if name in self._derived:
            return self._derive(name, above)
        if name not in self.table.names:
            raise unknown_column(f"{where}, input", name, [*self.table.names, *self._derived])
        if name == self.schema.label:
            raise ConfigError(where, "inputs other than the label", f"'{name}'", "Name another column.")
        return self._read(name, _natural(self.table.field(name).type) if kind == "either" else kind)

    def _add(self, op: PlannedOp, inputs: Sequence[MadeColumn], output: str) -> MadeColumn:
        self.ops.append(op.bound(tuple(made.key for made in inputs), output))
        kind = inputs[0].kind if op.makes == "same" else op.makes
        return MadeColumn(output, kind, op.ids_below(*(made.limit for made in inputs)))

    def _check_outputs(self) -> None:
        for op in self.schema.derived:
            if op.output == VALUE:
                raise ConfigError(f"{op.kind} of features.derived", "an `output`", "none", "Name the column it makes.")
            _check_name("features.derived", op.output, "Rename the output.")
            if op.output in self.table.names:
                raise ConfigError(
                    f"features.derived '{op.output}'",
                    "a name of its own",
                    "that of a column of the table",
                    "Rename the output.",
                )
        twice = _twice(op.output for op in self.schema.derived)
        if twice:
            raise ConfigError("features.derived", "each output once", f"twice: {twice}", "Rename one of them.")

    def _check_use(self) -> None:
        for what, column in (("label", self.schema.label), ("weight", self.schema.weight)):
            if column in self._raw:
                raise ConfigError(
                    "features",
                    f"features other than the {what}",
                    f"'{column}'",
                    f"Remove the {what} from the patterns.",
                )
        unread = [output for output in self._derived if output not in self._made]
        if unread:
            raise ConfigError(
                f"features.derived '{unread[0]}'",
                "a feature that reads it",
                "none",
                "Name it in a group of features.dense or features.sparse, or remove it.",
            )
        for column, kinds in self._raw.items():
            if {"sparse", "scores"} <= kinds:
                raise ConfigError(
                    f"column '{column}'",
                    "ids or scores",
                    "both",
                    "Read it as one of them. A null is dropped from ids but kept in scores.",
                )


def _natural(kind: pa.DataType) -> Kind:
    """Returns the kind to read a column as, for an op that accepts numbers and ids."""
    single = is_text(kind)
    return "sparse" if single or pa.types.is_nested(kind) else "dense"


def _check_count(op: PlannedOp) -> None:
    """Refuses the op of a derived column with a wrong number of inputs."""
    count, least = len(op.inputs), len(op.reads)
    if count < least or (count > least and not op.variadic):
        raise ConfigError(
            f"{op.kind} of '{op.output}'",
            f"{'at least ' if op.variadic else ''}{least} input{'s' if least > 1 else ''}",
            f"{count}: {', '.join(op.inputs)}" if count else "none",
            "Name them in `inputs`.",
        )


def _check_step(template: PlannedOp, name: str, kind: Kind) -> None:
    """Refuses an op of a group that cannot read the output of the previous op."""
    where = f"{template.kind} on '{name}'"
    if len(template.reads) > 1:
        raise ConfigError(where, "an op of one input", f"one of {len(template.reads)}", "Move it to features.derived.")
    if template.reads[0] not in ("either", kind):
        raise ConfigError(
            where, f"a {template.reads[0]} input", f"a {kind} input", "Change the order of its transforms."
        )
    if (template.inputs, template.output) != ((VALUE,), VALUE):
        raise ConfigError(
            where,
            "an op without `inputs` and `output`",
            "one of them",
            "Remove them: each op of a group reads the output of the previous one.",
        )


def _check_type(column: str, kind: pa.DataType, use: Kind) -> None:
    """Refuses a column that cannot be read as declared."""
    listed = is_list(kind)
    value = kind.value_type if listed else kind
    number = pa.types.is_integer(value) or pa.types.is_floating(value)
    time = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    single = pa.types.is_boolean(kind) or pa.types.is_decimal(kind)
    if use == "dense" and (listed or not (number or single or time)):
        raise ColumnError(
            f"column '{column}'",
            "numbers for a dense feature",
            f"{kind}",
            "Move it to features.sparse, or convert the column.",
        )
    whole = (not listed and pa.types.is_floating(value)) or pa.types.is_decimal(value)  # a fraction is refused later
    text = is_text(value) or is_bytes(value) or is_uuid(value)
    if use == "sparse" and not (pa.types.is_integer(value) or text or pa.types.is_boolean(value) or whole):
        raise ColumnError(
            f"column '{column}'",
            "integers or strings for a sparse feature",
            f"{kind}",
            "Add a bucketize op, or convert the column.",
        )
    if use == "scores" and not (listed and number):
        raise ColumnError(f"column '{column}'", "lists of numbers for scores", f"{kind}", "Name another column.")


def _check_name(what: str, name: str, remedy: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(f"{what} '{name}'", "a name of letters, digits and _", "another", remedy)


def _unique(names: Iterable[str]) -> None:
    twice = _twice(names)
    if twice:
        raise ConfigError(
            "features",
            "each feature name once",
            f"twice: {twice}",
            "Set the group's `name`, such as '{column}_bucket'.",
        )


def _twice(names: Iterable[str]) -> str:
    return ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))

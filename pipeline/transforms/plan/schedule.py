"""Schedule: runs common parts of ops once and neighbours in one pass, and drops each column after its last reader."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa

from pipeline.transforms.column import Column, from_arrow
from pipeline.transforms.kernels.fused import fusable, run_in_one_pass
from pipeline.transforms.ops import PlannedOp
from pipeline.transforms.ops.op import Counts

Seconds = Counter[str]
"""Seconds by kind of op, joined by + for ops that shared a pass. 'arrow' counts the reading of raw columns."""


class ColumnKey(NamedTuple):
    """Name inside a plan of a column that is not a feature.

    Plans store it as `column:kind`. No feature's name holds a colon, so the two kinds of names cannot collide.

    Example:
        >>> str(ColumnKey("age", "dense"))
        'age:dense'
        >>> ColumnKey.parse("age:dense")
        ColumnKey(column='age', kind='dense')
    """

    column: str
    kind: str
    """How a raw column is read, `derived`, or the number of the transform of a feature that makes it."""

    def __str__(self) -> str:
        return f"{self.column}:{self.kind}"

    @classmethod
    def parse(cls, name: str) -> "ColumnKey":
        """Returns the key written as this name; a feature's name has no column."""
        column, _, kind = name.rpartition(":")
        return cls(column, kind)


@dataclass(frozen=True)
class PlanStep:
    """Ops that run in one pass. Ops that do the same to the same columns run once."""

    twins: tuple[tuple[PlannedOp, ...], ...]
    """In the order of the pass: the op that runs, then the ops equal to it."""
    inputs: tuple[str, ...]
    spent: tuple[str, ...] = ()
    """Columns that no later step reads."""

    @property
    def ops(self) -> list[PlannedOp]:
        """The ops to run, in order."""
        return [first for first, *_ in self.twins]

    @property
    def name(self) -> str:
        """The name that its cost is counted under."""
        return "+".join(op.kind for op in self.ops)

    @property
    def output(self) -> str:
        """The column that it makes."""
        return self.ops[-1].output

    def run(self, columns: Sequence[Column], counts: Counts) -> Column:
        """Returns the column made. Every twin counts the values that it would have changed."""
        ops = self.ops
        if len(ops) == 1:
            changed: Counts = Counter()
            made = ops[0].apply(columns, changed)
            changes = [changed.total()]
        else:
            made, changes = run_in_one_pass(ops, columns[0])
        for twins, change in zip(self.twins, changes, strict=True):
            for op in twins:
                op.count(counts, change)
        return made


class Schedule:
    """The order in which ops run. The results equal those of running the ops one by one.

    Args:
        ops: Each reads raw columns or outputs of earlier ops.
        wanted: Columns to make. Ops that none of them needs do not run.
    """

    def __init__(self, ops: Sequence[PlannedOp], wanted: Iterable[str]) -> None:
        self.wanted = tuple(wanted)
        self._same: dict[str, str] = {}
        alike: dict[tuple[tuple[str, ...], str], list[PlannedOp]] = {}
        for op in _needed(ops, self.wanted):
            inputs = tuple(self.canonical(name) for name in op.inputs)
            twins = alike.setdefault((inputs, content_key(op)), [])
            twins.append(op)
            self._same[op.output] = twins[0].output
        steps = [PlanStep((tuple(twins),), inputs) for (inputs, _), twins in alike.items()]
        kept = {self.canonical(name) for name in self.wanted}
        self.steps = _mark_spent(_fuse_steps(steps, kept), kept)

    def canonical(self, column: str) -> str:
        """Returns the column to read for this one: the same, or an equal one that an earlier op makes."""
        return self._same.get(column, column)

    @property
    def raw(self) -> list[str]:
        """Names of the raw columns to read."""
        made = {step.output for step in self.steps}
        names = [*(name for step in self.steps for name in step.inputs), *map(self.canonical, self.wanted)]
        return [name for name in dict.fromkeys(names) if name not in made]

    def read(self, rows: pa.Table | pa.RecordBatch, name: str, seconds: Seconds) -> Column:
        """Reads a raw column.

        Raises:
            DataError: If it holds values of a kind that cannot be read as declared.
        """
        began = time.perf_counter()
        key = ColumnKey.parse(name)
        column = from_arrow(key.column, single_array(rows.column(key.column)), key.kind)  # type: ignore[arg-type]
        seconds["arrow"] += time.perf_counter() - began  # type: ignore[assignment]
        return column

    def run(
        self,
        rows: pa.Table | pa.RecordBatch,
        counts: Counts,
        seconds: Seconds,
        known: Mapping[str, Column] = MappingProxyType({}),
    ) -> Mapping[str, Column]:
        """Returns the wanted columns of the rows.

        Args:
            known: Raw columns that are given, not read from the rows.
        Raises:
            DataError: If a column holds values of a kind that cannot be read as declared.
        """
        columns = dict(known)

        def read(name: str) -> Column:
            if name not in columns:
                columns[name] = self.read(rows, name, seconds)
            return columns[name]

        for step in self.steps:
            inputs = [read(name) for name in step.inputs]
            began = time.perf_counter()
            columns[step.output] = step.run(inputs, counts)
            seconds[step.name] += time.perf_counter() - began  # type: ignore[assignment]
            for name in step.spent:
                del columns[name]
        return {name: read(self.canonical(name)) for name in self.wanted}


def content_key(op: PlannedOp) -> str:
    """Returns what an op does, without the columns that it reads and makes."""
    return op.model_dump_json(exclude={"inputs", "output"})


def upstream_columns(ops: Sequence[PlannedOp], wanted: Iterable[str]) -> set[str]:
    """Returns the wanted columns and all columns, raw ones too, that they are made of."""
    found = set(wanted)
    for op in reversed(ops):
        if op.output in found:
            found.update(op.inputs)
    return found


def _needed(ops: Sequence[PlannedOp], wanted: Iterable[str]) -> list[PlannedOp]:
    names = upstream_columns(ops, wanted)
    return [op for op in ops if op.output in names]


def _fuse_steps(steps: list[PlanStep], kept: set[str]) -> list[PlanStep]:
    """Joins a step to the pass of the step before it, unless something else reads the column between them."""
    readers = Counter([*kept, *(name for step in steps for name in step.inputs)])
    fused: list[PlanStep] = []
    last: dict[str, int] = {}
    for step in steps:
        before = last.get(step.inputs[0])
        if before is not None and readers[step.inputs[0]] == 1 and fusable(fused[before].ops[-1], step.ops[0]):
            step = PlanStep(fused[before].twins + step.twins, fused[before].inputs)
            fused[before] = step
        else:
            before = len(fused)
            fused.append(step)
        last[step.output] = before
    return fused


def _mark_spent(steps: list[PlanStep], kept: set[str]) -> list[PlanStep]:
    """Adds to each step the columns that no later step reads and that are not kept."""
    seen = set(kept)
    done: list[PlanStep] = []
    for step in reversed(steps):
        spent = tuple(dict.fromkeys(name for name in step.inputs if name not in seen))
        seen.update(spent)
        done.append(PlanStep(step.twins, step.inputs, spent))
    return done[::-1]


def single_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Returns a column as one array."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # copies even a single chunk

"""Schedule: how ops are run: common parts once, neighbours in one pass, columns held no longer than they are read."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pyarrow as pa

from pipeline.transforms.column import Column, from_arrow
from pipeline.transforms.kernels.fused import fusable, run_in_one_pass
from pipeline.transforms.ops import AnyOp
from pipeline.transforms.ops.op import Counts

Seconds = Counter[str]
"""What ran -> seconds: kinds of ops, joined by + where they shared a pass, and 'arrow' for raw columns."""


def raw_key(column: str, kind: str) -> str:
    """Name of a raw column that is read as a kind; no feature's name holds a colon, so they cannot meet."""
    return f"{column}:{kind}"


@dataclass(frozen=True)
class Step:
    """Ops that run in one pass; each stands for all the ops that do the same to the same columns."""

    twins: tuple[tuple[AnyOp, ...], ...]
    inputs: tuple[str, ...]
    spent: tuple[str, ...] = ()
    """Columns that no later step reads."""

    @property
    def ops(self) -> list[AnyOp]:
        """The ops that are run, in order."""
        return [first for first, *_ in self.twins]

    @property
    def name(self) -> str:
        """Under which its cost is counted."""
        return "+".join(op.kind for op in self.ops)

    @property
    def output(self) -> str:
        """Column made."""
        return self.ops[-1].output

    def run(self, columns: Sequence[Column], counts: Counts) -> Column:
        """The column made; every twin counts what it would have changed."""
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
    """Ops put in the order and company in which they are run; what is made is the same as one by one.

    Args:
        ops: In an order in which each reads what is raw or made before it.
        wanted: Columns to make; ops that none of them needs are left out.
    """

    def __init__(self, ops: Sequence[AnyOp], wanted: Iterable[str]) -> None:
        self.wanted = tuple(wanted)
        self._same: dict[str, str] = {}
        alike: dict[tuple[tuple[str, ...], str], list[AnyOp]] = {}
        for op in _needed(ops, self.wanted):
            inputs = tuple(self.canonical(name) for name in op.inputs)
            twins = alike.setdefault((inputs, content_key(op)), [])
            twins.append(op)
            self._same[op.output] = twins[0].output
        steps = [Step((tuple(twins),), inputs) for (inputs, _), twins in alike.items()]
        kept = {self.canonical(name) for name in self.wanted}
        self.steps = _mark_spent(_fuse_steps(steps, kept), kept)

    def canonical(self, column: str) -> str:
        """The column that is made in another one's place, being the same."""
        return self._same.get(column, column)

    @property
    def raw(self) -> list[str]:
        """Raw columns that are read."""
        made = {step.output for step in self.steps}
        names = [*(name for step in self.steps for name in step.inputs), *map(self.canonical, self.wanted)]
        return [name for name in dict.fromkeys(names) if name not in made]

    def read(self, rows: pa.Table | pa.RecordBatch, name: str, seconds: Seconds) -> Column:
        """A raw column.

        Raises:
            DataError: If it holds values of a kind that cannot be read as declared.
        """
        began = time.perf_counter()
        source, _, kind = name.rpartition(":")
        column = from_arrow(source, single_array(rows.column(source)), kind)  # type: ignore[arg-type]
        seconds["arrow"] += time.perf_counter() - began  # type: ignore[assignment]
        return column

    def run(
        self,
        rows: pa.Table | pa.RecordBatch,
        counts: Counts,
        seconds: Seconds,
        known: Mapping[str, Column] = MappingProxyType({}),
    ) -> Mapping[str, Column]:
        """The wanted columns of the rows.

        Args:
            known: Raw columns that are not read from the rows.
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


def content_key(op: AnyOp) -> str:
    """What an op does, whatever it reads and makes."""
    return op.model_dump_json(exclude={"inputs", "output"})


def upstream_columns(ops: Sequence[AnyOp], wanted: Iterable[str]) -> set[str]:
    """All columns, raw ones too, that the wanted ones are made of, themselves included."""
    found = set(wanted)
    for op in reversed(ops):
        if op.output in found:
            found.update(op.inputs)
    return found


def _needed(ops: Sequence[AnyOp], wanted: Iterable[str]) -> list[AnyOp]:
    names = upstream_columns(ops, wanted)
    return [op for op in ops if op.output in names]


def _fuse_steps(steps: list[Step], kept: set[str]) -> list[Step]:
    """Steps that can run in the pass of the step before them do, unless something else reads what lies between."""
    readers = Counter([*kept, *(name for step in steps for name in step.inputs)])
    joined: list[Step] = []
    last: dict[str, int] = {}
    for step in steps:
        before = last.get(step.inputs[0])
        if before is not None and readers[step.inputs[0]] == 1 and fusable(joined[before].ops[-1], step.ops[0]):
            step = Step(joined[before].twins + step.twins, joined[before].inputs)
            joined[before] = step
        else:
            before = len(joined)
            joined.append(step)
        last[step.output] = before
    return joined


def _mark_spent(steps: list[Step], kept: set[str]) -> list[Step]:
    seen = set(kept)
    done: list[Step] = []
    for step in reversed(steps):
        spent = tuple(dict.fromkeys(name for name in step.inputs if name not in seen))
        seen.update(spent)
        done.append(Step(step.twins, step.inputs, spent))
    return done[::-1]


def single_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which copies even a single one

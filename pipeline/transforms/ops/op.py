"""What every transform op is: a frozen class around one pure function over columns."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, Field

from pipeline.transforms.kinds import Kind

if TYPE_CHECKING:
    from pipeline.transforms.column import Column, Ids

Counts = Counter[str]
"""Values changed by a declared rule, as 'op output' -> number: what a log line and a report can show."""

Reads = tuple[Kind | Literal["either"], ...]
Makes = Kind | Literal["same"]

VALUE = "value"

ID_MIN, ID_MAX = -(1 << 63), (1 << 63) - 1
Id = Annotated[int, Field(ge=ID_MIN, le=ID_MAX)]
Count = Annotated[int, Field(gt=0, le=ID_MAX)]
Index = Annotated[int, Field(ge=0, lt=ID_MAX)]

T = TypeVar("T")


def as_id(value: float) -> int:
    """A bound of a config as an id: within 64 bits, whatever was written."""
    return min(max(int(value), ID_MIN), ID_MAX)


def list_offsets(column: "Column") -> "Ids":
    """The offsets of a column of lists; what op a column may be given to is checked when the plan is built."""
    assert column.offsets is not None
    return column.offsets


class PerOp(Generic[T]):
    """`reads` or `makes` where they depend on an op's fields: an op answers for itself, the class gives the usual."""

    def __init__(self, usual: T, of: Callable[[Any], T]) -> None:
        self.usual, self.of = usual, of

    def __get__(self, op: Any, owner: type) -> T:
        return self.usual if op is None else self.of(op)


class Op(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What all ops share: names of what is read and made.

    In a feature group of a config the names are left out: `value` stands for the group's column.
    """

    reads: ClassVar[Reads]
    """Kind of each input."""
    makes: ClassVar[Makes]
    variadic: ClassVar[bool] = False
    """Whether it takes any number of inputs, all of the last kind of `reads`."""
    learns: ClassVar[Literal["moments", "quantiles", "vocabulary"] | None] = None
    """What its `fit` takes from the training rows, for ops that can be left without their numbers."""

    kind: str
    inputs: tuple[str, ...] = (VALUE,)
    """Columns read, raw ones or outputs of earlier ops."""
    output: str = VALUE
    """Column made."""

    @abstractmethod
    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        """The column made of the inputs, row by row; the inputs are never changed."""

    @property
    def fitted(self) -> bool:
        """Whether it can be applied: what it learns from rows, if anything, is known."""
        return True

    def count(self, counts: Counts, changed: int) -> None:
        """Adds to the op's counter."""
        if changed:
            counts[f"{self.kind} {self.output}"] += changed

    def bound(self, inputs: tuple[str, ...], output: str) -> Self:
        """The same op for other columns."""
        return self.model_copy(update={"inputs": inputs, "output": output})

    def ids_below(self, *limits: int | None) -> int | None:
        """Ids made are in [0, this), given ids of each input in [0, limit); None: not bounded."""
        return limits[0]

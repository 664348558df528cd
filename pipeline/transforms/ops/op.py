"""Op: the base of all transform ops. An op is a frozen record with one pure function over columns."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, Field

from pipeline.transforms.kinds import Kind

if TYPE_CHECKING:
    from pipeline.transforms.column import Column, Ids

Counts = Counter[str]
"""'op output' -> number of values that a declared rule changed, for logs and reports."""

Reads = tuple[Kind | Literal["either"], ...]
Makes = Kind | Literal["same"]

VALUE = "value"

ID_MIN, ID_MAX = -(1 << 63), (1 << 63) - 1
Id = Annotated[int, Field(ge=ID_MIN, le=ID_MAX)]
Count = Annotated[int, Field(gt=0, le=ID_MAX)]
Index = Annotated[int, Field(ge=0, lt=ID_MAX)]

T = TypeVar("T")


def as_id(value: float) -> int:
    """Returns a bound of a config as an id, cut to 64 bits."""
    return min(max(int(value), ID_MIN), ID_MAX)


def list_offsets(column: "Column") -> "Ids":
    """Returns the offsets of a column of lists. The plan has checked that the op gets lists."""
    assert column.offsets is not None
    return column.offsets


class PerOp(Generic[T]):
    """`reads` or `makes` of an op that depend on its fields. The class itself gives the usual value."""

    def __init__(self, usual: T, of: Callable[[Any], T]) -> None:
        self.usual, self.of = usual, of

    def __get__(self, op: Any, owner: type) -> T:
        return self.usual if op is None else self.of(op)


class Op(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The columns that an op reads and the column that it makes.

    A feature group of a config leaves both out. `value` stands for the group's column.
    """

    reads: ClassVar[Reads]
    """Kind of each input."""
    makes: ClassVar[Makes]
    variadic: ClassVar[bool] = False
    """Whether it accepts any number of inputs, the further ones of the last kind of `reads`."""
    in_place: ClassVar[bool] = False
    """Whether the ids of a list keep their places: it makes one id of each, and drops none but from the end."""
    learns: ClassVar[Literal["moments", "quantiles", "vocabulary"] | None] = None
    """What its `fit` learns from the training rows, for ops that a config may leave without numbers."""

    kind: str
    inputs: tuple[str, ...] = (VALUE,)
    """Columns to read: raw ones or outputs of earlier ops."""
    output: str = VALUE
    """Column to make."""

    @abstractmethod
    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        """Returns the column made of the inputs, row by row. Never changes the inputs.

        Kernels and Arrow are imported here, because configs that name ops must load without them.
        """

    @property
    def fitted(self) -> bool:
        """Whether it can be applied: it has all the numbers that it learns from rows."""
        return True

    def count(self, counts: Counts, changed: int) -> None:
        """Adds the number of changed values to the op's counter."""
        if changed:
            counts[f"{self.kind} {self.output}"] += changed

    def bound(self, inputs: tuple[str, ...], output: str) -> Self:
        """Returns the same op for other columns."""
        return self.model_copy(update={"inputs": inputs, "output": output})

    def ids_below(self, *limits: int | None) -> int | None:
        """Returns the bound of its ids, given the limit of each input's: ids are in [0, bound). None: no bound."""
        return limits[0]

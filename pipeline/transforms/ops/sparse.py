"""Ops that read one list of ids."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from pipeline.errors import ConfigError
from pipeline.transforms.ops.op import ID_MAX, ID_MIN, Count, Counts, Id, Index, Op, PerOp, list_offsets

if TYPE_CHECKING:
    from pipeline.transforms.column import Column, Ids


class Enumerate(Op):
    """Replaces each id by its position in its list: 0, 1, 2, ...

    Lists can have any length. Add a clamp to bound the positions before they look up a table.

    Source:
        arXiv:2108.09373, table 11.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> Enumerate().apply([Column(np.array([7, 7, 9]), np.array([0, 2, 3]))], Counts()).values.tolist()
        [0, 1, 0]
    """

    reads, makes = ("sparse",), "sparse"
    in_place = True
    kind: Literal["enumerate"] = "enumerate"

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.sparse import enumerate_lists

        (column,) = columns
        return Column(enumerate_lists(list_offsets(column)), column.offsets)

    def ids_below(self, *limits: int | None) -> int | None:
        return None


class FirstX(Op):
    """Keeps the first `limit` ids of a list. The others are dropped and counted.

    Source:
        arXiv:2108.09373, table 11.
    """

    reads, makes = ("sparse",), "sparse"
    in_place = True
    kind: Literal["first_x"] = "first_x"
    limit: Count

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.sparse import first_x

        (column,) = columns
        values, offsets, cut = first_x(column.values, list_offsets(column), self.limit)
        self.count(counts, cut)
        return Column(values, offsets)


@dataclass(frozen=True, eq=False)
class IdLookup:
    """A vocabulary as ids and the hash table that finds them. It equals only itself: ops compare by their fields."""

    ids: "Ids"
    slots: "Ids"


class MapId(Op):
    """Replaces an id by its index in a vocabulary, counted from 0. Ids that are not in the vocabulary are counted.

    Without a vocabulary in the config it learns one from the training rows: the `size` most frequent ids.
    A string in the vocabulary stands for its 64-bit FNV-1a hash, as strings do in a column.

    Raises:
        ConfigError: If there is neither vocabulary nor size, an id occurs twice, or there are more ids than `size`.
    Source:
        arXiv:2108.09373, table 11.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> ids = Column(np.array([30, 10, 99]), np.array([0, 2, 3]))
        >>> MapId(vocabulary=(10, 20, 30), unknown=3).apply([ids], Counts()).values.tolist()
        [2, 0, 3]
    """

    reads, makes, learns = ("sparse",), "sparse", "vocabulary"
    in_place = PerOp[bool](False, lambda op: op.unknown is not None)
    kind: Literal["map_id"] = "map_id"
    vocabulary: tuple[Id | str, ...] | None = None
    """Ids in the order of their indices. None learns them."""
    size: Count | None = None
    """Most ids to learn. It bounds the indices even if the rows have fewer ids."""
    min_count: PositiveInt = 1
    """Occurrences in the training rows that an id needs to be learned."""
    unknown: Index | None = None
    """Index of all other ids. `size` gives them an index of their own, None drops them. Both are counted."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.vocabulary is None:
            if self.size is None:
                raise self._error("a vocabulary, or a size to learn one", "neither", "Give one of them.")
            return self
        if not self.vocabulary and self.size is None:
            raise self._error("ids in the vocabulary", "none", "Name some, or give a size to learn them.")
        if len(set(self.vocabulary)) < len(self.vocabulary):
            twice = Counter(self.vocabulary).most_common(1)[0][0]
            raise self._error("each id once", f"{twice!r} twice", "Remove the second one.")
        if self.size is not None and len(self.vocabulary) > self.size:
            raise self._error(f"at most size = {self.size} ids", f"{len(self.vocabulary)}", "Raise the size.")
        return self

    def _error(self, expected: str, actual: str, remedy: str) -> ConfigError:
        return ConfigError(f"map_id on '{self.output}'", expected, actual, remedy)

    @property
    def fitted(self) -> bool:
        return self.vocabulary is not None

    def fit(self, vocabulary: tuple[int, ...]) -> "MapId":
        """Returns a fitted op. The most frequent id comes first."""
        return MapId.model_validate({**self.model_dump(), "vocabulary": vocabulary})

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.sparse import map_ids

        (column,) = columns
        unknown = -1 if self.unknown is None else self.unknown
        ids, offsets, others = map_ids(
            column.values, list_offsets(column), self._lookup.ids, self._lookup.slots, unknown
        )
        self.count(counts, others)
        return Column(ids, offsets)

    def ids_below(self, *limits: int | None) -> int | None:
        indices = len(self.vocabulary or ()) if self.size is None else self.size
        return indices if self.unknown is None else max(indices, self.unknown + 1)

    @cached_property
    def _lookup(self) -> IdLookup:
        """The vocabulary ready for search. It is made once, because it can hold millions of ids."""
        import numpy as np

        from pipeline.transforms.kernels.hashing import fnv1a_text
        from pipeline.transforms.kernels.sparse import hash_table

        if self.vocabulary is None:
            raise self._error("a fitted vocabulary", "none", "Fit the plan first.")
        ids = np.array([id_ if isinstance(id_, int) else fnv1a_text(id_) for id_ in self.vocabulary], np.int64)
        return IdLookup(ids, hash_table(ids))


class SigridHash(Op):
    """Salted hash of ids into [0, size), bit-compatible with TorchArrow's sigrid_hash.

    Source:
        arXiv:2108.09373, table 11; TorchArrow's documentation of sigrid_hash.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> ids = Column(np.array([1, 2, 3, 5, 8, 10, 11]), np.array([0, 7]))
        >>> SigridHash(size=100).apply([ids], Counts()).values.tolist()
        [60, 54, 54, 4, 67, 2, 25]
    """

    reads, makes = ("sparse",), "sparse"
    in_place = True
    kind: Literal["sigrid_hash"] = "sigrid_hash"
    size: Count
    salt: int = Field(default=0, ge=ID_MIN, le=ID_MAX)

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.hashing import sigrid_hash

        (column,) = columns
        return Column(sigrid_hash(column.values, self.salt, self.size), column.offsets)

    def ids_below(self, *limits: int | None) -> int | None:
        return self.size

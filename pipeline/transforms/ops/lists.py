"""Ops that read several lists of a row."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pipeline.transforms.ops.op import Count, Counts, Op, list_offsets

if TYPE_CHECKING:
    from pipeline.transforms.column import Column, Ids


def _both(left: "Column", right: "Column") -> tuple["Ids", "Ids", "Ids", "Ids"]:
    return left.values, list_offsets(left), right.values, list_offsets(right)


class Cartesian(Op):
    """Makes one id of every pair of an id of the first list and an id of the second.

    All pairs of the first id come first, then all pairs of the second. The id of (a, b) is chain(mix(a), mix(b)), a
    64-bit hash that depends on the order. Bound it with a sigrid_hash.

    Source:
        arXiv:2108.09373, table 11. mix and chain: pipeline/transforms/kernels/hashing.py.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> colours, sizes = Column(np.array([1, 2]), np.array([0, 2])), Column(np.array([7]), np.array([0, 1]))
        >>> Cartesian(inputs=("colours", "sizes")).apply([colours, sizes], Counts()).values.tolist()
        [2117707494717150447, 8314783716148404663]
    """

    reads, makes = ("sparse", "sparse"), "sparse"
    kind: Literal["cartesian"] = "cartesian"
    limit: Count = 1_000
    """Maximum pairs per row. Later ones are dropped and counted: two lists of a million ids have 10^12 pairs."""

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.lists import cartesian

        left, right = columns
        ids, offsets, left_out = cartesian(*_both(left, right), self.limit)
        self.count(counts, left_out)
        return Column(ids, offsets)

    def ids_below(self, *limits: int | None) -> int | None:
        return None


class NGram(Op):
    """Concatenates the inputs' lists and makes one id of every n neighbours.

    The id is a 64-bit hash: mix(first), then chain(hash, mix(next)) for each further neighbour. Two neighbours get the
    same id as that pair in Cartesian. Bound it with a sigrid_hash. A row of fewer than n ids has none.

    Source:
        arXiv:2108.09373, table 11. mix and chain: pipeline/transforms/kernels/hashing.py.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> words = Column(np.array([5, 6, 5, 6]), np.array([0, 4]))
        >>> first, middle, last = NGram(n=2).apply([words], Counts()).values.tolist()
        >>> (first == last, first == middle)
        (True, False)
    """

    reads, makes, variadic = ("sparse",), "sparse", True
    kind: Literal["ngram"] = "ngram"
    n: int = Field(ge=1, le=100)
    """Neighbours of one id."""

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.lists import append_lists, ngrams

        first, *others = columns
        values, offsets = first.values, list_offsets(first)
        for other in others:
            values, offsets = append_lists(values, offsets, other.values, list_offsets(other))
        return Column(*ngrams(values, offsets, self.n))

    def ids_below(self, *limits: int | None) -> int | None:
        return None


class PositiveIntersect(Op):
    """Keeps the ids that are in both lists: each once, in the order of the first list.

    Source:
        arXiv:2108.09373, table 11.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> seen, liked = Column(np.array([3, 1, 3, 2]), np.array([0, 4])), Column(np.array([2, 3]), np.array([0, 2]))
        >>> PositiveIntersect(inputs=("seen", "liked")).apply([seen, liked], Counts()).values.tolist()
        [3, 2]
    """

    reads, makes = ("sparse", "sparse"), "sparse"
    kind: Literal["positive_intersect"] = "positive_intersect"

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.lists import firsts, keep_marked, positions

        left, right = columns
        places = positions(*_both(left, right))
        keep = firsts(places, list_offsets(left), list_offsets(right))
        return Column(*keep_marked(left.values, list_offsets(left), keep))

    def ids_below(self, *limits: int | None) -> int | None:
        return min((limit for limit in limits if limit is not None), default=None)


class IdListTransform(Op):
    """Filters or maps the first list by the second. Order and repetitions are those of the first list.

    intersection keeps the ids that are in the second list, difference those that are not. map replaces each id by its
    first position in the second list, counted from 0, and drops the ids that are not in it.

    Source:
        arXiv:2108.09373, table 11.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> seen, top = Column(np.array([3, 1, 3, 2]), np.array([0, 4])), Column(np.array([2, 3]), np.array([0, 2]))
        >>> for mode in ("intersection", "difference", "map"):
        ...     IdListTransform(inputs=("seen", "top"), mode=mode).apply([seen, top], Counts()).values.tolist()
        [3, 3, 2]
        [1]
        [1, 1, 0]
    """

    reads, makes = ("sparse", "sparse"), "sparse"
    kind: Literal["id_list_transform"] = "id_list_transform"
    mode: Literal["intersection", "difference", "map"] = "intersection"
    """Positions made by map have no bound. Add a clamp."""

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.lists import keep_marked, positions

        left, right = columns
        places = positions(*_both(left, right))
        keep = places < 0 if self.mode == "difference" else places >= 0
        return Column(*keep_marked(places if self.mode == "map" else left.values, list_offsets(left), keep))

    def ids_below(self, *limits: int | None) -> int | None:
        if self.mode == "map":
            return None
        known = [limit for limit in limits if limit is not None]
        return min(known, default=None) if self.mode == "intersection" else limits[0]

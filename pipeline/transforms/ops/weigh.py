"""Weigh: joins the ids of a feature with their weights. A plan adds it; a config says `weights` instead."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pipeline.transforms.ops.op import Counts, Op, PerOp, Reads, list_offsets

if TYPE_CHECKING:
    from pipeline.transforms.column import Column


def _reads(op: "Weigh") -> Reads:
    return ("sparse", "scores", "sparse") if len(op.inputs) > 1 else ("sparse",)


class Weigh(Op):
    """Joins each id with its weight; `pipeline.transforms.kernels.weights` says how.

    It reads the ids that a feature looks up, their scores, and the ids as they are stored, which the scores must match
    in number. Without scores, each id weighs 1. Ids without a weight get 0 and are counted.

    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> from pipeline.transforms.kernels.weights import unpack
        >>> ids, scores = Column(np.array([4, 5]), np.array([0, 2])), Column(np.array([1.0, 3.0]), np.array([0, 2]))
        >>> made = Weigh(inputs=("a", "b", "a"), mean=True).apply([ids, scores, ids], Counts())
        >>> [part.tolist() for part in unpack(made.values)]
        [[4, 5], [0.25, 0.75]]
    """

    reads = PerOp[Reads](("sparse", "scores", "sparse"), _reads)
    makes = "sparse"
    kind: Literal["weigh"] = "weigh"
    mean: bool = False
    """Whether to divide the weights of a list by the sum of their absolute values."""

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        import numpy as np

        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.weights import divide_by_sums, pack, weights_of

        ids, offsets = columns[0].values, list_offsets(columns[0])
        weights, changed = np.ones(len(ids), np.float32), 0
        if len(columns) > 1:
            _, scores, stored = columns
            weights, changed = weights_of(offsets, scores.values, list_offsets(scores), list_offsets(stored))
        if self.mean:
            divide_by_sums(weights, offsets)
        self.count(counts, changed)
        return Column(pack(ids, weights), offsets)

"""ComputeScore: arithmetic and similarity of lists of ids with scores."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import FiniteFloat

from pipeline.transforms.ops.op import Counts, Makes, Op, PerOp, Reads

if TYPE_CHECKING:
    from pipeline.transforms.column import Column

Function = Literal[
    "has_id_overlap",
    "id_overlap_count",
    "get_max_count",
    "get_jaccard_similarity",
    "get_cosine_similarity",
    "get_score_sum",
    "get_score_min",
    "get_score_max",
    "dot_product",
    "add",
    "subtract",
    "multiply",
    "divide",
    "sum",
    "mean",
    "min",
    "max",
]
OF_IDS = {"has_id_overlap", "id_overlap_count", "get_max_count", "get_jaccard_similarity"}
OF_MATCHING_SCORES = {"get_score_min", "get_score_max"}
OF_ONE_LIST = {"sum", "mean", "min", "max"}
ARITHMETIC = {"add", "subtract", "multiply", "divide"}


def _reads(op: "ComputeScore") -> Reads:
    if op.function in OF_IDS:
        return ("sparse", "sparse")
    if op.function in OF_MATCHING_SCORES:
        return ("sparse", "sparse", "scores")
    return ("scores",) if op.function in OF_ONE_LIST else ("sparse", "scores", "sparse", "scores")


def _makes(op: "ComputeScore") -> Makes:
    return "scores" if op.function in ARITHMETIC else "dense"


class ComputeScore(Op):
    """Computes arithmetic and similarity of lists of ids with scores.

    The functions are TorchArrow's. has_id_overlap is 1 or 0. id_overlap_count counts an id as often as both lists have
    it, get_max_count as often as the list that has it more often. get_jaccard_similarity is the overlap count divided
    by the size of the union. get_score_sum, get_score_min and get_score_max aggregate the matching scores of ids that
    are also in the first list, and are 0 if there are none. get_cosine_similarity and dot_product treat both lists as
    vectors. Arithmetic combines each of the first scores with the matching score, or with 0 if none matches.

    Scores of equal ids of a list are summed first, in the order of the list, except for min and max. A missing score
    is ignored. An undefined or infinite result (no norm, no union, mean of nothing, division by 0), and a row in which
    the numbers of scores and ids differ, become `invalid` and are counted.

    Source:
        arXiv:2108.09373, table 11; TorchArrow's documentation of the functions from has_id_overlap to get_score_max.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> bought = Column(np.array([1, 1, 2, 3]), np.array([0, 4]))
        >>> shown = Column(np.array([1, 2, 3]), np.array([0, 3]))
        >>> ComputeScore(function="get_jaccard_similarity").apply([bought, shown], Counts()).values.tolist()
        [0.75]
    """

    reads = PerOp[Reads](("sparse", "scores", "sparse", "scores"), _reads)
    makes = PerOp[Makes]("dense", _makes)
    kind: Literal["compute_score"] = "compute_score"
    function: Function
    """The function decides the inputs. Two lists of ids: `has_id_overlap`, `id_overlap_count`, `get_max_count`,
    `get_jaccard_similarity`. Ids, matching ids and their scores: `get_score_min`, `get_score_max`. Ids, scores,
    matching ids and their scores: `get_score_sum`, `get_cosine_similarity`, `dot_product`, and `add`, `subtract`,
    `multiply`, `divide`, which make scores of the first ids. One list of scores: `sum`, `mean`, `min`, `max`."""
    invalid: FiniteFloat | None = 0.0
    """Replaces undefined results. None makes them missing."""

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.kernels.scores import compute_score

        result, replaced = compute_score(
            self.function, tuple(columns), math.nan if self.invalid is None else self.invalid
        )
        self.count(counts, replaced)
        return result

    def ids_below(self, *limits: int | None) -> int | None:
        return None

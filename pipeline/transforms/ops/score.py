"""ComputeScore: arithmetic and similarity of lists of ids and their scores."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import FiniteFloat

from pipeline.transforms.column import Column
from pipeline.transforms.kernels import lists
from pipeline.transforms.ops.op import Counts, Makes, Op, PerOp, Reads, list_offsets

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
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
ARITHMETIC = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide}


def _reads(op: "ComputeScore") -> Reads:
    if op.function in OF_IDS:
        return ("sparse", "sparse")
    if op.function in OF_MATCHING_SCORES:
        return ("sparse", "sparse", "scores")
    return ("scores",) if op.function in OF_ONE_LIST else ("sparse", "scores", "sparse", "scores")


def _makes(op: "ComputeScore") -> Makes:
    return "scores" if op.function in ARITHMETIC else "dense"


class ComputeScore(Op):
    """Arithmetic and similarity of lists of ids and their scores.

    As in TorchArrow: has_id_overlap is 1 or 0; id_overlap_count counts an id as often as both lists have it,
    get_max_count as often as the list that has it more often; get_jaccard_similarity is the overlap count over the
    size of the union; get_score_sum, get_score_min and get_score_max are of the matching scores whose ids are among
    the ids, 0 if there are none; get_cosine_similarity and dot_product take both lists as vectors. Arithmetic takes
    each of the first scores with the matching one, 0 where none matches.

    But for min and max, scores of equal ids of a list are added up first, in the order of the list. A missing score
    counts as absent. What is undefined or not finite (no norm, no union, mean of nothing, division by 0), and a
    row with another number of scores than ids, becomes `invalid` and is counted.

    Source:
        arXiv:2108.09373, table 11; TorchArrow's documentation of the functions from has_id_overlap to get_score_max.
    Example:
        >>> bought = Column(np.array([1, 1, 2, 3]), np.array([0, 4]))
        >>> shown = Column(np.array([1, 2, 3]), np.array([0, 3]))
        >>> ComputeScore(function="get_jaccard_similarity").apply([bought, shown], Counts()).values.tolist()
        [0.75]
    """

    reads = PerOp[Reads](("sparse", "scores", "sparse", "scores"), _reads)  # type: ignore[assignment]
    makes = PerOp[Makes]("dense", _makes)  # type: ignore[assignment]
    kind: Literal["compute_score"] = "compute_score"
    function: Function
    """What is computed; it decides the inputs. Of two lists of ids: `has_id_overlap`, `id_overlap_count`,
    `get_max_count`, `get_jaccard_similarity`. Of ids, matching ids and their scores: `get_score_min`, `get_score_max`.
    Of ids, scores, matching ids and their scores: `get_score_sum`, `get_cosine_similarity`, `dot_product`, and, making
    scores beside the first ids, `add`, `subtract`, `multiply`, `divide`. Of one list of scores: `sum`, `mean`, `min`,
    `max`."""
    invalid: FiniteFloat | None = 0.0
    """What is undefined becomes this; None: missing."""

    def apply(self, columns: Sequence[Column], counts: Counts) -> Column:
        with np.errstate(all="ignore"):  # what is not finite is replaced and counted below
            if self.function in OF_IDS:
                return self._finished(self._of_ids(*columns), counts)
            if self.function in OF_MATCHING_SCORES:
                return self._finished(self._extreme(*columns), counts)
            if self.function in OF_ONE_LIST:
                return self._finished(self._of_one_list(*columns), counts)
            if self.function in ARITHMETIC:
                return self._arithmetic(counts, *columns)
            return self._finished(self._similarity(*columns), counts)

    def ids_below(self, *limits: int | None) -> int | None:
        return None

    def _finished(self, values: Floats, counts: Counts) -> Column:
        return Column(self._replaced(values, ~np.isfinite(values), counts))

    def _replaced(self, values: Floats, bad: Flags, counts: Counts) -> Floats:
        self.count(counts, int(bad.sum()))
        return np.where(bad, np.nan if self.invalid is None else self.invalid, values)

    def _of_ids(self, ids: Column, others: Column) -> Floats:
        own, matching = _counted(ids), _matched(ids, others, np.ones(len(others.values)))[0]
        overlap = _row_sums(np.minimum(own, matching), ids)
        if self.function == "get_max_count":
            return _row_sums(np.where((own > 0) & (matching > 0), np.maximum(own, matching), 0.0), ids)
        if self.function == "get_jaccard_similarity":
            return overlap / (_lengths(ids) + _lengths(others) - overlap)
        return overlap if self.function == "id_overlap_count" else np.minimum(overlap, 1.0)

    def _extreme(self, ids: Column, others: Column, other_scores: Column) -> Floats:
        scores, bad = _aligned(other_scores, others)
        there = lists.positions(others.values, list_offsets(others), ids.values, list_offsets(ids)) >= 0
        low, high, found = lists.row_extremes(scores, list_offsets(others), there & ~np.isnan(scores))
        extreme = np.where(found > 0, low if self.function == "get_score_min" else high, 0.0)
        return np.where(bad, np.nan, extreme)

    def _of_one_list(self, scores: Column) -> Floats:
        present = ~np.isnan(scores.values)
        low, high, found = lists.row_extremes(scores.values, list_offsets(scores), present)
        total = _row_sums(np.where(present, scores.values, 0.0), scores)
        return {"sum": total, "mean": total / found, "min": low, "max": high}[self.function]

    def _similarity(self, ids: Column, scores: Column, others: Column, other_scores: Column) -> Floats:
        own, bad = _aligned(scores, ids)
        theirs, other_bad = _aligned(other_scores, others)
        weights, (matching, there) = _summed(ids, own), _matched(ids, others, theirs)
        shared = there & (_counted(ids) > 0)  # where an id of both lists stands first
        products = matching if self.function == "get_score_sum" else weights * matching
        result = _row_sums(np.where(shared, products, 0.0), ids)
        if self.function == "get_cosine_similarity":
            norms = _row_sums(weights**2, ids), _row_sums(_summed(others, theirs) ** 2, others)
            result = result / np.sqrt(norms[0]) / np.sqrt(norms[1])
        return np.where(bad | other_bad, np.nan, result)

    def _arithmetic(self, counts: Counts, ids: Column, scores: Column, others: Column, other_scores: Column) -> Column:
        own, bad = _aligned(scores, ids)
        theirs, other_bad = _aligned(other_scores, others)
        made = ARITHMETIC[self.function](own, _matched(ids, others, theirs)[0])
        whole_rows = np.repeat(bad | other_bad, _lengths(ids))
        wrong = whole_rows | (~np.isfinite(made) & ~np.isnan(own))  # a missing score stays missing
        return Column(self._replaced(made, wrong, counts), ids.offsets)


def _lengths(column: Column) -> npt.NDArray[np.int64]:
    return np.diff(list_offsets(column))


def _aligned(scores: Column, ids: Column) -> tuple[Floats, Flags]:
    return lists.aligned(scores.values, list_offsets(scores), list_offsets(ids))


def _row_sums(values: Floats, column: Column) -> Floats:
    return lists.row_sums(values, list_offsets(column))


def _summed(ids: Column, scores: Floats) -> Floats:
    """The score of each distinct id, where its list shows it first; 0 elsewhere."""
    places = lists.positions(ids.values, list_offsets(ids), ids.values, list_offsets(ids))
    return lists.summed(scores, list_offsets(ids), places)


def _counted(ids: Column) -> Floats:
    """How often the list has each distinct id, where it shows it first; 0 elsewhere."""
    return _summed(ids, np.ones(len(ids.values)))


def _matched(ids: Column, others: Column, scores: Floats) -> tuple[Floats, Flags]:
    """The other list's score of each id, 0 where it has not the id; and where it has."""
    places = lists.positions(ids.values, list_offsets(ids), others.values, list_offsets(others))
    matching = lists.looked_up(places, list_offsets(ids), _summed(others, scores), list_offsets(others))
    return matching, places >= 0

"""The arithmetic behind ComputeScore: lists of ids and their scores in, a number or a list of scores out."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from pipeline.transforms.column import Column
from pipeline.transforms.kernels import lists
from pipeline.transforms.ops.op import list_offsets

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def compute_score(function: str, columns: tuple[Column, ...], replacement: float) -> tuple[Column, int]:
    """Returns what the function makes of its inputs, and how many values were undefined and became `replacement`."""
    with np.errstate(all="ignore"):  # what is not finite is replaced and counted below
        if function in ARITHMETIC:
            values, bad = _arithmetic(ARITHMETIC[function], *columns)
            offsets = columns[0].offsets
        else:
            values, offsets = DENSE[function](*columns), None
            bad = ~np.isfinite(values)
    return Column(np.where(bad, replacement, values), offsets), int(bad.sum())


def _id_overlap_count(ids: Column, others: Column) -> Floats:
    return _row_sums(np.minimum(_counts(ids), _match(ids, others, np.ones(len(others.values)))[0]), ids)


def _has_id_overlap(ids: Column, others: Column) -> Floats:
    return np.minimum(_id_overlap_count(ids, others), 1.0)


def _max_count(ids: Column, others: Column) -> Floats:
    own, matching = _counts(ids), _match(ids, others, np.ones(len(others.values)))[0]
    return _row_sums(np.where((own > 0) & (matching > 0), np.maximum(own, matching), 0.0), ids)


def _jaccard_similarity(ids: Column, others: Column) -> Floats:
    overlap = _id_overlap_count(ids, others)
    return overlap / (_lengths(ids) + _lengths(others) - overlap)


def _score_min(ids: Column, others: Column, other_scores: Column) -> Floats:
    low, _, found, bad = _matching_extremes(ids, others, other_scores)
    return np.where(bad, np.nan, np.where(found > 0, low, 0.0))


def _score_max(ids: Column, others: Column, other_scores: Column) -> Floats:
    _, high, found, bad = _matching_extremes(ids, others, other_scores)
    return np.where(bad, np.nan, np.where(found > 0, high, 0.0))


def _matching_extremes(
    ids: Column, others: Column, other_scores: Column
) -> tuple[Floats, Floats, npt.NDArray[np.int64], Flags]:
    """Least and greatest score of the other ids that are among the ids, how many there are, and the uneven rows."""
    scores, bad = _align(other_scores, others)
    matches = lists.positions(others.values, list_offsets(others), ids.values, list_offsets(ids)) >= 0
    return *lists.row_extremes(scores, list_offsets(others), matches & ~np.isnan(scores)), bad


def _score_sum(ids: Column, scores: Column, others: Column, other_scores: Column) -> Floats:
    _, theirs, shared, bad = _matching_scores(ids, scores, others, other_scores)
    return np.where(bad, np.nan, _row_sums(np.where(shared, theirs, 0.0), ids))


def _dot_product(ids: Column, scores: Column, others: Column, other_scores: Column) -> Floats:
    own, theirs, shared, bad = _matching_scores(ids, scores, others, other_scores)
    return np.where(bad, np.nan, _row_sums(np.where(shared, own * theirs, 0.0), ids))


def _cosine_similarity(ids: Column, scores: Column, others: Column, other_scores: Column) -> Floats:
    own, theirs, shared, bad = _matching_scores(ids, scores, others, other_scores)
    product = _row_sums(np.where(shared, own * theirs, 0.0), ids)
    other_sums = _sum_equal_ids(others, _align(other_scores, others)[0])
    norms = np.sqrt(_row_sums(own**2, ids)), np.sqrt(_row_sums(other_sums**2, others))
    return np.where(bad, np.nan, product / norms[0] / norms[1])


def _matching_scores(
    ids: Column, scores: Column, others: Column, other_scores: Column
) -> tuple[Floats, Floats, Flags, Flags]:
    """Each id's own and matching score, where the first of an id in both lists stands, and the uneven rows."""
    own, bad = _align(scores, ids)
    theirs, other_bad = _align(other_scores, others)
    matching, found = _match(ids, others, theirs)
    return _sum_equal_ids(ids, own), matching, found & (_counts(ids) > 0), bad | other_bad


def _sum(scores: Column) -> Floats:
    return _row_sums(np.where(np.isnan(scores.values), 0.0, scores.values), scores)


def _mean(scores: Column) -> Floats:
    return _sum(scores) / _extremes(scores)[2]


def _min(scores: Column) -> Floats:
    return _extremes(scores)[0]


def _max(scores: Column) -> Floats:
    return _extremes(scores)[1]


def _extremes(scores: Column) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    return lists.row_extremes(scores.values, list_offsets(scores), ~np.isnan(scores.values))


def _arithmetic(
    compute: np.ufunc, ids: Column, scores: Column, others: Column, other_scores: Column
) -> tuple[Floats, Flags]:
    own, bad = _align(scores, ids)
    theirs, other_bad = _align(other_scores, others)
    made = compute(own, _match(ids, others, theirs)[0])
    uneven_rows = np.repeat(bad | other_bad, _lengths(ids))
    return made, uneven_rows | (~np.isfinite(made) & ~np.isnan(own))  # a missing score stays missing


def _lengths(column: Column) -> npt.NDArray[np.int64]:
    return np.diff(list_offsets(column))


def _align(scores: Column, ids: Column) -> tuple[Floats, Flags]:
    return lists.align(scores.values, list_offsets(scores), list_offsets(ids))


def _row_sums(values: Floats, column: Column) -> Floats:
    return lists.row_sums(values, list_offsets(column))


def _sum_equal_ids(ids: Column, scores: Floats) -> Floats:
    """Returns the score of each distinct id at its first place in the list, 0 elsewhere."""
    places = lists.positions(ids.values, list_offsets(ids), ids.values, list_offsets(ids))
    return lists.sum_equal_ids(scores, list_offsets(ids), places)


def _counts(ids: Column) -> Floats:
    """Returns how often the list has each distinct id at its first place in the list, 0 elsewhere."""
    return _sum_equal_ids(ids, np.ones(len(ids.values)))


def _match(ids: Column, others: Column, scores: Floats) -> tuple[Floats, Flags]:
    """Returns the other list's score of each id, 0 if it lacks the id, and whether it has it."""
    places = lists.positions(ids.values, list_offsets(ids), others.values, list_offsets(others))
    matching = lists.look_up(places, list_offsets(ids), _sum_equal_ids(others, scores), list_offsets(others))
    return matching, places >= 0


DENSE: Mapping[str, Callable[..., Floats]] = {
    "has_id_overlap": _has_id_overlap,
    "id_overlap_count": _id_overlap_count,
    "get_max_count": _max_count,
    "get_jaccard_similarity": _jaccard_similarity,
    "get_score_min": _score_min,
    "get_score_max": _score_max,
    "get_score_sum": _score_sum,
    "dot_product": _dot_product,
    "get_cosine_similarity": _cosine_similarity,
    "sum": _sum,
    "mean": _mean,
    "min": _min,
    "max": _max,
}
"""Functions that make one number a row."""
ARITHMETIC: Mapping[str, np.ufunc] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
}
"""Functions that make a list of scores."""

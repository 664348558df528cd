"""ComputeScore, each function against dictionaries of ids."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.transforms.ops.score import ComputeScore, Function
from tests.pipeline.transforms.contract import ID, MILLION, Case, apply

INVALID = -7.0
Scored = tuple[list[int], list[float]]

SCORE = st.floats(-9, 9) | st.sampled_from([math.nan, math.inf, 1e308, -1e308, 0.0])
LISTS = st.lists(st.tuples(ID, SCORE), max_size=6) | st.lists(
    st.tuples(st.integers(0, 30), st.floats(-9, 9)), min_size=17, max_size=40
)
PAIRS = LISTS.map(lambda pairs: ([id_ for id_, _ in pairs], [score for _, score in pairs]))
UNEVEN = st.just(([1, 2, 2], [0.5])) | PAIRS  # a row with another number of scores than ids


def sums(ids: list[int], scores: list[float]) -> dict[int, float]:
    made = dict.fromkeys(ids, 0.0)
    for id_, score in zip(ids, scores, strict=True):
        made[id_] += 0.0 if math.isnan(score) else score
    return made


def defined(compute: Callable[..., float]) -> Callable[..., float]:
    """The function with undefined, non-finite and uneven results replaced."""

    def result(*inputs: list[Any]) -> float:
        try:
            value = float(compute(*inputs))
        except (ZeroDivisionError, ValueError):
            return INVALID
        return value if math.isfinite(value) else INVALID

    return result


def id_overlap_count(a: list[int], b: list[int]) -> float:
    return (Counter(a) & Counter(b)).total()


def get_max_count(a: list[int], b: list[int]) -> float:
    return sum(max(a.count(i), b.count(i)) for i in set(a) & set(b))


def get_jaccard_similarity(a: list[int], b: list[int]) -> float:
    overlap = id_overlap_count(a, b)
    return overlap / (len(a) + len(b) - overlap)


def dot_product(a: list[int], x: list[float], b: list[int], y: list[float]) -> float:
    left, right = sums(a, x), sums(b, y)
    return sum((left[i] * right[i] for i in left if i in right), 0.0)


def get_cosine_similarity(a: list[int], x: list[float], b: list[int], y: list[float]) -> float:
    left, right = (math.sqrt(sum((s * s for s in sums(*pairs).values()), 0.0)) for pairs in ((a, x), (b, y)))
    return dot_product(a, x, b, y) / left / right


def get_score_sum(a: list[int], x: list[float], b: list[int], y: list[float]) -> float:
    right = sums(b, y)
    return sum((right[i] for i in sums(a, x) if i in right), 0.0)


def extreme(choose: Callable[..., float]) -> Callable[..., float]:
    def result(a: list[int], b: list[int], y: list[float]) -> float:
        return choose((s for i, s in zip(b, y, strict=True) if i in a and not math.isnan(s)), default=0.0)

    return result


def of_scores(compute: Callable[[list[float]], float]) -> Callable[..., float]:
    return lambda x: compute([score for score in x if not math.isnan(score)])


def arithmetic(compute: Callable[[float, float], float]) -> Callable[..., list[float]]:
    def result(a: list[int], x: list[float], b: list[int], y: list[float]) -> list[float]:
        if len(a) != len(x) or len(b) != len(y):
            return [INVALID for _ in a]
        right = sums(b, y)
        return [s if math.isnan(s) else defined(compute)(s, right.get(i, 0.0)) for i, s in zip(a, x, strict=True)]

    return result


def added(scores: list[float]) -> float:
    total = 0.0
    for score in scores:
        total += score
    return total


OF_IDS: dict[str, Callable[..., float]] = {
    "has_id_overlap": lambda a, b: not set(a).isdisjoint(b),
    "id_overlap_count": id_overlap_count,
    "get_max_count": get_max_count,
    "get_jaccard_similarity": get_jaccard_similarity,
}
OF_BOTH: dict[str, Callable[..., Any]] = {
    "get_cosine_similarity": defined(get_cosine_similarity),
    "get_score_sum": defined(get_score_sum),
    "dot_product": defined(dot_product),
    "add": arithmetic(lambda x, y: x + y),
    "subtract": arithmetic(lambda x, y: x - y),
    "multiply": arithmetic(lambda x, y: x * y),
    "divide": arithmetic(lambda x, y: x / y),
}
OF_MATCHING = {"get_score_min": defined(extreme(min)), "get_score_max": defined(extreme(max))}
OF_ONE: dict[str, Callable[..., float]] = {
    "sum": defined(of_scores(added)),
    "mean": defined(of_scores(lambda x: added(x) / len(x))),
    "min": defined(of_scores(min)),
    "max": defined(of_scores(max)),
}


def op(function: Any) -> ComputeScore:
    return ComputeScore(function=function, invalid=INVALID)


EXAMPLES = {
    f"compute_score, {name}": case
    for name, case in {
        **{name: Case(op(name), defined(row)) for name, row in OF_IDS.items()},
        **{
            name: Case(op(name), row, rows=st.tuples(UNEVEN, UNEVEN).map(lambda two: (*two[0], *two[1])))
            for name, row in OF_BOTH.items()
        },
        **{
            name: Case(op(name), row, rows=st.tuples(PAIRS, UNEVEN).map(lambda two: (two[0][0], *two[1])))
            for name, row in OF_MATCHING.items()
        },
        **{name: Case(op(name), row) for name, row in OF_ONE.items()},
    }.items()
}
INPUT_IDS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 10, 11, 12]]
MATCHING_IDS = [[1, 2, 3], [0, 10], [7, 10, 10], [10, 10, 11, 13]]
INPUT_SCORES, MATCHING_SCORES = ([[float(i) for i in row] for row in rows] for rows in (INPUT_IDS, MATCHING_IDS))
COSINES = [
    1.0,
    0.0,
    49 / math.sqrt(7**2 + 8**2 + 9**2) / math.sqrt(7**2 + 20**2),
    (20**2 + 11**2) / math.sqrt(20**2 + 11**2 + 12**2) / math.sqrt(20**2 + 11**2 + 13**2),
]


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        ("has_id_overlap", [INPUT_IDS, MATCHING_IDS], [1, 0, 1, 1]),
        ("id_overlap_count", [INPUT_IDS, MATCHING_IDS], [3, 0, 1, 3]),
        ("get_max_count", [INPUT_IDS, MATCHING_IDS], [3, 0, 1, 3]),
        ("get_jaccard_similarity", [INPUT_IDS, MATCHING_IDS], [1, 0, 1 / 5, 3 / 5]),
        ("get_cosine_similarity", [INPUT_IDS, INPUT_SCORES, MATCHING_IDS, MATCHING_SCORES], COSINES),
        ("get_score_sum", [INPUT_IDS, INPUT_SCORES, MATCHING_IDS, MATCHING_SCORES], [6, 0, 7, 31]),
        ("get_score_min", [INPUT_IDS, MATCHING_IDS, MATCHING_SCORES], [1, 0, 7, 10]),
        ("get_score_max", [INPUT_IDS, MATCHING_IDS, MATCHING_SCORES], [3, 0, 7, 11]),
        ("has_id_overlap", [[[1, 2, 3], [5, 8], [13]], [[1], [2, 3], [13]]], [1, 0, 1]),
        ("get_max_count", [[[1, 1, 2, 3], [5, 8], [13]], [[1, 2, 3], [2, 3], [13] * 5]], [4, 0, 5]),
        ("get_jaccard_similarity", [[[1, 1, 2, 3], [5, 8], [13]], [[1, 2, 3], [2, 3], [13] * 5]], [0.75, 0, 0.2]),
        ("get_cosine_similarity", [[[1, 2, 3]], [[1.0, 2.0, 3.0]], [[1, 2, 3]], [[5.0, 4.0, 3.0]]], [0.831522]),
        ("get_score_sum", [[[1, 2, 3]], [[1.0, 2.0, 3.0]], [[1, 2]], [[5.0, 4.0]]], [9]),
        ("get_score_min", [[[1, 2, 3]], [[1, 2]], [[5.0, 4.0]]], [4]),
        ("get_score_max", [[[1, 2, 3]], [[1, 2]], [[5.0, 4.0]]], [5]),
    ],
)
def test_goldens_of_torcharrow(function: Any, inputs: list[Any], expected: list[float]) -> None:
    """Its tests and documentation, except for a documented id_overlap_count of 3 that its own tests contradict."""
    np.testing.assert_allclose(apply(ComputeScore(function=function), *inputs), expected, rtol=1e-6)


def test_every_function_has_an_example() -> None:
    assert {name.removeprefix("compute_score, ") for name in EXAMPLES} == set(get_args(Function))


def test_kinds_follow_the_function() -> None:
    assert ComputeScore.reads == ("sparse", "scores", "sparse", "scores")
    assert op("get_max_count").reads == ("sparse", "sparse")
    assert op("get_score_min").reads == ("sparse", "sparse", "scores")
    assert op("mean").reads == ("scores",)
    assert (op("mean").makes, op("add").makes, ComputeScore.makes) == ("dense", "scores", "dense")


def test_scores_of_arithmetic_belong_to_the_first_ids() -> None:
    inputs = [[[1, 2, 1], [5]], [[1.0, 2.0, 3.0], [4.0]], [[1, 1, 9], []], [[10.0, 20.0, 40.0], []]]
    assert apply(op("add"), *inputs) == [[31.0, 2.0, 33.0], [4.0]]
    assert apply(op("subtract"), *inputs) == [[-29.0, 2.0, -27.0], [4.0]]
    assert apply(op("multiply"), *inputs) == [[30.0, 0.0, 90.0], [0.0]]
    assert apply(op("divide"), *inputs) == [[1 / 30, INVALID, 0.1], [INVALID]]


@pytest.mark.nightly
def test_a_million_ids() -> None:
    ids, half = list(range(MILLION)), list(range(0, MILLION, 2))
    ones, twos = [1.0] * MILLION, [2.0] * (MILLION // 2)
    assert apply(op("get_jaccard_similarity"), [[1], ids], [[1], half]) == [1.0, 0.5]
    assert apply(op("get_max_count"), [[1], [3] * MILLION], [[1], [3, 3]]) == [1, MILLION]
    assert apply(op("get_score_sum"), [[1], ids], [[1.0], ones], [[1], half], [[3.0], twos]) == [3.0, MILLION]
    assert apply(op("get_score_max"), [[1], ids], [[1], half], [[3.0], twos]) == [3.0, 2.0]
    assert apply(op("mean"), [[4.0], ones]) == [4.0, 1.0]


@pytest.mark.parametrize(
    ("function", "inputs", "counted"),
    [
        ("id_overlap_count", [[[], [1]], [[], []]], 0),
        ("get_jaccard_similarity", [[[], [1]], [[], []]], 1),
        ("get_cosine_similarity", [[[1], [1], [1]], [[0.0], [1.0], [math.nan]], [[1]] * 3, [[2.0]] * 3], 2),
        ("get_score_min", [[[], [1]], [[], [1]], [[], [math.nan]]], 0),
        ("get_score_max", [[[1], [1]], [[1], [1]], [[1.0, 2.0], [math.inf]]], 2),
        ("mean", [[[], [math.nan], [1.0]]], 2),
        ("sum", [[[], [math.nan], [math.inf, -math.inf]]], 1),
        ("divide", [[[1, 2, 3]], [[1.0, math.nan, 1.0]], [[1]], [[2.0]]], 1),
        ("add", [[[1, 2, 3], [4]], [[1.0], [2.0]], [[1], [4]], [[2.0], [3.0]]], 3),
    ],
)
def test_undefined_scores_are_counted(function: Any, inputs: list[Any], counted: int) -> None:
    counts = Counter[str]()
    apply(ComputeScore(function=function), *inputs, counts=counts)
    assert counts["compute_score value"] == counted


def test_undefined_scores_can_be_missing() -> None:
    assert math.isnan(apply(ComputeScore(function="mean", invalid=None), [[], [1.0]])[0])
    assert apply(ComputeScore(function="mean"), [[], [1.0]]) == [0.0, 1.0]


def test_scores_have_no_bound_and_functions_are_known() -> None:
    assert op("id_overlap_count").ids_below(5, 5) is None
    with pytest.raises(ValidationError):
        ComputeScore(function="median")

"""Ops that combine several lists of a row into one feature."""

from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.transforms.ops.lists import Cartesian, IdListTransform, NGram, PositiveIntersect
from pipeline.transforms.ops.op import Op
from tests.pipeline.transforms.contract import MILLION, Case, apply, chain, mix, signed


def cartesian(left: list[int], right: list[int]) -> list[int]:
    return [signed(chain(mix(a), mix(b))) for a in left for b in right]


def trigrams(*lists: list[int]) -> list[int]:
    ids = [i for ids in lists for i in ids]
    return [signed(chain(chain(mix(a), mix(b)), mix(c))) for a, b, c in zip(ids[:-2], ids[1:-1], ids[2:], strict=True)]


EXAMPLES = {
    "cartesian": Case(Cartesian(), lambda a, b: cartesian(a, b)[:1_000]),
    "cartesian, cut": Case(Cartesian(limit=5), lambda a, b: cartesian(a, b)[:5]),
    "id_list_transform": Case(IdListTransform(), lambda a, b: [i for i in a if i in b]),
    "id_list_transform, difference": Case(
        IdListTransform(mode="difference"), lambda a, b: [i for i in a if i not in b]
    ),
    "id_list_transform, map": Case(IdListTransform(mode="map"), lambda a, b: [b.index(i) for i in a if i in b]),
    "ngram": Case(NGram(n=3), trigrams),
    "ngram over three lists": Case(NGram(n=3), trigrams, ("sparse",) * 3),
    "ngram of one": Case(NGram(n=1), lambda ids: [signed(mix(i)) for i in ids]),
    "positive_intersect": Case(PositiveIntersect(), lambda a, b: list(dict.fromkeys(i for i in a if i in b))),
}


def test_hashes_never_change() -> None:
    """Trained tables depend on them."""
    assert apply(Cartesian(), [[1, 2]], [[7]]) == [[2117707494717150447, 8314783716148404663]]
    assert apply(NGram(n=2), [[1, 7], [7, 1]]) == [[2117707494717150447], [-2403303601854589868]]
    assert apply(NGram(n=3), [[1, 2, 3]]) == [[-117450973394793263]]


def test_pairs_are_distinguished() -> None:
    """A million pairs of neighbouring ids have a million ids, evenly spread."""
    (ids,) = apply(Cartesian(limit=MILLION), [list(range(1_000))], [list(range(1_000))])
    assert len(set(ids)) == MILLION
    buckets = Counter(i % 100 for i in ids)
    assert max(abs(count - 10_000) for count in buckets.values()) < 500  # five standard deviations


@pytest.mark.nightly
def test_a_million_ids() -> None:
    ids, half = list(range(MILLION)), list(range(0, MILLION, 2))
    counts = Counter[str]()
    made = apply(Cartesian(limit=4, output="pair"), [[1], ids, [2]], [[3], ids, []], counts=counts)
    assert made == [cartesian([1], [3]), cartesian([0], [0, 1, 2, 3]), []]
    assert counts == {"cartesian pair": MILLION**2 - 4}
    assert apply(PositiveIntersect(), [[5], [*ids, *ids], [6]], [[5], half[::-1], []]) == [[5], half, []]
    assert apply(IdListTransform(mode="map"), [[5], half, [6]], [[5], ids[::-1], []]) == [
        [0],
        [MILLION - 1 - i for i in half],
        [],
    ]
    grams = apply(NGram(n=3), [[5], ids, [6]], [[], [5, 6], [7, 8]])
    assert [len(row) for row in grams] == [0, MILLION, 1]
    assert grams[1][-1:] == trigrams([MILLION - 1, 5, 6])


@pytest.mark.parametrize(
    ("op", "inputs", "counted"),
    [
        (Cartesian(limit=3), [[[1, 2], [1]], [[1, 2], [1, 2, 3, 4, 5]]], {"cartesian value": 3}),
        (Cartesian(), [[[1, 2]], [[]]], {}),
        (NGram(n=2), [[[1], [1, 2]]], {}),
        (PositiveIntersect(), [[[1, 1]], [[2]]], {}),
        (IdListTransform(mode="map"), [[[1, 1]], [[2]]], {}),
    ],
)
def test_changed_values_are_counted(op: Op, inputs: list[Any], counted: dict[str, int]) -> None:
    """Ids that an op is meant to drop are not counted. Ids beyond a limit are."""
    counts = Counter[str]()
    apply(op, *inputs, counts=counts)
    assert counts == counted


@pytest.mark.parametrize(
    ("op", "limits", "bound"),
    [
        (Cartesian(), (5, 5), None),
        (NGram(n=1), (5,), None),
        (NGram(n=2), (5, 5, 5), None),
        (PositiveIntersect(), (5, None), 5),
        (PositiveIntersect(), (None, 5), 5),
        (PositiveIntersect(), (None, None), None),
        (IdListTransform(), (9, 5), 5),
        (IdListTransform(mode="difference"), (9, 5), 9),
        (IdListTransform(mode="difference"), (None, 5), None),
        (IdListTransform(mode="map"), (9, 5), None),
    ],
)
def test_bounds_of_ids(op: Op, limits: tuple[int | None, ...], bound: int | None) -> None:
    assert op.ids_below(*limits) == bound


@pytest.mark.parametrize(
    ("cls", "fields"),
    [(Cartesian, {"limit": 0}), (NGram, {}), (NGram, {"n": 0}), (NGram, {"n": 101}), (IdListTransform, {"mode": "or"})],
)
def test_fields_out_of_range_are_refused(cls: type[Op], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        cls(**fields)

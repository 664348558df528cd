"""Ops that read one list of ids."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.transforms.column import sparse_from_arrow
from pipeline.transforms.ops.op import ID_MAX, ID_MIN, Op
from pipeline.transforms.ops.sparse import Enumerate, FirstX, MapId, SigridHash
from tests.pipeline.transforms.contract import MILLION, Case, apply, chain, mix, rows_of, signed


def sigrid(value: int, salt: int, size: int) -> int:
    """folly's twang_mix64 and hash_128_to_64, and a floored remainder."""
    return signed(chain(salt & (2**64 - 1), mix(value))) % size


VOCABULARY = (3, -1, 2**62 + 1, ID_MIN, ID_MAX, 0, 17)
EXAMPLES = {
    "enumerate": Case(Enumerate(), lambda ids: list(range(len(ids)))),
    "first_x": Case(FirstX(limit=3), lambda ids: ids[:3]),
    "map_id": Case(
        MapId(vocabulary=VOCABULARY, unknown=7),
        lambda ids: [VOCABULARY.index(i) if i in VOCABULARY else 7 for i in ids],
    ),
    "map_id, left out": Case(
        MapId(vocabulary=VOCABULARY), lambda ids: [VOCABULARY.index(i) for i in ids if i in VOCABULARY]
    ),
    "map_id, nothing learned": Case(MapId(size=5, unknown=0).fit(()), lambda ids: [0 for _ in ids]),
    "sigrid_hash": Case(SigridHash(size=97, salt=5), lambda ids: [sigrid(i, 5, 97) for i in ids]),
    "sigrid_hash, negative salt": Case(
        SigridHash(size=2**62 + 1, salt=-9), lambda ids: [sigrid(i, -9, 2**62 + 1) for i in ids]
    ),
}


def test_goldens_of_torcharrow() -> None:
    assert apply(SigridHash(size=100), [[1, 2, 3, 5, 8, 10, 11]]) == [[60, 54, 54, 4, 67, 2, 25]]
    assert apply(FirstX(limit=3), [[1, 2, 3], [5, 8], [13]]) == [[1, 2, 3], [5, 8], [13]]
    assert apply(FirstX(limit=1), [[1, 2], [3, 4], [5, 6]]) == [[1], [3], [5]]


@pytest.mark.nightly
def test_a_million_ids() -> None:
    ids = list(range(MILLION))
    assert apply(Enumerate(), [[9], ids, [8]]) == [[0], ids, [0]]
    assert apply(FirstX(limit=MILLION - 1), [[9], ids, [8]]) == [[9], ids[:-1], [8]]
    assert apply(MapId(vocabulary=tuple(reversed(ids))), [[9], ids, [8]]) == [[MILLION - 10], ids[::-1], [MILLION - 9]]
    hashed = apply(SigridHash(size=1_000), [[9], ids, [8]])
    assert hashed[1][:10] + hashed[1][-10:] == [sigrid(i, 0, 1_000) for i in ids[:10] + ids[-10:]]


def test_ids_that_share_a_slot_are_distinguished() -> None:
    crowd = [i for i in range(20_000) if mix(i) % 1_024 < 8][:100]  # all in the first slots of a table of 1,024
    rest = [i for i in range(20_000, 30_000) if mix(i) % 1_024 >= 512][:300]
    op = MapId(vocabulary=(*crowd, *rest))
    assert apply(op, [[*crowd, *rest]]) == [list(range(400))]
    assert apply(op, [list(range(30_000))])[0] == sorted(range(400), key=[*crowd, *rest].__getitem__)


def test_strings_of_a_vocabulary_are_the_ids_of_a_column() -> None:
    column = sparse_from_arrow("country", pa.array([["DE", "AT"], ["CH"], [""], ["Österreich"]]))
    made = MapId(vocabulary=("AT", "DE", "Österreich", "")).apply([column], Counter())
    assert rows_of(made) == [[1, 0], [], [3], [2]]


@pytest.mark.parametrize(
    ("op", "rows", "counted"),
    [
        (Enumerate(), [[5, 5]], {}),
        (FirstX(limit=2), [[1, 2, 3, 4], [1]], {"first_x value": 2}),
        (MapId(vocabulary=(1,)), [[1, 2, 3], [], [2]], {"map_id value": 3}),
        (MapId(vocabulary=(1,), unknown=0), [[1, 2, 3], [], [2]], {"map_id value": 3}),
        (SigridHash(size=5), [[-1]], {}),
    ],
)
def test_changed_values_are_counted(op: Op, rows: list[Any], counted: dict[str, int]) -> None:
    counts = Counter[str]()
    apply(op, rows, counts=counts)
    assert counts == counted


@pytest.mark.parametrize(
    ("op", "limit", "bound"),
    [
        (Enumerate(), 5, None),
        (SigridHash(size=9), None, 9),
        (FirstX(limit=2), None, None),
        (FirstX(limit=2), 5, 5),
        (MapId(vocabulary=(4, 9)), None, 2),
        (MapId(vocabulary=(4, 9), unknown=2), None, 3),
        (MapId(vocabulary=(4, 9), unknown=0), None, 2),
        (MapId(size=10), None, 10),
        (MapId(size=10).fit((4, 9)), None, 10),  # the table keeps the size planned before fitting
        (MapId(size=10, unknown=10), None, 11),
    ],
)
def test_bounds_of_ids(op: Op, limit: int | None, bound: int | None) -> None:
    assert op.ids_below(limit) == bound


def test_map_id_learns_a_vocabulary() -> None:
    op = MapId(size=3, min_count=2, unknown=3, inputs=("item:sparse",), output="item")
    fitted = op.fit((30, 10))
    assert (op.fitted, fitted.fitted, fitted.learns) == (False, True, "vocabulary")
    assert (fitted.inputs, fitted.output, fitted.min_count) == (("item:sparse",), "item", 2)
    assert apply(fitted, [[10, 30, 5]]) == [[1, 0, 3]]
    assert apply(fitted.fit((5,)), [[10, 30, 5]]) == [[3, 3, 0]]  # no trace of the first fit
    assert apply(fitted, [[10, 30, 5]]) == [[1, 0, 3]]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: MapId(output="item"),
            "map_id on 'item': expected a vocabulary, or a size to learn one, got neither. Give one of them.",
        ),
        (
            lambda: MapId(vocabulary=(), output="item"),
            "map_id on 'item': expected ids in the vocabulary, got none. Name some, or give a size to learn them.",
        ),
        (
            lambda: MapId(vocabulary=("a", "b", "a")),
            "map_id on 'value': expected each id once, got 'a' twice. Remove the second one.",
        ),
        (
            lambda: MapId(size=1).fit((1, 2)),
            "map_id on 'value': expected at most size = 1 ids, got 2. Raise the size.",
        ),
        (
            lambda: apply(MapId(size=1, output="item"), [[1]]),
            "map_id on 'item': expected a fitted vocabulary, got none. Fit the plan first.",
        ),
    ],
)
def test_errors_say_what_to_do(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (FirstX, {"limit": 0}),
        (SigridHash, {"size": 0}),
        (SigridHash, {"size": 2**63}),
        (SigridHash, {"size": 5, "salt": 2**63}),
        (MapId, {"vocabulary": (2**63,)}),
        (MapId, {"size": 0}),
        (MapId, {"size": 5, "min_count": 0}),
        (MapId, {"size": 5, "unknown": -1}),
    ],
)
def test_fields_out_of_range_are_refused(cls: type[Op], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        cls(**fields)

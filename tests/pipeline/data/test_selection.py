"""Splits and filters: which rows train, and what is refused before they are read."""

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, DoubleType, IntegerType, LongType, NestedField, StringType

from pipeline.data.config import PARTS, Part, SplitConfig
from pipeline.data.selection import HASH_STEPS, Selection, check_sampling, hash_steps, select, share_rows
from pipeline.errors import ConfigError, ContractError, EmptyDatasetError
from pipeline.transforms.ops.sampling import Sampling
from storage.filters import check_filter
from storage.reader import Fragment

DAYS = [datetime.date(2024, 12, 25) + datetime.timedelta(days=i) for i in range(20)]  # past the end of a leap year
KINDS = {"age": LongType(), "n": IntegerType(), "country": StringType(), "price": DoubleType(), "since": DateType()}
TABLE = Schema(*(NestedField(i, name, kind) for i, (name, kind) in enumerate(KINDS.items(), start=1)))


def chosen(split: dict[str, Any], part: Part, days: list[datetime.date] = DAYS) -> Selection | None:
    return select(SplitConfig.model_validate(split), part, days, None)


def sentence(make: Any, kind: type[ContractError] = ConfigError) -> str:
    with pytest.raises(kind) as error:
        make()
    return str(error.value)


@pytest.mark.parametrize(
    ("split", "days"),
    [
        (
            {
                "days": {
                    "train": ["2024-12-25..2025-01-04", "2025-01-06"],
                    "valid": ["2025-01-05"],
                    "test": ["2025-01-07..2025-01-13"],
                }
            },
            [12, 1, 7],
        ),
        ({"days": {"train": ["2024-12-25..2025-01-05"], "test": ["2025-01-06..2025-01-13"]}}, [12, 0, 8]),
        ({"every_nth_day": {"n": 5, "valid": 3, "test": 4}}, [13, 4, 3]),
        ({"every_nth_day": {"n": 5, "test": 0}}, [16, 0, 4]),
    ],
)
def test_splits_by_day_take_each_day_once(split: dict[str, Any], days: list[int]) -> None:
    parts = [chosen(split, part) for part in PARTS]
    assert [len(part.days) if part else 0 for part in parts] == days
    assert sorted(day for part in parts if part for day in part.days) == DAYS
    assert all(part.exact for part in parts if part)


NAMED = {"days": {"train": ["2024-12-25..2025-01-04"], "test": ["2025-01-05..2025-01-13"]}}
HASHED: dict[str, Any] = {"hash": {"key": "user", "shares": {"train": 0.8, "test": 0.2}}}


@pytest.mark.parametrize(
    "split", [HASHED, {"every_nth_day": {"n": 5, "test": 0}}, {"column": {"name": "part", "valid": None}}], ids=str
)
def test_open_days_are_left_out_unless_they_are_allowed(split: dict[str, Any]) -> None:
    open_days, config = set(DAYS[-2:]), SplitConfig.model_validate(split)
    for part in PARTS:
        every, some = select(config, part, DAYS, None), select(config, part, DAYS, None, open_days=open_days)
        allowed = select(config.model_copy(update={"open_days": True}), part, DAYS, None, open_days=open_days)
        assert allowed == every
        assert (some and set(some.days)) == (every and set(every.days) - open_days)
    assert "expected at least one day, got none of 2 days" in sentence(
        lambda: select(config, "train", DAYS[-2:], None, open_days=open_days), EmptyDatasetError
    )


@pytest.mark.parametrize("split", [NAMED, {"hash": HASHED["hash"] | {"days": ["2025-01-05..2025-01-13"]}}], ids=str)
def test_open_days_that_a_split_names_are_refused(split: dict[str, Any]) -> None:
    config = SplitConfig.model_validate(split)
    assert sentence(lambda: select(config, "test", DAYS, None, open_days=set(DAYS[-2:]))) == (
        "split, part 'test': expected closed days, got 2025-01-12 and 1 more, still open. "
        "Ingest again once the outcome log has grown, name earlier days, or set split.open_days=true."
    )
    allowed = config.model_copy(update={"open_days": True})
    assert select(allowed, "test", DAYS, None, open_days=set(DAYS)) == select(config, "test", DAYS, None)


def test_every_nth_day_is_the_day_of_the_year_modulo_n() -> None:
    test = chosen({"every_nth_day": {"n": 5, "valid": 3, "test": 4}}, "test")
    assert test is not None
    assert test.days == tuple(day for day in DAYS if int(day.strftime("%j")) % 5 == 4)


def test_dates_may_be_written_as_yaml_reads_them() -> None:
    split = {"days": {"train": [DAYS[0]], "test": [DAYS[1]]}}
    assert chosen(split, "train") == Selection(days=(DAYS[0],))


def test_a_column_split_compares_one_column() -> None:
    split = {"column": {"name": "fold", "valid": None, "test": "holdout"}}
    assert [chosen(split, part) and chosen(split, part).equals for part in PARTS] == [
        ("fold", "train"),
        None,
        ("fold", "holdout"),
    ]
    train = chosen(split, "train")
    assert train is not None
    assert (train.exact, train.days) == (False, tuple(DAYS))
    assert str(train.expression()) == "EqualTo(term=Reference(name='fold'), literal=literal('train'))"


@pytest.mark.parametrize(
    "shares",
    [
        {"train": 0.8, "valid": 0.1, "test": 0.1},
        {"train": 1 / 3, "valid": 1 / 3, "test": 1 / 3},
        {"train": 0.5, "test": 0.2},
    ],
)
@pytest.mark.parametrize("kind", [pa.int64(), pa.string()], ids=str)
def test_a_hash_split_keeps_keys_together(shares: dict[Part, float], kind: pa.DataType) -> None:
    keys = np.random.default_rng(5).integers(0, 20_000, 60_000)
    rows = pa.table({"user": pa.array(keys).cast(kind), "row": np.arange(60_000)})
    parts = [chosen({"hash": {"key": "user", "shares": shares}}, part) for part in PARTS]
    kept = {name: part.keep(rows) for name, part in zip(PARTS, parts, strict=True) if part}
    assert kept.keys() == shares.keys()
    numbers = np.concatenate([table["row"].to_numpy() for table in kept.values()])
    assert len(numbers) == len(set(numbers))  # no row in two parts
    assert (len(numbers) == 60_000) == (sum(shares.values()) > 0.99)  # shares of 1 lose no row
    users = {name: set(table["user"].to_pylist()) for name, table in kept.items()}
    assert sum(map(len, users.values())) == len(set().union(*users.values()))  # no user in two parts
    everyone = len(set(keys))
    for name, share in shares.items():
        assert len(users[name]) / everyone == pytest.approx(share, abs=4 * (share * (1 - share) / everyone) ** 0.5)


@pytest.mark.parametrize("seed", range(8))
def test_each_hash_is_in_one_part_and_no_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all values that a hash can have, so also at the ends of each part."""
    random = np.random.default_rng(seed)
    cuts = np.sort(random.integers(1, 1_000, 2)) / 1_000 if seed else np.array([0.1, 0.9])
    sizes = np.diff([0.0, *cuts, 1.0])
    shares = {name: float(size) for name, size in zip(PARTS, sizes, strict=True) if size}
    monkeypatch.setattr("pipeline.data.selection.hash_steps", lambda *keys, place: np.arange(HASH_STEPS))
    rows = pa.table({"user": pa.nulls(HASH_STEPS, pa.int64())})
    parts = {name: chosen({"hash": {"key": "user", "shares": shares}}, name) for name in shares}
    masks = {name: part.mask(rows) for name, part in parts.items() if part is not None}
    assert masks.keys() == shares.keys()
    assert (sum(mask.astype(int) for mask in masks.values()) == 1).all()
    for name, mask in masks.items():
        assert abs(mask.sum() - shares[name] * HASH_STEPS) <= 2


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        (pa.array([0, 1, -1, None, 2**63 - 1]), [1029432, 34963, 960057, 0, 163810]),
        (pa.array(["", "a", None, "ü"]), [344411, 213876, 0, 67697]),
    ],
)
def test_hash_steps_are_pinned(keys: pa.Array, steps: list[int]) -> None:
    assert hash_steps(keys).tolist() == steps
    assert hash_steps(keys.slice(1)).tolist() == steps[1:]


@pytest.mark.parametrize("keys", [("user",), ("text",), ("amount",), ("user", "text"), ("list", "user")], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_rows_without_a_key_are_spread_over_the_parts(keys: tuple[str, ...], sampled: bool) -> None:
    """Whatever the key's type: no row in two parts, none lost, the shares as asked, in chunks as in one piece."""
    if "list" in keys:
        keys, sampled = ("text", "user"), True  # the sampling reads lists
    count, (day,) = 12_000, DAYS[:1]
    rows = pa.table({
        "user": pa.nulls(count, pa.int64()), "text": pa.nulls(count, pa.string()),
        "amount": pa.array(np.where(np.arange(count) % 2, np.nan, 0.0), mask=np.arange(count) % 2 == 0),
        "list": pa.nulls(count, pa.list_(pa.int64())), "row": np.arange(count),
    })  # fmt: skip
    sampling = Sampling(inputs=("list",), rate=0.5, seed=1) if sampled else None
    split = SplitConfig.model_validate({"hash": {"key": keys, "shares": {"train": 0.7, "valid": 0.1, "test": 0.2}}})
    place = Fragment(path="a", day=day, row_group=3, rows=count)
    kept: dict[str, list[int]] = {}
    for part in PARTS:
        one = select(split, part, DAYS, None, sampling)
        assert one is not None
        kept[part] = one.keep(rows, place)["row"].to_pylist()
        pieces = [one.keep(rows.slice(at, 700), place, at)["row"].to_pylist() for at in range(0, count, 700)]
        assert [row for piece in pieces for row in piece] == kept[part]
        if "user" in keys:
            assert one.keep(rows, place.model_copy(update={"row_group": 4}))["row"].to_pylist() != kept[part]
    every = sorted(row for rows_of_part in kept.values() for row in rows_of_part)
    assert len(every) == len(set(every))
    assert (every == list(range(count))) is not sampled
    shares: dict[Part, float] = {"train": 0.35 if sampled else 0.7, "valid": 0.1, "test": 0.2}
    for part, share in shares.items():
        assert len(kept[part]) / count == pytest.approx(share, abs=0.02)


def test_a_row_with_one_of_two_keys_stays_with_its_key() -> None:
    rows = pa.table({"user": pa.array([7] * 500 + [None] * 500), "shop": pa.array([None] * 500 + ["a"] * 500)})
    steps = hash_steps(rows["user"].combine_chunks(), rows["shop"].combine_chunks(), place=0)
    assert len(set(steps[:500].tolist())) == len(set(steps[500:].tolist())) == 1


def test_several_columns_make_one_key() -> None:
    """Rows of one user fall into both parts, but a pair always falls into the same part."""
    random = np.random.default_rng(5)
    users, items = random.integers(0, 50, 20_000), random.integers(0, 400, 20_000)
    rows = pa.table({"user": users, "item": pa.array(items).cast(pa.string())})
    split = {"hash": {"key": ["user", "item"], "shares": {"train": 0.75, "test": 0.25}}}
    kept = {part: chosen(split, part).keep(rows) for part in ("train", "test")}
    pairs = {part: set(zip(*(table[name].to_pylist() for name in ("user", "item")), strict=True)) for part, table in kept.items()}  # fmt: skip
    assert not pairs["train"] & pairs["test"]
    assert set(kept["train"]["user"].to_pylist()) == set(kept["test"]["user"].to_pylist())
    assert kept["test"].num_rows / 20_000 == pytest.approx(0.25, abs=0.02)
    assert sum(table.num_rows for table in kept.values()) == 20_000


def test_a_hash_split_may_be_of_some_days() -> None:
    split = {"hash": {"key": "user", "shares": {"train": 0.5, "test": 0.5}, "days": [f"{DAYS[1]}..{DAYS[2]}"]}}
    assert chosen(split, "train").days == chosen(split, "test").days == tuple(DAYS[1:3])
    split["hash"]["days"] = ["1999-01-01"]
    with pytest.raises(EmptyDatasetError, match=r"split.hash.days '1999-01-01': expected days of the table"):
        chosen(split, "train")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {"days": DAYS[1:3]}, True),
        ({}, {"days": DAYS[2:]}, False),
        ({"equals": ("fold", "valid")}, {"equals": ("fold", "test")}, False),
        ({"equals": ("fold", "valid")}, {"equals": ("part", "test")}, True),
        ({"hash_keys": ("user",), "hash_range": (0, 5)}, {"hash_keys": ("user",), "hash_range": (5, 9)}, False),
        ({"hash_keys": ("user",), "hash_range": (0, 5)}, {"hash_keys": ("user",), "hash_range": (4, 9)}, True),
        ({"hash_keys": ("user",), "hash_range": (0, 5)}, {"hash_keys": ("item",), "hash_range": (5, 9)}, True),
    ],
)
def test_selections_that_may_share_rows_are_found(one: dict[str, Any], other: dict[str, Any], expected: bool) -> None:
    first, second = (Selection(**{"days": DAYS[:2]} | values) for values in (one, other))
    assert share_rows(first, second) == share_rows(second, first) == expected


def test_filters_reach_iceberg() -> None:
    text = "country = 'DE' and age >= 18"
    selection = select(SplitConfig.model_validate({"column": {"name": "fold"}}), "test", DAYS, text)
    assert selection is not None
    assert str(selection.expression()).count("And(") == 2
    assert (
        str(Selection(days=(), filter="age = 1").expression())
        == "EqualTo(term=Reference(name='age'), literal=LongLiteral(1))"
    )
    assert Selection(days=()).expression() is None


@pytest.mark.parametrize(
    "text",
    [
        "country = 'DE' and age >= 18",
        "not (age in (1, 2) or price is nan)",
        "country like 'D%'",
        "age between 1 and 3",
        "since > '2024-01-31'",
        "age > 2.0",
        "price < 3",
        "country is not null",
        "country = 'it''s'",
        "true",
    ],
)
def test_plain_comparisons_pass(text: str) -> None:
    check_filter(text, TABLE)
    check_filter(text, None)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("1=1; drop table x", "'1=1; drop table x' at character 1"),
        ("age = 1; drop table x", "'; drop table x' at character 8"),
        ("age in (select age from t)", "'age in (select age from t)' at character 1"),
        ("lower(country) = 'DE'", "'lower(country) = 'DE'' at character 1"),
        ("age = 1 --", "'--' at character 9"),
        ("age = 1 or", "an open end"),
        ("", "an open end"),
        ("country like '%D'", "LIKE expressions only supports wildcard, '%', at the end of a string"),
    ],
)
@pytest.mark.parametrize("schema", [None, TABLE], ids=["text", "table"])
def test_other_filters_are_refused(text: str, got: str, schema: Schema | None) -> None:
    assert sentence(lambda: check_filter(text, schema)) == (
        f"filter '{text}': expected comparisons of columns with constants, joined by and, or, not, got {got}. "
        "Write it like \"country = 'DE' and age >= 18\"."
    )


def test_a_filter_of_any_depth_is_refused_in_one_line() -> None:
    said = sentence(lambda: check_filter("(" * 500, None))
    assert len(said) < 500
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("cuntry = 'DE'", "columns of the table, got 'cuntry'. Closest: country. Correct the name."),
        (
            "age = 1 or Zzz = 1",
            "columns of the table, got 'Zzz'. Closest: since, price, n, country, age. Correct the name.",
        ),
        *(
            (
                text,
                f"what can be compared with '{name}', which is {kind}, got {got}. "
                "Write numbers bare, text and dates in single quotes.",
            )
            for text, name, kind, got in [
                ("age = 'x'", "age", "long", "'x'"),
                ("not (price > 1 and n = 'x')", "n", "int", "'x'"),
                ("country = 5", "country", "string", "5"),
                ("country in (1, 2)", "country", "string", "1, 2"),
                ("since = 'monday'", "since", "date", "'monday'"),
                ("age > 1.5", "age", "long", "1.5"),  # Iceberg's client would round it to 2
            ]
        ),
    ],
)
def test_filters_are_checked_against_the_table(text: str, rest: str) -> None:
    check_filter(text, None)  # valid syntax
    assert sentence(lambda: check_filter(text, TABLE)) == f"filter '{text}': expected {rest}"


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ({}, "split: expected one of days, every_nth_day, column, hash, got none. Give exactly one."),
        (
            {"column": {"name": "x"}, "every_nth_day": {"n": 3, "test": 1}},
            "split: expected one of days, every_nth_day, column, hash, got ['every_nth_day', 'column']. Give "
            "exactly one.",
        ),
        (
            {"days": {"train": ["2025-01-01..2025-01-05"], "test": ["2025-01-04"]}},
            "split.days.test '2025-01-04': expected days outside split.days.train, got '2025-01-01..2025-01-05', "
            "which shares days. "
            "Every row may be in one part only. Change one of them.",
        ),
        *(
            (
                {"days": {"train": [text], "test": ["2025-01-04"]}},
                f"split.days: expected dates like 2013-01-31 or 2013-01-01..2013-01-31, got '{text}'. Correct it.",
            )
            for text in ("yesterday", "2025-01-01..", "..2025-01-01", "2025-02-30")
        ),
        (
            {"days": {"train": ["2025-01-02..2025-01-01"], "test": ["2025-01-04"]}},
            "split.days: expected the earlier day first, got '2025-01-02..2025-01-01'. Swap the days.",
        ),
        (
            {"every_nth_day": {"n": 3, "valid": 1, "test": 1}},
            "split.every_nth_day: expected different remainders below 3, got 1 and 1. Change them.",
        ),
        (
            {"every_nth_day": {"n": 3, "test": 3}},
            "split.every_nth_day: expected different remainders below 3, got 3. Change them.",
        ),
        (
            {"column": {"name": "fold", "test": "train"}},
            "split.column: expected three different values, got train, valid, train. Change one.",
        ),
        *(
            (
                {"hash": {"key": "user", "shares": shares}},
                f"split.hash.shares: expected positive shares of train and test with a sum of at most 1, got "
                f"{shares}. Correct them.",
            )
            for shares in (
                {},
                {"train": 0.5},
                {"train": 0.9, "test": 0.2},
                {"train": 1.0, "test": 0.0},
                {"train": 0.5, "test": -0.1},
            )
        ),
    ],
)
def test_splits_that_contradict_themselves(split: dict[str, Any], said: str) -> None:
    assert sentence(lambda: SplitConfig.model_validate(split)) == said


def test_a_share_is_a_number() -> None:
    with pytest.raises(ValidationError, match="finite"):
        SplitConfig.model_validate({"hash": {"key": "user", "shares": {"train": float("nan"), "test": 0.1}}})


@pytest.mark.parametrize(
    ("split", "days", "said"),
    [
        (
            {"days": {"train": ["2024-12-31"], "test": ["2030-01-01"]}},
            DAYS,
            "split.days.test '2030-01-01': expected days of the table, 2024-12-25 to 2025-01-13, got no such day. "
            "Write the day to the table, or name another.",
        ),
        (
            {"every_nth_day": {"n": 300, "test": 250}},
            DAYS,
            "split, part 'test': expected at least one day, got none of 20 days. Change the split.",
        ),
        (
            {"days": {"train": ["2024-12-31"], "test": ["2030-01-01"]}},
            [],
            "split: expected days to split, got a table without rows. Write some to it first.",
        ),
    ],
)
def test_parts_without_days_are_refused(split: dict[str, Any], days: list[datetime.date], said: str) -> None:
    assert sentence(lambda: chosen(split, "test", days), EmptyDatasetError) == said


def test_fractions_and_times_are_keys_too() -> None:
    """So a table without ids can be split row by row."""
    values = np.random.default_rng(7).normal(size=20_000)
    rows = pa.table({"x": values, "at": pa.array(values * 1e9).cast(pa.int64(), safe=False).cast(pa.timestamp("us"))})
    for key in (["x"], ["x", "at"], ["at"]):
        split = {"hash": {"key": key, "shares": {"train": 0.75, "test": 0.25}}}
        train, test = (chosen(split, part).keep(rows) for part in ("train", "test"))
        assert train.num_rows + test.num_rows == 20_000
        assert test.num_rows == pytest.approx(5_000, rel=0.05)
        again = chosen(split, "test").keep(rows.slice(5_000))
        later = set(values[5_000:])
        assert again["x"].to_pylist() == [x for x in test["x"].to_pylist() if x in later]


def test_a_key_is_one_value() -> None:
    assert sentence(lambda: hash_steps(pa.array([["a"]]))).replace("element:", "item:") == (
        "split.hash.key: expected an integer or text column, got list<item: string>. Name another column."
    )


def test_sampling_thins_the_training_rows_by_key() -> None:
    split = SplitConfig.model_validate({"hash": {"key": "user", "shares": {"train": 0.5, "test": 0.5}}})
    sampling = Sampling(inputs=("user", "word"), rate=0.25, seed=3)
    train, test = (select(split, part, DAYS, None, sampling) for part in ("train", "test"))
    assert train is not None
    assert test is not None
    assert (train.key_columns(), test.key_columns(), test.sampling) == (["user", "word"], ["user"], None)
    keys = np.random.default_rng(1).integers(0, 5_000, 40_000)
    rows = pa.table({"user": keys, "word": pa.array(keys % 7).cast(pa.string()), "row": np.arange(40_000)})
    kept, all_rows = train.keep(rows), train.model_copy(update={"sampling": None}).keep(rows)
    users = set(kept["user"].to_pylist())
    assert len(users) / len(set(all_rows["user"].to_pylist())) == pytest.approx(0.25, abs=0.04)
    assert kept["row"].to_pylist() == [
        row
        for row, user in zip(all_rows["row"].to_pylist(), all_rows["user"].to_pylist(), strict=True)
        if user in users
    ]  # all rows of a key or none, in order
    fragment = Fragment(path="a", row_group=3, rows=40_000, day=DAYS[0])
    assert train.keep(rows, fragment).equals(kept)
    nobody = rows.set_column(0, "user", pa.nulls(40_000, pa.int64())).set_column(
        1, "word", pa.nulls(40_000, pa.string())
    )
    alone = Selection(days=(DAYS[0],), sampling=sampling)
    drawn = alone.keep(nobody, fragment)["row"].to_pylist()
    assert len(drawn) / 40_000 == pytest.approx(0.25, abs=0.02)
    late = alone.keep(nobody.slice(30_000), fragment, 30_000)["row"].to_pylist()
    assert late == [row for row in drawn if row >= 30_000]
    moved = fragment.model_copy(update={"path": "b"})
    assert alone.keep(nobody, moved)["row"].to_pylist() == drawn
    for other in ({"day": DAYS[1]}, {"row_group": 4}):
        assert alone.keep(nobody, fragment.model_copy(update=other))["row"].to_pylist() != drawn
    assert (alone.exact, Selection(days=(DAYS[0],)).exact) == (False, True)
    assert alone.keep(rows.slice(0, 0)).num_rows == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("usr", "expected a column of the table, got none of that name. Closest: user. Correct the name."),
        ("price", "expected integers or text, got double. Name another column."),
    ],
)
def test_sampling_is_checked_against_the_table(name: str, said: str) -> None:
    table = pa.schema({"user": pa.int64(), "word": pa.string(), "items": pa.list_(pa.int64()), "price": pa.float64()})
    check_sampling(Sampling(inputs=("user", "word", "items"), rate=0.5), table)
    assert sentence(lambda: check_sampling(Sampling(inputs=("user", name), rate=0.5), table)) == (
        f"sampling.inputs '{name}': {said}"
    )


def test_no_key_means_every_row() -> None:
    rows = pa.table({"a": [1, 2]})
    assert Selection(days=()).keep(rows) is rows
    assert HASH_STEPS == 2**20

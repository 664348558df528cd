"""What one column tells of the label by itself."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from pipeline.data.alone import look_at_groups, look_at_lists, look_at_numbers

ROWS = 20_000
DRAW = np.random.default_rng(11)
RARE, EVEN = (DRAW.random(ROWS) < rate for rate in (0.02, 0.4))


def noise() -> np.ndarray:
    return np.random.default_rng(12).normal(size=ROWS)


def hide(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    return np.where(where, np.nan, values)


LEAKS = {
    "a duration that is 0 without a click": lambda y: np.where(y, 5.0 * np.exp(noise()), 0.0),
    "-1 without one, and of either sign with it": lambda y: np.where(y, noise() - 5.0, -1.0),
    "a score": lambda y: y + 0.15 * noise(),
    "a score the other way round": lambda y: 0.15 * noise() - y,
    "an interval in the middle": lambda y: np.where(y, 0.1 * noise(), np.where(noise() < 0, -2.0, 2.0) + 0.1 * noise()),
    "a value in clicked rows only": lambda y: hide(noise(), ~y),
    "a value in rows without a click only": lambda y: hide(noise(), y),
    "a value in half of the clicked rows": lambda y: hide(noise(), ~y | (noise() > 0)),
    "a score of one row in ten": lambda y: hide(y + 0.1 * noise(), np.arange(ROWS) % 10 > 0),
}


@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.parametrize("label", [RARE, EVEN], ids=["rare", "even"])
def test_a_number_that_comes_after_the_label_is_a_leak(name, label):
    assert look_at_numbers(LEAKS[name](label), label.astype(float)).leaks


def test_the_auc_is_that_of_scikit_learn():
    values = EVEN + noise()
    assert look_at_numbers(values, EVEN.astype(float)).auc == pytest.approx(roc_auc_score(EVEN, values), abs=1e-12)


@pytest.mark.parametrize("label", [RARE, EVEN], ids=["rare", "even"])
def test_numbers_that_tell_less_are_none(label):
    y = label.astype(float)
    for values in (
        noise(),
        y + 0.8 * noise(),
        np.floor(5 * noise()),
        hide(noise(), noise() > 1),
        np.full(ROWS, np.nan),
    ):
        assert not look_at_numbers(values, y).leaks


def test_ids_are_judged_by_rows_that_did_not_teach_them():
    """Texts whose values are each pure leak. Ids of one or two rows are pure, too, but say nothing of other rows."""
    y = EVEN.astype(float)
    pure = np.where(EVEN, 0, 200) + np.random.default_rng(1).integers(0, 200, ROWS)
    assert look_at_groups(pure, y).leaks
    assert look_at_groups(np.where(noise() < 1, pure, -1), y).leaks, "also where a tenth has none"
    mixed = np.where(noise() < 0.6, pure, 400)
    assert 0.9 < look_at_groups(mixed, y).auc < 0.98
    for ids in (np.arange(ROWS), np.arange(ROWS) // 2, np.random.default_rng(2).integers(0, 5_000, ROWS)):
        found = look_at_groups(ids, y)
        assert (found.leaks, found.auc < 0.55) == (False, True)


def test_lists_leak_by_an_item_or_by_their_length():
    y, draw = EVEN.astype(float), np.random.default_rng(4)
    lengths = draw.integers(1, 6, ROWS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = draw.integers(0, 50, offsets[-1])
    assert not look_at_lists(offsets, items, y).leaks
    told = items.copy()
    told[offsets[:-1]] = np.where(EVEN, 1_000, 1_001)
    assert look_at_lists(offsets, told, y).auc > 0.98
    longer = np.concatenate([[0], np.cumsum(np.where(EVEN, 3, 2))])
    assert look_at_lists(longer, draw.integers(0, 50, longer[-1]), y).leaks
    filled = np.concatenate([[0], np.cumsum(np.where(EVEN, 2, 0))])
    assert look_at_lists(filled, draw.integers(0, 50, filled[-1]), y).leaks


def test_nothing_is_said_of_a_handful_of_rows():
    assert not look_at_numbers(np.array([0.0, 0.0, 1.0, 1.0]), np.array([0.0, 0.0, 1.0, 1.0])).leaks
    assert not look_at_groups(np.empty(0, np.int64), np.empty(0)).leaks

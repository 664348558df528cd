"""What judging on a whole day that no model has seen is worth, if effects of days do not last."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from pipeline.evaluation.config import EvaluationConfig, GateConfig
from pipeline.evaluation.evaluate import Evaluation, ScoredRows
from pipeline.evaluation.gate import compare
from tests.quality import quality

DAYS, ROWS, USERS, ITEMS = 12, 2_000, 200, 100
HELD_OUT = ROWS // 10

Day = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Users, items and labels of the rows of a day."""
Model = tuple[float, np.ndarray, np.ndarray]
"""Intercept, and the effects of users and items."""


def draw_days(random: np.random.Generator) -> list[Day]:
    """Draws days with the same users and items, and an intercept of their own."""
    users, items, found = random.normal(0.0, 0.7, USERS), random.normal(0.0, 0.7, ITEMS), []
    for intercept in random.normal(-1.0, 0.8, DAYS):
        user, item = random.integers(0, USERS, ROWS), random.integers(0, ITEMS, ROWS)
        rate = 1.0 / (1.0 + np.exp(-(intercept + users[user] + items[item])))
        found.append((user, item, (random.random(ROWS) < rate).astype(float)))
    return found


def predict(model: Model, day: Day) -> np.ndarray:
    result: np.ndarray = 1.0 / (1.0 + np.exp(-(model[0] + model[1][day[0]] + model[2][day[1]])))
    return result


def train(model: Model, day: Day) -> Model:
    """Trains a model one epoch further on the rows of a day that are not held out."""
    intercept, users, items = model[0], model[1].copy(), model[2].copy()
    for start in range(HELD_OUT, ROWS, 50):
        user, item, labels = (column[start : start + 50] for column in day)
        error = labels - predict((intercept, users, items), (user, item, labels))
        intercept += 0.5 * error.mean()
        np.add.at(users, user, 0.1 * error)
        np.add.at(items, item, 0.1 * error)
    return intercept, users, items


def is_promoted(challenger: Model, champion: Model, day: Day) -> bool:
    ours, theirs = predict(challenger, day), predict(champion, day)
    evaluation = Evaluation(EvaluationConfig())
    evaluation.add(ScoredRows(day[2], ours, pa.table({"day": np.zeros(len(ours), np.int32)}), theirs))
    return compare(evaluation, evaluation.report(), GateConfig(), 1).decision == "promote"


def list_gains(days: list[Day], later: bool) -> list[float]:
    """Returns, for each promoted model, its NE minus that of the champion that it replaced on the next day.

    Args:
        later: Judges on the whole day after the training, as `recurring.judge: next_day` does. Otherwise at once, on
            held-out rows of the same day.
    """
    champion, gains = train((0.0, np.zeros(USERS), np.zeros(ITEMS)), days[0]), []
    for today, tomorrow, after in zip(days[1:], days[2:], days[3:], strict=False):
        challenger = train(champion, today)
        judged = tomorrow if later else (today[0][:HELD_OUT], today[1][:HELD_OUT], today[2][:HELD_OUT])
        if is_promoted(challenger, champion, judged):
            unseen = after if later else tomorrow
            new, old = (quality(unseen[2], predict(model, unseen)).ne for model in (challenger, champion))
            gains.append(new - old)
            champion = challenger
    return gains


@pytest.mark.slow
def test_models_promoted_on_a_day_that_no_model_has_seen_are_better_on_the_next():
    drawn = [draw_days(np.random.default_rng([1, number])) for number in range(20)]
    at_once, later = (list(itertools.chain(*(list_gains(days, rule) for days in drawn))) for rule in (False, True))
    assert np.mean(later) < -0.01
    assert np.mean(np.array(later) < 0.0) > 0.65
    assert np.mean(at_once) > 0.0  # judged on the day it was trained on, a gain is an accident of that day
    assert np.mean(np.array(at_once) < 0.0) < 0.5

"""Simple models on the same rows, to tell whether the trained one is worth its effort."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from pydantic import BaseModel

from pipeline.evaluation.config import BaselineName
from pipeline.evaluation.metrics import Floats, Quality, format_metric
from pipeline.evaluation.sums import MetricSums
from pipeline.transforms.column import Column

MOST_ROWS = 200_000
"""Most training rows of a baseline. More are thinned evenly."""
MOST_CELLS = 20_000_000
"""Most values, rows times features, in memory."""
FEW_IDS = 200
"""Features with up to this many ids are categories of boosting, of which scikit-learn takes 255."""
SMALLEST_NE = 0.0001
"""A lower NE is not compared as a share."""
MOST_ITERATIONS = 200
"""Of the logistic regression."""
FOLDS = 5
"""Parts of the training rows whose ids are known from the other parts."""
MOST_FOLDS = 16
"""The same, where each knows only earlier ones."""
PRIOR_ROWS = 10.0
"""So many rows with the mean label are added to those of each id."""
FIRST_TREES, MOST_TREES = 20, 2_000
"""Trees of boosting: those by which the time of one is measured, and the most."""
MOST_SECONDS = 60.0
"""Time for them, about."""
NAMES: dict[BaselineName, str] = {
    "rate": "the mean rate",
    "logistic": "logistic regression",
    "boosting": "gradient boosting",
}


class Baseline(BaseModel, frozen=True):
    """Quality of a simple model on the evaluation rows."""

    name: BaselineName
    ne: float | None
    auc: float | None
    logloss: float | None
    rows: int
    """Training rows."""
    seconds: float
    converged: bool = True
    """Whether its fit ended by itself. Otherwise it could be a little better than it is here."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Transformed rows as plain arrays.

    Shapes:
        dense: float32 [N, D]. ids: int64 [N, F], the first id of each list or -1. labels: float64 [N]. weights:
        float64 [N]; None: 1 for all. days: int64 [N], where test rows are later than training rows; None elsewhere.
    """

    dense: np.ndarray
    ids: np.ndarray
    labels: Floats
    weights: Floats | None = None
    days: np.ndarray | None = None

    @staticmethod
    def of(
        dense: np.ndarray, sparse: Sequence[Column], labels: Floats, weights: Floats | None, day: int | None = None
    ) -> "Examples":
        """Returns rows of a plan."""
        ids = np.full((len(dense), len(sparse)), -1, np.int64)
        for number, column in enumerate(sparse):
            assert column.offsets is not None
            starts, held = column.offsets[:-1], np.diff(column.offsets) > 0
            ids[held, number] = column.values[starts[held]]
        return Examples(dense, ids, labels, weights, None if day is None else np.full(len(dense), day))

    @staticmethod
    def concatenate(parts: Sequence["Examples"]) -> "Examples":
        """Returns the rows of all parts."""
        weights, days = (
            None if getattr(parts[0], name) is None else np.concatenate([getattr(one, name) for one in parts])
            for name in ("weights", "days")
        )
        return Examples(
            np.concatenate([one.dense for one in parts]),
            np.concatenate([one.ids for one in parts]),
            np.concatenate([one.labels for one in parts]),
            weights,
            days,
        )

    def __len__(self) -> int:
        return len(self.labels)


Predict = Callable[[Examples], Floats]
"""Rows -> the probability of label 1 of each."""


def sample_step(rows: int, features: int) -> int:
    """Returns n where every nth training row is taken.

    Example:
        >>> sample_step(1_000, 30), sample_step(1_000_000, 30), sample_step(1_000_000, 1_000)
        (1, 5, 50)
    """
    return max(1, -(-rows // max(1, min(MOST_ROWS, MOST_CELLS // max(1, features)))))


def compare_baselines(
    names: Sequence[BaselineName],
    train: Examples,
    test: Callable[[], Iterable[Examples]],
    seed: int,
    valid: Examples | None = None,
) -> list[Baseline]:
    """Trains simple models and evaluates them.

    Args:
        train: Training rows, in memory.
        test: Reads the evaluation rows part by part.
        valid: Rows by which a fit decides when to stop. None: it takes some of the training rows.
    """
    fitted: list[tuple[BaselineName, Predict, float, bool]] = []
    for name in names:
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as said:  # a page of advice to those who fit by hand
            warnings.simplefilter("always")
            predict = FITS[name](train, seed, valid)
        limits = [one for one in said if one.category.__name__ == "ConvergenceWarning"]
        fitted.append((name, predict, time.monotonic() - began, not limits))
        for one in said:
            if one not in limits:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    sums = [MetricSums() for _ in fitted]
    for part in filter(len, test()):
        for (_, predict, *_), total in zip(fitted, sums, strict=True):
            total.add(part.labels, predict(part), weights=part.weights)
    found = []
    for (name, _, seconds, converged), total in zip(fitted, sums, strict=True):
        quality = total.quality()
        numbers = {key: getattr(quality, key) for key in ("ne", "auc", "logloss")}
        found.append(Baseline(name=name, **numbers, rows=len(train), seconds=seconds, converged=converged))
    return found


def describe_comparison(quality: Quality, baselines: Sequence[Baseline]) -> str | None:
    """Says in a sentence whether a model beats the best baseline, and by how much. None: there is nothing to compare.

    Example:
        >>> from pipeline.evaluation.metrics import Quality
        >>> boosting = Baseline(name="boosting", ne=0.9, auc=0.7, logloss=0.5, rows=10, seconds=1.0)
        >>> describe_comparison(Quality.model_construct(ne=0.81, auc=0.75), [boosting])
        'Better than gradient boosting: NE 0.8100 against 0.9000, 10.0 % lower; AUC 0.7500 against 0.7000.'
    """
    known = [one for one in baselines if one.ne is not None]
    if not known or quality.ne is None:
        return None
    best = min(known, key=lambda one: one.ne or 0.0)
    assert best.ne is not None
    ours, theirs = format_metric(quality.ne), format_metric(best.ne)
    if ours == theirs:
        line = f"As good as {NAMES[best.name]}: NE {ours} both"
    else:
        word, side = ("Better", "lower") if quality.ne < best.ne else ("Worse", "higher")
        line = f"{word} than {NAMES[best.name]}: NE {ours} against {theirs}"
        if min(quality.ne, best.ne) >= SMALLEST_NE:
            line += f", {abs(quality.ne / best.ne - 1.0):.1%} {side}".replace("%", " %")
    return f"{line}; AUC {format_metric(quality.auc)} against {format_metric(best.auc)}."


def loses(quality: Quality, baselines: Sequence[Baseline]) -> bool:
    """Whether a baseline has a lower NE."""
    return any(one.ne is not None and quality.ne is not None and one.ne <= quality.ne for one in baselines)


def _fit_rate(train: Examples, seed: int, valid: Examples | None) -> Predict:
    rate = float(np.average(train.labels, weights=train.weights))
    return lambda rows: np.full(len(rows), rate)


def _fit_logistic(train: Examples, seed: int, valid: Examples | None) -> Predict:
    """Numbers on one scale, each id as a column of its own."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import OneHotEncoder

    encoder = OneHotEncoder(handle_unknown="ignore", dtype=np.float32).fit(train.ids)

    mean, deviation = train.dense.mean(axis=0), train.dense.std(axis=0)
    scale = np.where(deviation > 0.0, deviation, 1.0)

    def features(rows: Examples) -> Any:
        return hstack([csr_matrix((rows.dense - mean) / scale), encoder.transform(rows.ids)], format="csr")

    model = LogisticRegression(C=1.0, max_iter=MOST_ITERATIONS)
    model.fit(features(train), train.labels, sample_weight=train.weights)
    return lambda rows: model.predict_proba(features(rows))[:, 1]


@dataclass(frozen=True, eq=False)
class KnownIds:
    """What the training rows say of each id of a feature.

    Shapes:
        ids: int64 [K], in order. codes: int64 [N], the place of each training row's id. rows, hits: float64 [K],
        weights of all rows and of those with label 1.
    """

    ids: np.ndarray
    codes: np.ndarray
    rows: Floats
    hits: Floats
    rate: float
    """Mean label of all training rows."""

    @staticmethod
    def count(ids: np.ndarray, labels: Floats, weights: Floats | None) -> "KnownIds":
        """Counts the ids of training rows."""
        distinct, codes = np.unique(ids, return_inverse=True)
        own = np.ones(len(labels)) if weights is None else weights
        rows, hits = (np.bincount(codes, values).astype(np.float64) for values in (own, own * labels))
        return KnownIds(distinct, codes, rows, hits, float(hits.sum() / rows.sum()))

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Returns what is known of the ids of other rows: float64 [N, 3], code, rows and mean label."""
        found = _find(self.ids, ids)
        rows, hits = (np.where(found < 0, 0.0, values[found]) for values in (self.rows, self.hits))
        return self._columns(np.where(found < 0, np.nan, found), rows, hits)

    def others(self, labels: Floats, weights: Floats | None, folds: np.ndarray, past: bool) -> np.ndarray:
        """Returns the same for the training rows, of rows of other folds.

        Args:
            folds: int64 [N], the fold of each row.
            past: Of earlier folds alone.
        """
        count = int(folds.max()) + 1
        cell, shape = self.codes * count + folds, (len(self.ids), count)
        own = np.ones(len(labels)) if weights is None else weights
        known = []
        for values, of_all in ((own, self.rows), (own * labels, self.hits)):
            cells = np.bincount(cell, values, shape[0] * shape[1]).reshape(shape)
            left = np.cumsum(cells, axis=1) - cells if past else of_all[:, None] - cells
            known.append(left.ravel()[cell])
        return self._columns(self.codes, *known)

    def _columns(self, codes: np.ndarray, rows: Floats, hits: Floats) -> np.ndarray:
        return np.stack([codes, rows, (hits + PRIOR_ROWS * self.rate) / (rows + PRIOR_ROWS)], axis=1)


def _find(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns where each wanted value is in an ordered array, or -1."""
    place = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return np.where(values[place] == wanted, place, -1)


def _folds(train: Examples, seed: int) -> tuple[np.ndarray, bool]:
    """Returns the fold of each training row, int64 [N], and whether a fold may know only earlier ones.

    Where later rows test, folds are days in order, joined to at most `MOST_FOLDS`. Otherwise they are random.
    """
    if train.days is None or len(np.unique(train.days)) < FOLDS:
        return np.random.default_rng([seed, FOLDS]).integers(0, FOLDS, len(train)), False
    _, ranks, rows = np.unique(train.days, return_inverse=True, return_counts=True)
    before = np.cumsum(rows) - rows
    return (before * MOST_FOLDS // len(train))[ranks], True


def _fit_boosting(train: Examples, seed: int, valid: Examples | None) -> Predict:
    """Numbers as they are, few ids as categories, many by their code, their rows and their mean label.

    The validation rows, or else a tenth of the training rows, decide when it stops.

    Raises:
        ConvergenceWarning: As a warning, if the time or the trees ran out before.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.exceptions import ConvergenceWarning

    counted = [KnownIds.count(column, train.labels, train.weights) for column in train.ids.T]
    order = sorted(range(len(counted)), key=lambda number: len(counted[number].ids) <= FEW_IDS)  # categories are last
    known = [counted[number] for number in order]
    few = sum(len(one.ids) <= FEW_IDS for one in known)
    folds, past = _folds(train, seed)

    def join(rows: Examples, told: Iterable[np.ndarray]) -> np.ndarray:
        parts = [part if len(one.ids) > FEW_IDS else part[:, :1] for one, part in zip(known, told, strict=True)]
        return np.concatenate([rows.dense, *parts], axis=1, dtype=np.float32)

    def features(rows: Examples) -> np.ndarray:
        return join(rows, (one.of(rows.ids[:, number]) for one, number in zip(known, order, strict=True)))

    columns = join(train, (one.others(train.labels, train.weights, folds, past) for one in known))
    more: dict[str, Any] = {}
    if valid is not None and 0.0 < valid.labels.mean() < 1.0:
        more = {"X_val": features(valid), "y_val": valid.labels, "sample_weight_val": valid.weights}
    model = HistGradientBoostingClassifier(
        max_iter=FIRST_TREES, learning_rate=0.05, early_stopping=True, n_iter_no_change=30, random_state=seed,
        categorical_features=list(range(columns.shape[1] - few, columns.shape[1])) or None, warm_start=True,
    )  # fmt: skip
    began = time.monotonic()
    model.fit(columns, train.labels, sample_weight=train.weights, **more)
    a_tree = (time.monotonic() - began) / FIRST_TREES
    model.max_iter = int(min(MOST_TREES, max(FIRST_TREES, MOST_SECONDS / a_tree)))
    model.fit(columns, train.labels, sample_weight=train.weights, **more)
    if model.n_iter_ >= model.max_iter:
        warnings.warn(f"{model.n_iter_} trees", ConvergenceWarning, stacklevel=2)
    best = max(1, int(np.argmax(model.validation_score_)))  # the first score is that of no tree

    def predict(rows: Examples) -> Floats:
        stages = model.staged_predict_proba(features(rows))
        return np.asarray(next(islice(stages, best - 1, None))[:, 1], np.float64)

    return predict


FITS: dict[BaselineName, Callable[[Examples, int, Examples | None], Predict]] = {
    "rate": _fit_rate,
    "logistic": _fit_logistic,
    "boosting": _fit_boosting,
}

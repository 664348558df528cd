"""Simple models on the same rows, to tell whether the trained one is worth its effort."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
        float64 [N]; None: 1 for all.
    """

    dense: np.ndarray
    ids: np.ndarray
    labels: Floats
    weights: Floats | None = None

    @staticmethod
    def of(dense: np.ndarray, sparse: Sequence[Column], labels: Floats, weights: Floats | None) -> "Examples":
        """Returns rows of a plan."""
        ids = np.full((len(dense), len(sparse)), -1, np.int64)
        for number, column in enumerate(sparse):
            assert column.offsets is not None
            starts, held = column.offsets[:-1], np.diff(column.offsets) > 0
            ids[held, number] = column.values[starts[held]]
        return Examples(dense, ids, labels, weights)

    @staticmethod
    def concatenate(parts: Sequence["Examples"]) -> "Examples":
        """Returns the rows of all parts."""
        weights = None if parts[0].weights is None else np.concatenate([one.weights for one in parts])
        return Examples(
            np.concatenate([one.dense for one in parts]),
            np.concatenate([one.ids for one in parts]),
            np.concatenate([one.labels for one in parts]),
            weights,
        )

    def __len__(self) -> int:
        return len(self.labels)


def sample_step(rows: int, features: int) -> int:
    """Returns n where every nth training row is taken.

    Example:
        >>> sample_step(1_000, 30), sample_step(1_000_000, 30), sample_step(1_000_000, 1_000)
        (1, 5, 50)
    """
    return max(1, -(-rows // max(1, min(MOST_ROWS, MOST_CELLS // max(1, features)))))


def compare_baselines(
    names: Sequence[BaselineName], train: Examples, test: Callable[[], Iterable[Examples]], seed: int
) -> list[Baseline]:
    """Trains simple models and evaluates them.

    Args:
        train: Training rows, in memory.
        test: Reads the evaluation rows part by part.
    """
    fitted: list[tuple[BaselineName, Callable[[Examples], Floats], float, bool]] = []
    for name in names:
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as said:  # a page of advice to those who fit by hand
            warnings.simplefilter("always")
            predict = FITS[name](train, seed)
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


def _fit_rate(train: Examples, seed: int) -> Callable[[Examples], Floats]:
    rate = float(np.average(train.labels, weights=train.weights))
    return lambda rows: np.full(len(rows), rate)


def _fit_logistic(train: Examples, seed: int) -> Callable[[Examples], Floats]:
    """Numbers as they are, each id as a column of its own."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import OneHotEncoder

    encoder = OneHotEncoder(handle_unknown="ignore", dtype=np.float32).fit(train.ids)

    def features(rows: Examples) -> Any:
        return hstack([csr_matrix(rows.dense), encoder.transform(rows.ids)], format="csr")

    model = LogisticRegression(C=1.0, max_iter=MOST_ITERATIONS)
    model.fit(features(train), train.labels, sample_weight=train.weights)
    return lambda rows: model.predict_proba(features(rows))[:, 1]


def _fit_boosting(train: Examples, seed: int) -> Callable[[Examples], Floats]:
    """Numbers as they are, few ids as categories, many as the mean label of their other training rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import StratifiedKFold
    from sklearn.preprocessing import OrdinalEncoder, TargetEncoder

    many = [number for number in range(train.ids.shape[1]) if len(np.unique(train.ids[:, number])) > FEW_IDS]
    few = [number for number in range(train.ids.shape[1]) if number not in many]
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    means = TargetEncoder(target_type="binary", cv=folds) if many else None
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1) if few else None

    def features(rows: Examples, fit: bool) -> np.ndarray:
        parts = [rows.dense]
        if means is not None:
            ids = rows.ids[:, many]
            parts.append(means.fit_transform(ids, rows.labels) if fit else means.transform(ids))
        if codes is not None:
            ids = rows.ids[:, few]
            parts.append(codes.fit_transform(ids) if fit else codes.transform(ids))
        return np.concatenate(parts, axis=1, dtype=np.float32)

    columns = features(train, fit=True)
    model = HistGradientBoostingClassifier(
        max_iter=500, learning_rate=0.1, early_stopping=True, n_iter_no_change=10, random_state=seed,
        categorical_features=list(range(columns.shape[1] - len(few), columns.shape[1])) or None,
    )  # fmt: skip
    model.fit(columns, train.labels, sample_weight=train.weights)
    return lambda rows: model.predict_proba(features(rows, fit=False))[:, 1]


FITS: dict[BaselineName, Callable[[Examples, int], Callable[[Examples], Floats]]] = {
    "rate": _fit_rate,
    "logistic": _fit_logistic,
    "boosting": _fit_boosting,
}

"""Evaluates rows in memory at once."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.evaluate import Evaluation, ScoredRows
from pipeline.evaluation.metrics import Quality
from pipeline.evaluation.sums import MetricSums
from storage.reader import DAY


def quality(labels: npt.ArrayLike, probabilities: npt.ArrayLike) -> Quality:
    """Returns all metrics of rows."""
    sums = MetricSums()
    sums.add(np.asarray(labels, np.float64), np.asarray(probabilities, np.float64))
    return sums.quality()


def evaluate(parts: Iterable[ScoredRows], config: EvaluationConfig, units: str = DAY) -> Evaluation:
    """Returns the sums of all parts."""
    evaluation = Evaluation(config, units)
    for part in parts:
        evaluation.add(part)
    return evaluation

"""Scored rows -> EvalReport: overall, per slice, and beside the best that could be reached where that is known."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, PositiveInt

from pipeline.errors import EmptyDatasetError
from pipeline.evaluation.metrics import Bin, Quality, bins, quality


class EvaluationConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What a model is judged by."""

    slices: tuple[str, ...] = ()
    """Columns whose values part the rows into slices."""
    slice_values: PositiveInt = 12
    """Most frequent values shown of a slice column."""
    true_probability: str | None = None
    """Column with the true probability of the label, where the data has one: its NE is the floor of every model."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Predictions beside the labels they are for.

    Shapes:
        labels, probabilities: float64 [N]. extra: table of N rows with the slice columns, and what the gate
        resamples by. champion: float64 [N], the champion's probabilities, where there is one.
    """

    labels: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]
    extra: pa.Table
    champion: npt.NDArray[np.float64] | None = None


class Slice(BaseModel, frozen=True):
    """Rows with one value of a column."""

    column: str
    value: str
    quality: Quality


class EvalReport(BaseModel, frozen=True):
    """Quality on the evaluation rows."""

    overall: Quality
    slices: tuple[Slice, ...]
    calibration: tuple[Bin, ...]
    """Rows in bins of equally many, for the calibration plot."""
    roc: tuple[tuple[float, float], ...]
    """(false positive rate, true positive rate) points."""
    ne_floor: float | None
    """NE of the true probabilities on the same rows."""

    @property
    def learned_share(self) -> float | None:
        """(1 - NE) / (1 - floor): how much of what can be learned was."""
        if self.ne_floor is None or self.overall.ne is None:
            return None
        return (1.0 - self.overall.ne) / (1.0 - self.ne_floor)


def evaluate(parts: Iterable[Scored], config: EvaluationConfig) -> EvalReport:
    """Judges all parts together.

    Raises:
        EmptyDatasetError: If there is no row.
    """
    parts = list(parts)
    if not parts or not sum(len(part.labels) for part in parts):
        raise EmptyDatasetError("evaluation rows", "at least one", "none", "Check split and filter.")
    labels = np.concatenate([part.labels for part in parts])
    probabilities = np.concatenate([part.probabilities for part in parts])
    extra = pa.concat_tables([part.extra for part in parts])
    floor = None
    if config.true_probability is not None:
        floor = quality(labels, extra.column(config.true_probability).to_numpy()).ne
    return EvalReport(
        overall=quality(labels, probabilities),
        slices=tuple(
            found for column in config.slices for found in _slices(column, extra, labels, probabilities, config)
        ),
        calibration=tuple(bins(labels, probabilities, equal_rows=True, count=20)),
        roc=tuple(_roc(labels, probabilities)),
        ne_floor=floor,
    )


def _slices(
    column: str,
    extra: pa.Table,
    labels: npt.NDArray[np.float64],
    probabilities: npt.NDArray[np.float64],
    config: EvaluationConfig,
) -> list[Slice]:
    found = sorted(members(extra, column), key=lambda member: -len(member[1]))[: config.slice_values]
    return [
        Slice(column=column, value=value, quality=quality(labels[rows], probabilities[rows])) for value, rows in found
    ]


def members(extra: pa.Table, column: str) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Each value of a column, in order of appearance, with the rows that have it."""
    encoded = pc.dictionary_encode(extra.column(column).combine_chunks(), null_encoding="encode")
    codes = encoded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(encoded.dictionary)))
    for value, rows in zip(encoded.dictionary, np.split(order, ends[:-1]), strict=True):
        yield str(value.as_py()), rows


def _roc(
    labels: npt.NDArray[np.float64], probabilities: npt.NDArray[np.float64], points: int = 200
) -> list[tuple[float, float]]:
    positives = labels.sum()
    if not 0 < positives < len(labels):
        return []
    hits = np.cumsum(labels[np.argsort(-probabilities, kind="stable")])
    chosen = np.unique(np.linspace(0, len(labels) - 1, points).astype(np.int64))
    return [(0.0, 0.0)] + [
        (float((i + 1 - hits[i]) / (len(labels) - positives)), float(hits[i] / positives)) for i in chosen
    ]

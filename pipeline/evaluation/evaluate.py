"""Scored rows -> EvalReport: overall, per slice, and against the best possible NE where that is known."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Self

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from pipeline.errors import EmptyDatasetError
from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.grouped import GroupedAuc, GroupedPredictions
from pipeline.evaluation.metrics import Bin, Floats, Integers, Quality, curves, equal_bins, losses
from pipeline.evaluation.sums import (
    COARSE_BINS,
    MOST_VALUES,
    CalibrationSums,
    Members,
    MetricSums,
    PairedSums,
    unit_groups,
)
from storage.config import DAY


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Predictions and labels of rows.

    Shapes:
        labels, probabilities: float64 [N]. extra: table of N rows with the slice columns and the gate's resampling
        column. champion: float64 [N], the champion's probabilities, if there is one. exact: float64 [N], probabilities
        of the model before its tables were rounded, if they were. weights: float64 [N]. None: 1 for all.
    """

    labels: Floats
    probabilities: Floats
    extra: pa.Table
    champion: Floats | None = None
    exact: Floats | None = None
    weights: Floats | None = None


class Slice(BaseModel, frozen=True):
    """Rows with one value of a column."""

    column: str
    value: str
    quality: Quality
    ne_low: float | None
    ne_high: float | None
    small: bool
    """Whether it has too few rows for reliable metrics."""


class EvalReport(BaseModel, frozen=True):
    """Quality on the evaluation rows."""

    overall: Quality
    slices: tuple[Slice, ...]
    calibration: tuple[Bin, ...]
    """Bins of about equally many rows, for the calibration plot."""
    roc: tuple[tuple[float, float], ...]
    """(false positive rate, true positive rate) points."""
    precision_recall: tuple[tuple[float, float], ...]
    """(recall, precision) points."""
    ne_floor: float | None
    """NE of the true probabilities on the same rows."""
    ne_exact: float | None
    """NE of the model before its tables were rounded, if they were."""
    grouped: GroupedAuc | None
    """GAUC, if a column to group by is configured."""
    notes: Mapping[str, str] = {}
    """Slice column -> why it has no slices."""
    ne_low: float | None = None
    """Bounds of the interval of NE over all rows, as independent draws. None: undefined."""
    ne_high: float | None = None

    @property
    def rounding_cost(self) -> float | None:
        """NE lost by rounding the tables."""
        known = self.ne_exact is not None and self.overall.ne is not None
        return self.overall.ne - self.ne_exact if known else None  # type: ignore[operator]

    @property
    def numbers(self) -> dict[str, float | None]:
        """All metrics over all rows, by name."""
        return self.overall.model_dump(exclude={"undefined"}) | {
            "ne_floor": self.ne_floor,
            "learned_share": self.learned_share,
            "ne_fp32": self.ne_exact,
            "gauc": None if self.grouped is None else self.grouped.gauc,
        }

    @property
    def learned_share(self) -> float | None:
        """(1 - NE) / (1 - floor): the learned share of what can be learned."""
        if self.ne_floor is None or self.overall.ne is None or self.ne_floor == 1.0:
            return None
        return (1.0 - self.overall.ne) / (1.0 - self.ne_floor)


class SliceSums:
    """Sums by the values of one column."""

    def __init__(self) -> None:
        self.members = Members()
        self.metrics, self.pairs = MetricSums(0, COARSE_BINS), PairedSums(0)

    def add(self, part: ScoredRows, column: str, difference: Floats | None, units: Integers) -> None:
        """Adds rows."""
        members = self.members.encode(part.extra.column(column))
        self._make_room()
        if members is not None:
            self.metrics.add(part.labels, part.probabilities, members, part.weights)
            if difference is not None:
                self.pairs.add(part.labels, difference, units, members, part.weights)

    def merge(self, other: Self) -> None:
        """Adds the sums of other rows."""
        names = None if other.members.codes is None else list(other.members.codes)
        at = None if names is None else self.members.number(names)
        if names is None:
            self.members.codes = None
        self._make_room()
        if at is not None:
            self.metrics.merge(other.metrics, at)
            self.pairs.merge(other.pairs, at)

    def _make_room(self) -> None:
        wanted = 0 if self.members.codes is None else len(self.members.codes)
        if wanted > len(self.metrics.sums):
            room = min(2 * wanted, MOST_VALUES)
            self.metrics.grow(room)
            self.pairs.grow(room)
        elif self.members.codes is None:
            self.metrics, self.pairs = MetricSums(0, COARSE_BINS), PairedSums(0)


class Evaluation:
    """All sums over the rows so far, in memory that does not grow with the rows.

    `pairs` has the differences of the losses of model and champion, or the model's losses where there is no champion.

    Args:
        units: Column that the gate resamples by. Its values are put into groups.
        folder: Holds the predictions until they are grouped for GAUC.
    """

    def __init__(self, config: EvaluationConfig, units: str = DAY, folder: Path | None = None) -> None:
        self.config, self.units = config, units
        self.model, self.champion, self.exact = (MetricSums() for _ in range(3))
        self.truth = None if config.true_probability is None else MetricSums()
        self.pairs, self.calibrations = PairedSums(), CalibrationSums()
        self.slices = {column: SliceSums() for column in config.slices}
        self.grouped = None if config.group_by is None or folder is None else GroupedPredictions(folder)

    def add(self, part: ScoredRows) -> None:
        """Adds scored rows."""
        labels, weights = part.labels, part.weights
        self.model.add(labels, part.probabilities, weights=weights)
        if self.truth is not None and self.config.true_probability is not None:
            truth = part.extra.column(self.config.true_probability).cast(pa.float64()).to_numpy()
            self.truth.add(labels, truth, weights=weights)
        if part.exact is not None:
            self.exact.add(labels, part.exact, weights=weights)
        known = self.units in part.extra.column_names
        units = unit_groups(part.extra.column(self.units)) if known else np.zeros(len(labels), np.int64)
        loss, difference = losses(labels, part.probabilities), None
        if part.champion is not None:
            self.champion.add(labels, part.champion, weights=weights)
            difference = np.nan_to_num(loss - losses(labels, part.champion))
        self.pairs.add(labels, np.nan_to_num(loss) if difference is None else difference, units, weights=weights)
        self.calibrations.add(labels, part.probabilities, part.champion, units, weights)
        for column, sliced in self.slices.items():
            sliced.add(part, column, difference, units)
        if self.grouped is not None and self.config.group_by is not None:
            self.grouped.add(part.extra.column(self.config.group_by), labels, part.probabilities, weights)

    def close(self) -> None:
        """Closes the open file. The evaluation can then be sent to another process."""
        if self.grouped is not None:
            self.grouped.close()

    def merge(self, other: Self) -> None:
        """Adds the sums of another evaluation. Its files, if any, lie in the same folder already."""
        self.model.merge(other.model)
        self.champion.merge(other.champion)
        self.exact.merge(other.exact)
        if self.truth is not None and other.truth is not None:
            self.truth.merge(other.truth)
        self.pairs.merge(other.pairs)
        self.calibrations.merge(other.calibrations)
        for column, sliced in self.slices.items():
            sliced.merge(other.slices[column])

    def report(self) -> EvalReport:
        """Computes all metrics.

        Raises:
            EmptyDatasetError: If there was no row.
        """
        overall = self.model.quality()
        if overall.rows == 0:
            raise EmptyDatasetError("evaluation rows", "at least one", "none", "Check split and filter.")
        by_log_odds = self.model.by_log_odds[0]
        roc, precision_recall = ([], []) if overall.auc is None else curves(self.model.ranked.of(0))
        too_many = f"more than {MOST_VALUES:,} values"
        low, high = self._bounds(overall.ne, self.model.ne_error())
        return EvalReport(
            ne_low=low,
            ne_high=high,
            overall=overall,
            slices=tuple(found for column in self.slices for found in self._slices(column)),
            calibration=tuple(equal_bins(by_log_odds, self.model.predicted[0])),
            roc=tuple(roc),
            precision_recall=tuple(precision_recall),
            ne_floor=None if self.truth is None else self.truth.quality().ne,
            ne_exact=self.exact.quality().ne,
            grouped=None if self.grouped is None else self.grouped.auc(),
            notes={column: too_many for column, sliced in self.slices.items() if sliced.members.codes is None},
        )

    def _bounds(self, ne: float | None, error: float | None) -> tuple[float | None, float | None]:
        """Returns the interval of an NE with this standard error."""
        if ne is None or error is None:
            return None, None
        margin = NormalDist().inv_cdf(1.0 - self.config.level / 2.0) * error
        return ne - margin, ne + margin

    def _slices(self, column: str) -> Iterable[Slice]:
        """Yields the most frequent values, in the order of their names where equally frequent."""
        sliced, config = self.slices[column], self.config
        rows = sliced.metrics.rows
        ranked = sorted((sliced.members.codes or {}).items(), key=lambda item: (-rows[item[1]], item[0]))
        for value, member in ranked[: config.slice_values]:
            quality = sliced.metrics.quality(member)
            low, high = self._bounds(quality.ne, sliced.metrics.ne_error(member))
            small = quality.rows < config.small_slice_rows
            yield Slice(column=column, value=value, quality=quality, ne_low=low, ne_high=high, small=small)


class OrderedMerge:
    """Merges evaluations by their number, whatever order they arrive in.

    Sums of floats depend on their order. Here the order is that of the numbers, and so are the bits.

    Args:
        whole: Takes the sums of all.
    """

    def __init__(self, whole: Evaluation) -> None:
        self.whole = whole
        self.waiting: dict[int, Evaluation] = {}
        self.next = 0

    def add(self, number: int, part: Evaluation) -> None:
        """Merges a part once all parts with smaller numbers are merged."""
        self.waiting[number] = part
        while self.next in self.waiting:
            self.whole.merge(self.waiting.pop(self.next))
            self.next += 1

"""Scored rows -> EvalReport: overall, per slice, and beside the best that could be reached where that is known."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel
from scipy.special import ndtri  # type: ignore[import-untyped]

from pipeline.errors import EmptyDatasetError
from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.grouped import Grouped, GroupedAuc
from pipeline.evaluation.metrics import Bin, Quality, curves, equal_bins, losses
from pipeline.evaluation.sums import COARSE_BINS, MOST_VALUES, Members, Pairs, Tally, unit_groups
from storage.reader import DAY


@dataclass(frozen=True, eq=False)
class Scored:
    """Predictions beside the labels they are for.

    Shapes:
        labels, probabilities: float64 [N]. extra: table of N rows with the slice columns, and what the gate
        resamples by. champion: float64 [N], the champion's probabilities, where there is one. exact: float64 [N],
        those of the model before its tables were rounded, where they were. weights: float64 [N], where rows have some.
    """

    labels: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]
    extra: pa.Table
    champion: npt.NDArray[np.float64] | None = None
    exact: npt.NDArray[np.float64] | None = None
    weights: npt.NDArray[np.float64] | None = None


class Slice(BaseModel, frozen=True):
    """Rows with one value of a column."""

    column: str
    value: str
    quality: Quality
    ne_low: float | None
    ne_high: float | None
    small: bool
    """Whether its rows are too few to say much."""


class EvalReport(BaseModel, frozen=True):
    """Quality on the evaluation rows."""

    overall: Quality
    slices: tuple[Slice, ...]
    calibration: tuple[Bin, ...]
    """Rows in bins of about equally many, for the calibration plot."""
    roc: tuple[tuple[float, float], ...]
    """(false positive rate, true positive rate) points."""
    precision_recall: tuple[tuple[float, float], ...]
    """(recall, precision) points."""
    ne_floor: float | None
    """NE of the true probabilities on the same rows."""
    ne_exact: float | None
    """NE of the model before its tables were rounded, where they were."""
    grouped: GroupedAuc | None
    """GAUC, where a column to group by is named."""
    notes: Mapping[str, str] = {}
    """Slice column -> why it has no slices."""

    @property
    def rounding_cost(self) -> float | None:
        """NE lost by rounding the tables."""
        known = self.ne_exact is not None and self.overall.ne is not None
        return self.overall.ne - self.ne_exact if known else None  # type: ignore[operator]

    @property
    def numbers(self) -> dict[str, float | None]:
        """Every figure of all rows together, by name."""
        return self.overall.model_dump(exclude={"undefined"}) | {
            "ne_floor": self.ne_floor,
            "learned_share": self.learned_share,
            "ne_fp32": self.ne_exact,
            "gauc": None if self.grouped is None else self.grouped.gauc,
        }

    @property
    def learned_share(self) -> float | None:
        """(1 - NE) / (1 - floor): how much of what can be learned was."""
        if self.ne_floor is None or self.overall.ne is None:
            return None
        return (1.0 - self.overall.ne) / (1.0 - self.ne_floor)


class Sliced:
    """Sums by the values of one column."""

    def __init__(self, weighted: bool = False) -> None:
        self.members = Members()
        self.weighted = weighted
        self.tally, self.pairs = self._nothing()

    def add(
        self, part: Scored, column: str, apart: npt.NDArray[np.float64] | None, units: npt.NDArray[np.int64]
    ) -> None:
        """Takes rows in."""
        members = self.members.number(part.extra.column(column))
        self._make_room()
        if members is not None:
            self.tally.add(part.labels, part.probabilities, members, part.weights)
            if apart is not None:
                self.pairs.add(part.labels, apart, units, members, part.weights)

    def merge(self, other: Self) -> None:
        """Takes the rows of another one in."""
        names = None if other.members.codes is None else list(other.members.codes)
        at = None if names is None else self.members.numbered(names)
        if names is None:
            self.members.codes = None
        self._make_room()
        if at is not None:
            self.tally.merge(other.tally, at)
            self.pairs.merge(other.pairs, at)

    def _make_room(self) -> None:
        wanted = 0 if self.members.codes is None else len(self.members.codes)
        if wanted > len(self.tally.sums):
            room = min(2 * wanted, MOST_VALUES)
            self.tally.grow(room)
            self.pairs.grow(room)
        elif self.members.codes is None:
            self.tally, self.pairs = self._nothing()

    def _nothing(self) -> tuple[Tally, Pairs]:
        return Tally(0, COARSE_BINS, self.weighted), Pairs(0, self.weighted)


class Evaluation:
    """Everything that is known of the rows so far, in memory that does not grow with them.

    Two that have seen some rows each, in processes of their own, merge to what one that has seen all would be, bit
    for bit.

    Args:
        units: Column that the gate resamples by; units are put into groups.
        folder: Predictions are kept here until they are grouped for GAUC.
        weighted: Whether rows have weights; then all of them do.
    """

    def __init__(
        self, config: EvaluationConfig, units: str = DAY, folder: Path | None = None, weighted: bool = False
    ) -> None:
        self.config, self.units = config, units
        self.model, self.champion, self.exact = (Tally(weighted=weighted) for _ in range(3))
        self.truth = None if config.true_probability is None else Tally(weighted=weighted)
        self.pairs = Pairs(weighted=weighted)
        self.slices = {column: Sliced(weighted) for column in config.slices}
        self.grouped = None if config.group_by is None or folder is None else Grouped(folder)

    def add(self, part: Scored) -> None:
        """Takes scored rows in."""
        labels, weights = part.labels, part.weights
        self.model.add(labels, part.probabilities, weights=weights)
        if self.truth is not None and self.config.true_probability is not None:
            truth = part.extra.column(self.config.true_probability).cast(pa.float64()).to_numpy()
            self.truth.add(labels, truth, weights=weights)
        if part.exact is not None:
            self.exact.add(labels, part.exact, weights=weights)
        apart, units = None, np.zeros(len(labels), np.int64)
        if part.champion is not None:
            self.champion.add(labels, part.champion, weights=weights)
            apart = np.nan_to_num(losses(labels, part.probabilities) - losses(labels, part.champion))
            units = unit_groups(part.extra.column(self.units)) if self.units in part.extra.column_names else units
            self.pairs.add(labels, apart, units, weights=weights)
        for column, sliced in self.slices.items():
            sliced.add(part, column, apart, units)
        if self.grouped is not None and self.config.group_by is not None:
            self.grouped.add(part.extra.column(self.config.group_by), labels, part.probabilities, weights)

    def close(self) -> None:
        """Ends what is open: it can then be sent to another process."""
        if self.grouped is not None:
            self.grouped.close()

    def merge(self, other: Self) -> None:
        """Takes the rows of another evaluation in; its files, if any, lie in the same folder already."""
        self.model.merge(other.model)
        self.champion.merge(other.champion)
        self.exact.merge(other.exact)
        if self.truth is not None and other.truth is not None:
            self.truth.merge(other.truth)
        self.pairs.merge(other.pairs)
        for column, sliced in self.slices.items():
            sliced.merge(other.slices[column])

    def report(self) -> EvalReport:
        """What the rows say of the model.

        Raises:
            EmptyDatasetError: If there was no row.
        """
        overall = self.model.quality()
        if overall.rows == 0:
            raise EmptyDatasetError("evaluation rows", "at least one", "none", "Check split and filter.")
        roc, precision_recall = ([], []) if overall.auc is None else curves(self.model.binned())
        too_many = f"more than {MOST_VALUES:,} values"
        return EvalReport(
            overall=overall,
            slices=tuple(found for column in self.slices for found in self._slices(column)),
            calibration=tuple(equal_bins(self.model.binned(), self.model.predicted[0])),
            roc=tuple(roc),
            precision_recall=tuple(precision_recall),
            ne_floor=None if self.truth is None else self.truth.quality().ne,
            ne_exact=self.exact.quality().ne,
            grouped=None if self.grouped is None else self.grouped.auc(),
            notes={column: too_many for column, sliced in self.slices.items() if sliced.members.codes is None},
        )

    def _slices(self, column: str) -> Iterable[Slice]:
        """The most frequent values, the first by name among equals."""
        sliced, config = self.slices[column], self.config
        rows = sliced.tally.sums[:, 0] + sliced.tally.sums[:, 2]
        ranked = sorted((sliced.members.codes or {}).items(), key=lambda item: (-rows[item[1]], item[0]))
        reach = float(ndtri(1.0 - config.level / 2.0))
        for value, member in ranked[: config.slice_values]:
            quality, error = sliced.tally.quality(member), sliced.tally.ne_error(member)
            known = quality.ne is not None and error is not None
            yield Slice(
                column=column,
                value=value,
                quality=quality,
                ne_low=quality.ne - reach * error if known else None,  # type: ignore[operator]
                ne_high=quality.ne + reach * error if known else None,  # type: ignore[operator]
                small=quality.rows < config.small_slice_rows,
            )

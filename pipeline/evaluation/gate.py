"""Challenger against champion on the same rows -> promote, hold or reject, with the reason."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from scipy.stats import t as student  # type: ignore[import-untyped]

from pipeline.errors import ConfigError
from pipeline.evaluation.evaluate import EvalReport, Scored, members
from pipeline.evaluation.metrics import Floats, Quality, base_entropy, losses, quality
from storage.reader import DAY

ENOUGH_DAYS = 20
"""From so many days on, days are what differs by chance: rows of a day have much in common."""
FEWEST_UNITS = 5
"""With fewer of them an interval says nothing."""


class GateConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When a new version takes the champion's place."""

    resample_by: str | None = None
    """What is drawn by chance: `row`, `day`, or a column such as the user's id. None: day from 20 days on, else row."""
    level: float = Field(0.05, gt=0.0, lt=0.5)
    """How often two models of equal quality may be called different."""
    least_gain: NonNegativeFloat = 0.0
    """Share of the champion's NE by which the challenger's must be lower, such as 0.001."""
    calibration_low: PositiveFloat = 0.8
    """A challenger below is rejected, unless the champion is further off."""
    calibration_high: PositiveFloat = 1.25
    slice_rows: PositiveInt = 1_000
    """Slices of fewer rows decide nothing."""
    slice_loss: NonNegativeFloat = 0.01
    """Share of a slice's NE that may be lost there; more, and beyond chance, rejects."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.calibration_low >= self.calibration_high:
            raise ConfigError(
                "gate.calibration_low", f"less than calibration_high, {self.calibration_high}",
                f"{self.calibration_low}", "Correct one of them.",
            )  # fmt: skip
        return self


class Difference(BaseModel, frozen=True):
    """NE of the challenger less that of the champion on the same rows, with a two-sided interval."""

    ne: float
    low: float
    high: float
    units: int
    """Things resampled: rows, days, users."""


class Verdict(BaseModel, frozen=True):
    """What becomes of a version."""

    decision: Literal["promote", "hold", "reject"]
    reason: str
    champion: int | None = None
    """Version compared with."""
    champion_ne: float | None = None
    resampled_by: str | None = None
    difference: Difference | None = None


def ne_difference(
    labels: Floats, challenger: Floats, champion: Floats, units: npt.NDArray[np.int64] | None, level: float
) -> Difference | None:
    """NE of one model less that of another, and the interval that chance leaves it; None where it is undefined.

    The interval is the closed form of the paired bootstrap over units: NE is a ratio of means over the same rows, so
    to first order the difference is a mean of one number for each unit (the delta method), and Student's distribution
    gives its bounds. It costs one pass instead of a thousand, and stays right for few units.

    Args:
        labels, challenger, champion: float64 [N]; labels are 0 or 1, the others probabilities.
        units: int64 [N]: the number of the unit that each row belongs to, from 0; None: each row is one.
        level: Chance that the interval leaves out the truth.
    Source:
        Efron and Tibshirani 1993, "An introduction to the bootstrap", chapter 21 (the delta method as its limit);
        Cameron and Miller 2015, "A practitioner's guide to cluster-robust inference", section II.
    Example:
        >>> labels = np.array([0.0, 1.0] * 50)
        >>> sure, unsure = np.where(labels == 1.0, 0.8, 0.2), np.full(100, 0.5)
        >>> ne_difference(labels, sure, unsure, None, 0.05).high < 0.0
        True
    """
    rows = len(labels)
    rate = float(labels.mean()) if rows else 0.0
    entropy = base_entropy(rate)
    count = rows if units is None else int(units.max(initial=-1)) + 1
    if entropy == 0.0 or count < FEWEST_UNITS:
        return None
    apart = losses(labels, challenger) - losses(labels, champion)
    difference = float(apart.mean()) / entropy
    slope = math.log((1.0 - rate) / rate)  # of the entropy, by the rate
    parts = (apart - apart.mean()) / entropy - difference * slope / entropy * (labels - rate)
    if units is not None:
        parts = np.bincount(units, parts, minlength=count)
    error = math.sqrt(count / (count - 1) * float(np.square(parts).sum())) / rows
    reach = float(student.ppf(1.0 - level / 2.0, count - 1)) * error
    return Difference(ne=difference, low=difference - reach, high=difference + reach, units=count)


def compare(
    parts: Sequence[Scored], report: EvalReport, slices: Sequence[str], config: GateConfig, version: int
) -> Verdict:
    """The verdict on a challenger whose rows the champion has scored too.

    Args:
        parts: With the champion's probabilities.
        report: The challenger's quality on all parts together.
        slices: Columns that part the rows into slices; those of the report are looked at.
        version: The champion's.
    Raises:
        ConfigError: If there is no such column to resample by.
    """
    labels = np.concatenate([part.labels for part in parts])
    ours = np.concatenate([part.probabilities for part in parts])
    theirs = np.concatenate([part.champion for part in parts if part.champion is not None])
    extra = pa.concat_tables([part.extra for part in parts])
    by, units = _units(extra, config)
    champion = quality(labels, theirs)
    difference = ne_difference(labels, ours, theirs, units, config.level)
    known: dict[str, Any] = {
        "champion": version,
        "champion_ne": champion.ne,
        "resampled_by": by,
        "difference": difference,
    }

    def verdict(decision: Literal["promote", "hold", "reject"], reason: str) -> Verdict:
        return Verdict(decision=decision, reason=reason, **known)

    if difference is None or champion.ne is None:
        why = "its labels are all alike" if champion.ne is None else f"there are fewer than {FEWEST_UNITS} {by}s"
        return verdict("hold", f"NE cannot be compared on the evaluation rows: {why}.")
    against = f"that of version {version}, {champion.ne:.4f}"
    found = _in_words(difference, champion.ne, by)
    if difference.low > 0.0:
        return verdict("reject", f"NE is higher than {against}, by {found}.")
    if reason := _off(report.overall, champion, config, version):
        return verdict("reject", reason)
    if reason := _lost_slice(labels, ours, theirs, extra, units, report, slices, config, version):
        return verdict("reject", reason)
    if difference.high < -config.least_gain * champion.ne:
        return verdict("promote", f"NE is lower than {against}, by {found}.")
    least = f", less than {config.least_gain:.2%} better for sure" if config.least_gain else ", which may be chance"
    return verdict("hold", f"NE differs from {against}, by {found}{least}.")


def _units(extra: pa.Table, config: GateConfig) -> tuple[str, npt.NDArray[np.int64] | None]:
    """What is resampled, and the number of each row's; None: each row is one."""
    by = config.resample_by
    if by is None:
        by = DAY if DAY in extra.column_names and len(pc.unique(extra.column(DAY))) >= ENOUGH_DAYS else "row"
    if by == "row":
        return by, None
    if by not in extra.column_names:
        known = ", ".join(extra.column_names)
        raise ConfigError("gate.resample_by", f"row, day or a column, such as {known}", by, "Name another.")
    encoded = pc.dictionary_encode(extra.column(by).combine_chunks(), null_encoding="encode")
    return by, encoded.indices.to_numpy().astype(np.int64)


def _off(challenger: Quality, champion: Quality, config: GateConfig, version: int) -> str | None:
    """Why the challenger's calibration rules it out."""
    ours, theirs = challenger.calibration, champion.calibration
    if ours is None or config.calibration_low <= ours <= config.calibration_high:
        return None
    if theirs is not None and ours > 0.0 and abs(math.log(ours)) <= abs(math.log(theirs or 1e-9)):
        return None
    shown = "undefined" if theirs is None else f"{theirs:.3f}"
    bounds = f"{config.calibration_low:g} to {config.calibration_high:g}"
    return f"Calibration {ours:.3f} lies outside {bounds}; that of version {version} is {shown}."


def _lost_slice(
    labels: Floats,
    ours: Floats,
    theirs: Floats,
    extra: pa.Table,
    units: npt.NDArray[np.int64] | None,
    report: EvalReport,
    slices: Sequence[str],
    config: GateConfig,
    version: int,
) -> str | None:
    """The slice where more is lost than may be; chance is shared among all slices that are looked at (Bonferroni)."""
    large = {(part.column, part.value) for part in report.slices if part.quality.rows >= config.slice_rows}
    for column in slices:
        for value, rows in members(extra, column):
            if (column, value) not in large:
                continue
            own = None if units is None else np.unique(units[rows], return_inverse=True)[1]
            found = ne_difference(labels[rows], ours[rows], theirs[rows], own, config.level / len(large))
            ne = quality(labels[rows], theirs[rows]).ne
            if found is not None and ne is not None and found.low > config.slice_loss * ne:
                lost = _in_words(found, ne, "")
                return f"Where {column} = {value}, NE is higher than that of version {version}, {ne:.4f}, by {lost}."
    return None


def _in_words(found: Difference, ne: float, by: str) -> str:
    """A difference as percents of an NE, with its interval."""
    size, low, high = abs(found.ne) / ne, found.low / ne, found.high / ne
    over = f" over {found.units:,} {by}s" if by else ""
    return f"{size:.2%} ({low:+.2%} to {high:+.2%}{over})"

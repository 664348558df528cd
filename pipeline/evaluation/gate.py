"""Challenger against champion on the same rows -> promote, hold or reject, with the reason."""

import math
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel
from scipy.special import stdtrit  # type: ignore[import-untyped]

from pipeline.evaluation.config import GateConfig
from pipeline.evaluation.evaluate import EvalReport, Evaluation
from pipeline.evaluation.metrics import UNIT, Floats, Integers, Quality, base_entropy, losses
from pipeline.evaluation.sums import Pairs, moments_of, sum_of_squares
from storage.reader import DAY

ENOUGH_DAYS = 20
"""From so many days on, days are what differs by chance: rows of a day have much in common."""
FEWEST_UNITS = 5
"""With fewer of them an interval says nothing."""


class Difference(BaseModel, frozen=True):
    """NE of the challenger less that of the champion on the same rows, with a two-sided interval."""

    ne: float
    low: float
    high: float
    units: int
    """Things resampled: rows, days, users; more than 1,024 that are not rows are put into so many groups."""


class Verdict(BaseModel, frozen=True):
    """What becomes of a version."""

    decision: Literal["promote", "hold", "reject"]
    reason: str
    champion: int | None = None
    """Version compared with."""
    champion_ne: float | None = None
    resampled_by: str | None = None
    difference: Difference | None = None


def ne_difference(pairs: Pairs, by_rows: bool, level: float, member: int = 0) -> Difference | None:
    """NE of one model less that of another, and the interval that chance leaves it; None where it is undefined.

    The interval is the closed form of the paired bootstrap over units: NE is a ratio of means over the same rows, so
    to first order the difference is a mean of one number for each unit (the delta method), and Student's distribution
    gives its bounds. It costs one pass instead of a thousand, and stays right for few units.

    Args:
        pairs: Sums of the differences of their losses.
        by_rows: Each row is a unit; else each group of units is one.
        level: Chance that the interval leaves out the truth.
    Source:
        Efron and Tibshirani 1993, "An introduction to the bootstrap", chapter 21 (the delta method as its limit);
        Cameron and Miller 2015, "A practitioner's guide to cluster-robust inference", section II.
    Example:
        >>> labels = np.array([0.0, 1.0] * 50)
        >>> sure, unsure = np.where(labels == 1.0, 0.8, 0.2), np.full(100, 0.5)
        >>> ne_difference(paired(labels, sure, unsure), True, 0.05).high < 0.0
        True
    """
    used = pairs.by_unit[member][pairs.by_unit[member][:, 0] > 0]
    in_rows, positive, apart = used.T.astype(np.float64)
    scale = UNIT if pairs.weighted else 1.0
    rows, positives, total = in_rows.sum() * scale, positive.sum() * scale, apart.sum() * UNIT
    rate = positives / rows if rows else 0.0
    counted = int(pairs.counts[member, 0]) if pairs.weighted else int(rows)
    entropy, count = base_entropy(rate), counted if by_rows else len(in_rows)
    if entropy == 0.0 or count < FEWEST_UNITS:
        return None
    mean = total / rows
    difference = mean / entropy
    over = difference * math.log((1.0 - rate) / rate)  # the change of the entropy with the rate
    if by_rows and pairs.weighted:
        squares = moments_of(pairs.moments[member]).spread(mean, rate, over)
    elif by_rows:
        of_positives, *limbs = pairs.sums[member].tolist()
        squares = (
            sum_of_squares(*limbs) - rows * mean * mean - 2.0 * over * (of_positives * UNIT - rows * mean * rate)
            + over * over * rows * rate * (1.0 - rate)
        )  # fmt: skip
    else:
        of_rows, of_labels = in_rows * scale, positive * scale
        squares = float(np.square(apart * UNIT - of_rows * mean - over * (of_labels - of_rows * rate)).sum())
    error = math.sqrt(count / (count - 1) * max(squares, 0.0)) / rows / entropy
    reach = float(stdtrit(count - 1, 1.0 - level / 2.0)) * error  # Student's distribution
    return Difference(ne=difference, low=difference - reach, high=difference + reach, units=count)


def paired(
    labels: Floats, ours: Floats, theirs: Floats, units: Integers | None = None, weights: Floats | None = None
) -> Pairs:
    """The sums of rows at hand; units as numbers below 1,024.

    Shapes:
        labels, ours, theirs: float64 [N], probabilities of both models. units: int64 [N].
    """
    pairs = Pairs(weighted=weights is not None)
    apart = losses(labels, ours) - losses(labels, theirs)
    pairs.add(labels, apart, np.zeros(len(labels), np.int64) if units is None else units, weights=weights)
    return pairs


def compare(evaluation: Evaluation, report: EvalReport, config: GateConfig, version: int) -> Verdict:
    """The verdict on a challenger whose rows the champion has scored too.

    Args:
        evaluation: The sums of both.
        report: The challenger's quality.
        version: The champion's.
    """
    champion = evaluation.champion.quality()
    days = int((evaluation.pairs.by_unit[0, :, 0] > 0).sum()) if evaluation.units == DAY else 0
    by = config.resample_by or (DAY if days >= ENOUGH_DAYS else "row")
    known: dict[str, Any] = {"champion": version, "champion_ne": champion.ne, "resampled_by": by}

    def verdict(decision: Literal["promote", "hold", "reject"], reason: str) -> Verdict:
        return Verdict(decision=decision, reason=reason, **known)

    for whose, quality in (("this model", report.overall), (f"version {version}", champion)):
        if quality.ne is None:
            return verdict("hold", f"NE of {whose} is undefined: {quality.undefined['ne']}.")
    difference = ne_difference(evaluation.pairs, by == "row", config.level)
    if difference is None or champion.ne is None:
        return verdict("hold", f"NE cannot be compared: there are fewer than {FEWEST_UNITS} {by}s.")
    known["difference"] = difference
    against = f"that of version {version}, {champion.ne:.4f}"
    found = _in_words(difference, champion.ne, by)
    if difference.low > 0.0:
        return verdict("reject", f"NE is higher than {against}, by {found}.")
    if reason := _off(report.overall, champion, config, version):
        return verdict("reject", reason)
    if reason := _lost_slice(evaluation, report, by == "row", config, version):
        return verdict("reject", reason)
    if difference.high < -config.least_gain * champion.ne:
        return verdict("promote", f"NE is lower than {against}, by {found}.")
    if config.rule == "not_worse":
        return verdict("promote", f"NE is not higher for sure than {against}: {found}.")
    least = f", less than {config.least_gain:.2%} better for sure" if config.least_gain else ", which may be chance"
    return verdict("hold", f"NE differs from {against}, by {found}{least}.")


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
    evaluation: Evaluation, report: EvalReport, by_rows: bool, config: GateConfig, version: int
) -> str | None:
    """The slice where more is lost than may be; chance is shared among all slices that are looked at (Bonferroni)."""
    large = [part for part in report.slices if not part.small]
    for part in large:
        sliced = evaluation.slices[part.column]
        member = (sliced.members.codes or {})[part.value]
        found = ne_difference(sliced.pairs, by_rows, config.level / len(large), member)
        if found is None or part.quality.ne is None:
            continue
        ne = part.quality.ne - found.ne
        if found.low > config.slice_loss * ne:
            lost = _in_words(found, ne, "")
            return (
                f"Where {part.column} = {part.value}, NE is higher than that of version {version}, {ne:.4f}, by {lost}."
            )
    return None


def _in_words(found: Difference, ne: float, by: str) -> str:
    """A difference as percents of an NE, with its interval."""
    size, low, high = abs(found.ne) / ne, found.low / ne, found.high / ne
    over = f" over {found.units:,} {by}s" if by else ""
    return f"{size:.2%} ({low:+.2%} to {high:+.2%}{over})"

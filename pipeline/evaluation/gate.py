"""Compares a challenger with the champion on the same rows: promote, hold or reject, with the reason."""

import math
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel
from scipy.special import stdtrit  # type: ignore[import-untyped]

from pipeline.evaluation.config import GateConfig
from pipeline.evaluation.evaluate import EvalReport, Evaluation
from pipeline.evaluation.metrics import Floats, Integers, Moments, Quality, base_entropy, losses
from pipeline.evaluation.sums import PairedSums
from storage.config import DAY

ENOUGH_DAYS = 20
"""From so many days on, days are resampled by default: rows of a day have much in common."""
FEWEST_UNITS = 5
"""With fewer units an interval says nothing."""


class Difference(BaseModel, frozen=True):
    """NE of the challenger minus NE of the champion on the same rows, with a two-sided interval."""

    ne: float
    low: float
    high: float
    units: int
    """Resampled units: rows, days, users. More than 1,024 that are not rows share so many groups."""


class Verdict(BaseModel, frozen=True):
    """The gate's decision on a version."""

    decision: Literal["promote", "hold", "reject"]
    reason: str
    champion: int | None = None
    """Version compared with."""
    champion_ne: float | None = None
    resampled_by: str | None = None
    difference: Difference | None = None


def ne_difference(pairs: PairedSums, by_rows: bool, level: float, member: int = 0) -> Difference | None:
    """Returns NE of one model minus NE of another with its confidence interval. None: it is undefined.

    The interval is the closed form of the paired bootstrap over units. NE is a ratio of means over the same rows. To
    first order the difference is therefore a mean of one number per unit (the delta method), and Student's distribution
    gives its bounds. It costs one pass instead of a thousand, and stays right for few units.

    Args:
        pairs: Sums of the differences of their losses.
        by_rows: Each row is a unit. Otherwise each group of units is one.
        level: Chance that the interval misses the true difference.
    Source:
        Efron and Tibshirani 1993, "An introduction to the bootstrap", chapter 21 (the delta method as its limit);
        Cameron and Miller 2015, "A practitioner's guide to cluster-robust inference", section II.
    Example:
        >>> labels = np.array([0.0, 1.0] * 50)
        >>> sure, unsure = np.where(labels == 1.0, 0.8, 0.2), np.full(100, 0.5)
        >>> ne_difference(sum_pairs(labels, sure, unsure), True, 0.05).high < 0.0
        True
    """
    by_unit = pairs.by_unit[member]
    rows, positives, losses_apart = by_unit[by_unit[:, 0] > 0.0].T
    weight = rows.sum()
    rate = float(positives.sum() / weight) if weight else 0.0
    entropy, units = base_entropy(rate), int(pairs.rows[member]) if by_rows else len(rows)
    if entropy == 0.0 or units < FEWEST_UNITS:
        return None
    mean = losses_apart.sum() / weight
    difference = float(mean / entropy)
    slope = difference * math.log((1.0 - rate) / rate)  # of the entropy, by the rate
    if by_rows:
        squares = Moments(*pairs.moments[member].tolist()).spread(mean, rate, slope)
    else:
        squares = float(np.square(losses_apart - rows * mean - slope * (positives - rows * rate)).sum())
    error = math.sqrt(units / (units - 1) * squares) / weight / entropy
    margin = float(stdtrit(units - 1, 1.0 - level / 2.0) * error)  # Student's distribution
    return Difference(ne=difference, low=difference - margin, high=difference + margin, units=units)


def sum_pairs(
    labels: Floats, ours: Floats, theirs: Floats, units: Integers | None = None, weights: Floats | None = None
) -> PairedSums:
    """Sums rows in memory. Units are numbers below 1,024.

    Shapes:
        labels, ours, theirs: float64 [N], probabilities of both models. units: int64 [N].
    """
    pairs = PairedSums()
    difference = losses(labels, ours) - losses(labels, theirs)
    pairs.add(labels, difference, np.zeros(len(labels), np.int64) if units is None else units, weights=weights)
    return pairs


def compare(evaluation: Evaluation, report: EvalReport, config: GateConfig, version: int) -> Verdict:
    """Decides on a challenger. The champion has scored the same rows.

    Args:
        evaluation: The sums of both.
        report: The challenger's quality.
        version: The champion's.
    """
    champion = evaluation.champion.quality()
    days = int((evaluation.pairs.by_unit[0, :, 0] > 0.0).sum()) if evaluation.units == DAY else 0
    by = config.resample_by or (DAY if days >= ENOUGH_DAYS else "row")
    known: dict[str, Any] = {"champion": version, "champion_ne": champion.ne, "resampled_by": by}

    def verdict(decision: Literal["promote", "hold", "reject"], reason: str) -> Verdict:
        return Verdict(decision=decision, reason=reason, **known)

    for model, quality in (("this model", report.overall), (f"version {version}", champion)):
        if quality.ne is None:
            return verdict("hold", f"NE of {model} is undefined: {quality.undefined['ne']}.")
    difference = ne_difference(evaluation.pairs, by == "row", config.level)
    if difference is None or champion.ne is None:
        return verdict("hold", f"NE cannot be compared: there are fewer than {FEWEST_UNITS} {by}s.")
    known["difference"] = difference
    against = f"that of version {version}, {champion.ne:.4f}"
    found = _describe(difference, champion.ne, by)
    if difference.low > 0.0:
        return verdict("reject", f"NE is higher than {against}, by {found}.")
    if reason := _calibration_problem(report.overall, champion, config, version):
        return verdict("reject", reason)
    if reason := _slice_problem(evaluation, report, by == "row", config, version):
        return verdict("reject", reason)
    if difference.high < -config.least_gain * champion.ne:
        return verdict("promote", f"NE is lower than {against}, by {found}.")
    if config.rule == "not_worse":
        return verdict("promote", f"NE is not higher for sure than {against}: {found}.")
    least = f", less than {config.least_gain:.2%} better for sure" if config.least_gain else ", which may be chance"
    return verdict("hold", f"NE differs from {against}, by {found}{least}.")


def _calibration_problem(challenger: Quality, champion: Quality, config: GateConfig, version: int) -> str | None:
    """Returns why the challenger's calibration rules it out."""
    ours, theirs = challenger.calibration, champion.calibration
    if ours is None or config.calibration_low <= ours <= config.calibration_high:
        return None
    if theirs is not None and ours > 0.0 and abs(math.log(ours)) <= abs(math.log(theirs or 1e-9)):
        return None
    known = "undefined" if theirs is None else f"{theirs:.3f}"
    bounds = f"{config.calibration_low:g} to {config.calibration_high:g}"
    return f"Calibration {ours:.3f} lies outside {bounds}; that of version {version} is {known}."


def _slice_problem(
    evaluation: Evaluation, report: EvalReport, by_rows: bool, config: GateConfig, version: int
) -> str | None:
    """Describes a slice that loses more than allowed. The level is shared among all large slices (Bonferroni)."""
    large = [part for part in report.slices if not part.small]
    for part in large:
        sliced = evaluation.slices[part.column]
        member = (sliced.members.codes or {})[part.value]
        found = ne_difference(sliced.pairs, by_rows, config.level / len(large), member)
        if found is None or part.quality.ne is None:
            continue
        ne = part.quality.ne - found.ne
        if found.low > config.slice_loss * ne:
            lost = _describe(found, ne, "")
            return (
                f"Where {part.column} = {part.value}, NE is higher than that of version {version}, {ne:.4f}, by {lost}."
            )
    return None


def _describe(found: Difference, ne: float, by: str) -> str:
    """Formats a difference and its interval as percentages of an NE."""
    size, low, high = abs(found.ne) / ne, found.low / ne, found.high / ne
    units = f" over {found.units:,} {by}s" if by else ""
    return f"{size:.2%} ({low:+.2%} to {high:+.2%}{units})"

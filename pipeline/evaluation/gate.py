"""Compares a challenger with the champion on the same rows: promote, hold or reject, with the reason."""

import math
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel
from scipy.special import stdtrit

from pipeline.evaluation.config import GateConfig
from pipeline.evaluation.evaluate import EvalReport, Evaluation
from pipeline.evaluation.metrics import Floats, Integers, Moments, base_entropy, losses
from pipeline.evaluation.series import Interval
from pipeline.evaluation.sums import CalibrationSums, PairedSums
from storage.config import DAY

NAMED_SLICES = 3
"""Most slices that a verdict names."""
FEWEST_UNITS = 5
"""With fewer units, an interval says nothing. From this number of days on, days are resampled by default, because rows
of a day have much in common."""

TOO_GOOD = 0.05
"""A model with a lower NE most likely reads what is known only after the label."""
UNLESS_KNOWN = "If all it reads is known before, promote it yourself: python -m flows.promote CONFIG version=N."
SMALLEST_NE = 0.0001
"""Differences from a lower NE are not told as shares of it."""


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
    pending: bool = False
    """Whether a later day decides, which no model has seen yet."""


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
    margin = _margin(squares, units, level) / weight / entropy
    return Difference(ne=difference, low=difference - margin, high=difference + margin, units=units)


def _margin(squares: float, units: int, level: float) -> float:
    """Returns half the width of the interval of a sum over units, given the sum of their squared deviations."""
    return float(stdtrit(units - 1, 1.0 - level / 2.0)) * math.sqrt(units / (units - 1) * squares)  # Student's


def log_calibration(
    sums: CalibrationSums, units: int, by_rows: bool, level: float, ours: float = 1.0, theirs: float = 0.0
) -> Interval | None:
    """Returns `ours` * log(calibration of one model) + `theirs` * log(that of the other) with its confidence interval.

    To first order it is a sum of one number per unit, as in `ne_difference`. None: it is undefined.

    Args:
        sums: Labels and predictions of both models.
        units, by_rows, level: As in `ne_difference`.
    """
    labels, *predicted = np.maximum(sums.by_unit.sum(axis=0), 1e-300).tolist()
    if not sums.by_unit[:, 0].any() or units < FEWEST_UNITS:
        return None
    value = ours * math.log(predicted[0] / labels) + theirs * math.log(predicted[1] / labels)
    slopes = np.array([-(ours + theirs) / labels, ours / predicted[0], theirs / predicted[1]])
    squares = slopes @ sums.products @ slopes if by_rows else np.square(sums.by_unit @ slopes).sum()
    margin = _margin(max(float(squares), 0.0), units, level)
    return Interval(value=value, low=value - margin, high=value + margin)


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
    by, few_days = _choose_units(evaluation, config)
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
    size = _describe_size(difference, champion.ne, by, few_days)
    found = _describe(difference, champion.ne, by, few_days)
    if difference.low > 0.0:
        return verdict("reject", f"NE is higher than {against}, by {size}.")
    calibration = _calibration_problem(evaluation, by == "row", config, version)
    if problem := calibration or _slice_problem(evaluation, report, by == "row", config, version):
        return verdict("reject", problem)
    if problem := _describe_leak(report.overall.ne, champion.ne):
        return verdict("hold", problem)
    undefined = _describe_undefined(report)
    if difference.high < -config.least_gain * champion.ne:
        return verdict("promote", f"NE is lower than {against}, by {size}.{undefined}")
    if config.rule == "not_worse":
        return verdict("promote", f"NE is not higher for sure than {against}: {found}.{undefined}")
    least = f", less than {config.least_gain:.2%} better for sure" if config.least_gain else ", which may be chance"
    return verdict("hold", f"NE differs from {against}, by {found}{least}.")


def judge_first(evaluation: Evaluation, report: EvalReport, config: GateConfig) -> Verdict:
    """Decides on a first model. It must be better than the base rate, and calibrated.

    Args:
        evaluation: The sums of this model alone.
        report: Its quality.
    """
    by, few_days = _choose_units(evaluation, config)
    if report.overall.ne is None:
        return Verdict(decision="hold", reason=f"NE is undefined: {report.overall.undefined['ne']}.")
    found = ne_difference(evaluation.pairs, by == "row", config.level)
    if found is None:
        reason = f"There is no champion, and NE has no interval: there are fewer than {FEWEST_UNITS} {by}s."
        return Verdict(decision="hold", reason=reason, resampled_by=by)
    interval = f"{found.low:.4f} to {found.high:.4f}{_describe_units(found, by, few_days)}"
    ne = f"NE {found.ne:.4f} ({interval})"
    if found.high >= 1.0:
        reason = f"There is no champion, and {ne} is not below 1 for sure: predicting the mean rate is as good."
        return Verdict(decision="hold", reason=reason, resampled_by=by)
    if problem := _calibration_problem(evaluation, by == "row", config, None):
        return Verdict(decision="hold", reason=f"There is no champion. {problem}", resampled_by=by)
    if problem := _describe_leak(report.overall.ne, None):
        return Verdict(decision="hold", reason=f"There is no champion. {problem}", resampled_by=by)
    reason = f"There is no champion yet, and {ne} is below that of the mean rate, 1."
    return Verdict(decision="promote", reason=reason, resampled_by=by)


def _describe_leak(ne: float | None, champion: float | None) -> str | None:
    """Returns why a model is too good to be true. None: it is not, or its champion is as good."""
    if ne is None or ne >= TOO_GOOD or (champion is not None and champion < TOO_GOOD):
        return None
    return f"NE {ne:.4f} is below {TOO_GOOD:g}: most likely a feature is known only after the label. {UNLESS_KNOWN}"


def _choose_units(evaluation: Evaluation, config: GateConfig) -> tuple[str, int]:
    """Returns the unit of resampling, and the number of days if they are too few to be units (else 0)."""
    days = _count_units(evaluation) if evaluation.units == DAY else 0
    by = config.resample_by or (DAY if days >= FEWEST_UNITS else "row")
    return by, days if by == "row" and days < FEWEST_UNITS else 0


def _count_units(evaluation: Evaluation) -> int:
    return int((evaluation.pairs.by_unit[0, :, 0] > 0.0).sum())


def _calibration_problem(evaluation: Evaluation, by_rows: bool, config: GateConfig, version: int | None) -> str | None:
    """Returns why the challenger's calibration is out of bounds beyond chance. None: it is not.

    If the champion is out of bounds, too, the rows have an unusual label rate, which says nothing about either model.
    Then only a challenger that is further off than the champion, by more than a bound beyond chance, is ruled out.

    Args:
        version: The champion's. None: there is none.
    """
    units = int(evaluation.pairs.rows[0]) if by_rows else _count_units(evaluation)
    level, sums = config.level, evaluation.calibrations
    low, high = math.log(config.calibration_low), math.log(config.calibration_high)
    ours = log_calibration(sums, units, by_rows, level)
    if ours is None:
        return "Calibration is undefined."
    if ours.high >= low and ours.low <= high:
        return None
    known = ""
    if version is not None:
        theirs = log_calibration(sums, units, by_rows, level, 0.0, 1.0)
        signs = 1.0 if ours.value > 0.0 else -1.0, -1.0 if theirs is None or theirs.value > 0.0 else 1.0
        further = log_calibration(sums, units, by_rows, level, *signs)
        if theirs is None or further is None:
            return f"Calibration {math.exp(ours.value):.3f} cannot be compared: that of version {version} is undefined."
        if further.low <= (0.0 if low <= theirs.value <= high else max(-low, high)):
            return None
        known = f"; that of version {version} is {math.exp(theirs.value):.3f}"
    value, start, end = (f"{math.exp(bound):.3f}" for bound in (ours.value, ours.low, ours.high))
    bounds = f"{config.calibration_low:g} to {config.calibration_high:g}"
    return f"Calibration {value} ({start} to {end}) lies outside {bounds}{known}."


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
            lost = _describe_size(found, ne)
            return (
                f"Where {part.column} = {part.value}, NE is higher than that of version {version}, {ne:.4f}, by {lost}."
            )
    return None


def _describe_undefined(report: EvalReport) -> str:
    """Names large slices that were not compared, because their NE is undefined."""
    parts = [part for part in report.slices if not part.small and part.quality.ne is None]
    if not parts:
        return ""
    named = ", ".join(f"{part.column} = {part.value}" for part in parts[:NAMED_SLICES])
    more = f" and {len(parts) - NAMED_SLICES} more" if len(parts) > NAMED_SLICES else ""
    return f" Not compared, because NE is undefined: {named}{more}."


def _describe(found: Difference, ne: float, by: str, days: int) -> str:
    """Formats a difference of either sign and its interval as percentages of an NE."""
    size, low, high = (_share(value, ne, "+") for value in (found.ne, found.low, found.high))
    return f"{size} ({low} to {high}{_describe_units(found, by, days)})"


def _describe_size(found: Difference, ne: float, by: str = "", days: int = 0) -> str:
    """Formats the size of a difference, whose sign the sentence says, and the interval of that size."""
    low, size, high = (_share(abs(value), ne) for value in sorted((found.low, found.ne, found.high), key=abs))
    return f"{size} ({low} to {high}{_describe_units(found, by, days)})"


def _share(value: float, ne: float, sign: str = "") -> str:
    """Formats a difference as a percentage of an NE, or as it is where the NE is about zero."""
    return f"{value:{sign}.4f}" if ne < SMALLEST_NE else f"{value / ne:{sign}.2%}"


def _describe_units(found: Difference, by: str, days: int) -> str:
    """Names the units of the interval. If the days are few, says that it covers no others."""
    only = f" of {days} {DAY}s only" if days > 1 else f" of one {DAY} only" if days else ""
    return f" over {found.units:,} {by}s{only}" if by else ""

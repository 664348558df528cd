"""The claims of the paper about its experiments, and how a study is checked against each."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal, NamedTuple

from pipeline.study.measure.results import StudyResults
from pipeline.study.report.curves import (
    Curve,
    Ratio,
    build_curves,
    divide_speeds,
    format_value,
    measure_slope,
    shorten_key,
)

Verdict = Literal["agrees", "disagrees", "cannot tell"]
NOTICEABLE = 1.1
"""Throughputs that differ by less than this factor count as equal."""
HARDLY = 1.5
"""An axis hardly matters if its fastest point is at most this many times as fast as its slowest."""
SATURATED = 0.5
"""A curve saturates if its slope over the second half is below this share of its slope over the first half."""
CHANCE_NE = 0.002
"""NE differences up to this count as chance, because each training uses one seed."""


ClaimCheck = Callable[[StudyResults], tuple[Verdict, str]]
"""Returns the verdict and the numbers behind it."""


class ShapeVerdict(NamedTuple):
    """Verdict on one curve or one pair of points."""

    verdict: Verdict
    figure: float


class Claim(NamedTuple):
    """A claim of the paper and its check."""

    source: str
    text: str
    evaluate: ClaimCheck


def _within(found: Ratio, low: float | None = None, high: float | None = None) -> Verdict:
    """Whether the whole range of a number lies above `low`, or below `high`."""
    if low is not None:
        return "agrees" if found.low > low else "disagrees" if found.high <= low else "cannot tell"
    assert high is not None
    return "agrees" if found.high < high else "disagrees" if found.low >= high else "cannot tell"


def _falls(curve: Curve) -> ShapeVerdict:
    found = divide_speeds(curve.spots[-1].rows_per_second, curve.spots[0].rows_per_second)
    return ShapeVerdict(_within(found, high=1 / NOTICEABLE), found.median)


def _rises(curve: Curve) -> ShapeVerdict:
    found = divide_speeds(curve.spots[-1].rows_per_second, curve.spots[0].rows_per_second)
    return ShapeVerdict(_within(found, low=NOTICEABLE), found.median)


def _hardly_matters(curve: Curve) -> ShapeVerdict:
    ordered = sorted((spot.rows_per_second for spot in curve.spots), key=lambda one: one.median)
    found = divide_speeds(ordered[0], ordered[-1])
    return ShapeVerdict(_within(found, low=1 / HARDLY), found.median)


def _halves(curve: Curve) -> tuple[Ratio, Ratio]:
    """Returns the slopes of the first and the second half."""
    middle = curve.spots[(len(curve.spots) - 1) // 2]
    return measure_slope(curve.spots[0], middle), measure_slope(middle, curve.spots[-1])


def _saturates(curve: Curve) -> ShapeVerdict:
    early, late = _halves(curve)
    share = late.median / early.median if early.median > 0 else float("nan")
    if early.low > 0 and late.high < SATURATED * early.low:
        return ShapeVerdict("agrees", share)
    return ShapeVerdict("disagrees" if late.low >= SATURATED * max(early.high, 0.0) > 0 else "cannot tell", share)


def _steepens(curve: Curve) -> ShapeVerdict:
    early, late = _halves(curve)
    verdict: Verdict = "agrees" if late.high < early.low else "disagrees" if late.low >= early.high else "cannot tell"
    return ShapeVerdict(verdict, late.median - early.median)


def _along(axis: str, rule: Callable[[Curve], ShapeVerdict], figure: str, spots: int = 2) -> ClaimCheck:
    """Returns a check of every curve along an axis that has enough points."""

    def check(study: StudyResults) -> tuple[Verdict, str]:
        found = [curve for curve in build_curves(study.results, axis) if len(curve.spots) >= spots]
        if not found:
            return "cannot tell", f"fewer than {spots} points along {shorten_key(axis)}"
        ends = sorted({(curve.spots[0].x, curve.spots[-1].x) for curve in found})
        span = "; ".join(f"{shorten_key(axis)} {format_value(low)} to {format_value(high)}" for low, high in ends)
        return _together([rule(curve) for curve in found], f"{span}: {figure}")

    return check


def _in_order(axis: str, pairs: Sequence[tuple[str, str]]) -> ClaimCheck:
    """Returns a check that the first of each pair of named points is faster than the second."""

    def check(study: StudyResults) -> tuple[Verdict, str]:
        found, names = [], []
        for curve in build_curves(study.results, axis):
            at = {spot.x: spot.rows_per_second for spot in curve.spots}
            for faster, slower in pairs:
                if faster in at and slower in at:
                    one = divide_speeds(at[slower], at[faster])
                    found.append(ShapeVerdict(_within(one, high=1.0), one.median))
                    names.append(f"{slower} / {faster} {one.median:.2f}")
        if not found:
            return "cannot tell", "none of " + ", ".join(f"{slower} next to {faster}" for faster, slower in pairs)
        verdicts = {one.verdict for one in found}  # one wrong pair breaks the order
        verdict: Verdict = (
            "disagrees" if "disagrees" in verdicts else "agrees" if "agrees" in verdicts else "cannot tell"
        )
        return verdict, ", ".join(names)

    return check


def _together(checked: Sequence[ShapeVerdict], figure: str) -> tuple[Verdict, str]:
    """Combines the verdicts of several curves: at least one must be clear, and all clear ones must be the same."""
    telling = [one for one in checked if one.verdict != "cannot tell"]
    verdicts = {one.verdict for one in telling}
    figures = sorted(one.figure for one in checked)
    text = f"{figure} {median(figures):.2f}"
    if len(checked) > 1:
        agreeing = sum(one.verdict == "agrees" for one in telling)
        text += f" ({figures[0]:.2f} to {figures[-1]:.2f}); {agreeing} of {len(checked)} curves agree"
        text += f", {len(telling) - agreeing} disagree" if agreeing < len(telling) else ""
        text += f", {len(checked) - len(telling)} cannot tell" if len(telling) < len(checked) else ""
    return (verdicts.pop() if len(verdicts) == 1 else "cannot tell"), text


def list_qualities(study: StudyResults) -> list[tuple[float, float, float]]:
    """Lists (batch rows, NE with the learning rates of the config, NE with tuned ones), in order."""
    found = [(result.point.values.get(BATCH), result.quality) for result in study.results]
    return sorted((rows, ne["ne"], ne["tuned_ne"]) for rows, ne in found if rows is not None and ne is not None)


def _ne_grows(study: StudyResults) -> tuple[Verdict, str]:
    found = list_qualities(study)
    if len(found) < 2:
        return "cannot tell", "fewer than 2 batch sizes"
    (small, base, _), (large, ne, _) = found[0], found[-1]
    verdict: Verdict = "cannot tell" if abs(ne - base) <= CHANCE_NE else "agrees" if ne > base else "disagrees"
    return verdict, f"batch_rows {format_value(small)} to {format_value(large)}: NE {base:.4f} to {ne:.4f}"


def _tuning_helps(study: StudyResults) -> tuple[Verdict, str]:
    found = list_qualities(study)
    if len(found) < 2 or found[-1][1] - found[0][1] <= CHANCE_NE:
        return "cannot tell", "no loss to recover"
    (_, base, _), (large, ne, tuned) = found[0], found[-1]
    share = (ne - tuned) / (ne - base)
    text = f"batch_rows {format_value(large)}: NE {ne:.4f}, tuned {tuned:.4f}: {share:.0%} of the loss"
    return ("agrees" if ne - tuned > CHANCE_NE else "disagrees"), text


def _a_gap_stays(study: StudyResults) -> tuple[Verdict, str]:
    found = list_qualities(study)
    if len(found) < 2:
        return "cannot tell", "fewer than 2 batch sizes"
    (small, _, first), (large, _, last) = found[0], found[-1]
    text = f"tuned NE {first:.4f} at {format_value(small)}, {last:.4f} at {format_value(large)}"
    gap = last - first
    return ("agrees" if gap > CHANCE_NE else "disagrees" if gap <= 0 else "cannot tell"), text


DENSE, SPARSE, HASH = "workload.dense_features", "workload.sparse_features", "workload.hash_size"
BATCH, LOOKUPS = "training.batch_rows", "workload.lookups"
RATIO = "throughput times"
LATE, SLOWEST = "late slope over early slope", "slowest over fastest"
PLACES = [("one rank", "uvm_caching"), ("one rank", "uvm")], [("one rank", "table_wise"), ("one rank", "row_wise")]
_BY_FIGURE: dict[tuple[str, str], dict[str, ClaimCheck]] = {
    ("E1", "figure 10"): {
        "throughput falls with the number of sparse features": _along(SPARSE, _falls, RATIO),
        "throughput falls with the number of dense features": _along(DENSE, _falls, RATIO),
    },
    ("E2", "figure 11"): {
        "larger batches raise throughput": _along(BATCH, _rises, RATIO),
        "throughput saturates as batches grow further": _along(BATCH, _saturates, LATE, spots=3),
    },
    ("E3", "figure 12"): {
        "the hash size hardly matters to throughput while tables fit into memory": _along(
            HASH, _hardly_matters, SLOWEST
        )
    },
    ("E4", "figure 13"): {
        "wider MLPs cost throughput": _along("mlp width", _falls, RATIO),
        "narrow MLPs cost little, and the wider they are the more a wider one costs": _along(
            "mlp width", _steepens, "late slope less early slope", spots=3
        ),
        "deeper MLPs cost throughput": _along("mlp layers", _falls, RATIO),
    },
    ("E5", "figure 14"): {
        "tables in the memory of the device train faster than tables in the host's": _in_order("placement", PLACES[0]),
        "tables at hand train faster than tables that are reached from afar": _in_order("placement", PLACES[1]),
    },
    ("E6", "figure 15"): {
        "with the same learning rates NE grows with the batch": _ne_grows,
        "tuning them recovers some of a large batch's loss": _tuning_helps,
        "tuning them does not recover all of it": _a_gap_stays,
    },
    ("E7", "table II"): {
        "the fewer ids a row looks up in all, the faster: M2, then M1, then M3": _in_order(
            "model", [("M2", "M1"), ("M1", "M3")]
        )
    },
    ("E8", "figures 6 and 7"): {
        "a feature costs the more the longer its lists are": _along(LOOKUPS, _falls, RATIO),
        "what a feature costs hardly depends on its hash size": _along(HASH, _hardly_matters, SLOWEST),
    },
}
CLAIMS: dict[str, tuple[Claim, ...]] = {
    experiment: tuple(Claim(source, text, check) for text, check in checks.items())
    for (experiment, source), checks in _BY_FIGURE.items()
}
"""Experiment -> claims of the paper, in our words. No number was read off its figures. E7 has no figure: its
table suggests the claim."""

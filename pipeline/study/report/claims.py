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
CHANCE_NE = 0.0005
"""NE differences up to this count as chance, because each training uses one seed. The paper tells .1 % apart."""


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


def _search_closes_the_gap(study: StudyResults) -> tuple[Verdict, str]:
    found = list_qualities(study)
    if len(found) < 2 or found[-1][1] - found[0][1] <= CHANCE_NE:
        return "cannot tell", "no loss to recover"
    (small, base, _), (large, ne, tuned) = found[0], found[-1]
    share = (ne - tuned) / (ne - base)
    text = f"NE {base:.4f} at {format_value(small)}, searched {tuned:.4f} at {format_value(large)}"
    return ("agrees" if tuned <= base + CHANCE_NE else "disagrees"), f"{text}: {share:.0%} of the loss"


def _on(device: str, check: ClaimCheck) -> ClaimCheck:
    """Returns a check of what the paper says of one device. Points of another one are not comparable."""

    def checked(study: StudyResults) -> tuple[Verdict, str]:
        kept = [one for one in study.results if one.measurement is None or one.measurement.device == device]
        if len(kept) < len(study.results) and not any(one.measurement for one in kept):
            there = "a GPU" if device == GPU else "a CPU server"
            return "cannot tell", f"not comparable: the paper says it of {there}, and this was measured without"
        return check(study.model_copy(update={"results": tuple(kept)}))

    return checked


def _not_comparable(reason: str) -> ClaimCheck:
    """Returns a check of what cannot be measured here."""
    return lambda study: ("cannot tell", f"not comparable: {reason}")


CPU, GPU = "cpu", "cuda"
DENSE, SPARSE, HASH = "workload.dense_features", "workload.sparse_features", "workload.hash_size"
BATCH, LOOKUPS = "training.batch_rows", "workload.lookups"
RATIO = "throughput times"
LATE, SLOWEST = "late slope over early slope", "slowest over fastest"
PLACES = [("one rank", "uvm_caching"), ("one rank", "uvm")]
_BY_FIGURE: dict[tuple[str, str], dict[str, ClaimCheck]] = {
    ("E1", "figure 10"): {
        "throughput falls with the number of sparse features": _along(SPARSE, _falls, RATIO),
        "throughput falls with the number of dense features": _along(DENSE, _falls, RATIO),
    },
    ("E2", "figure 11, CPU and GPU"): {
        "larger batches raise throughput": _along(BATCH, _rises, RATIO),
        "throughput saturates as batches grow further": _along(BATCH, _saturates, LATE, spots=3),
    },
    ("E3", "figure 12, CPU"): {
        "the hash size hardly matters to throughput while tables fit into one server": _on(
            CPU, _along(HASH, _hardly_matters, SLOWEST)
        ),
    },
    ("E3", "figure 12, Big Basin"): {
        "throughput falls as larger tables are spread over more GPUs": _on(GPU, _along(HASH, _falls, RATIO)),
    },
    ("E4", "figure 13"): {
        "wider MLPs cost throughput": _along("mlp width", _falls, RATIO),
        "narrow MLPs cost little, and the wider they are the more a wider one costs": _along(
            "mlp width", _steepens, "late slope less early slope", spots=3
        ),
        "deeper MLPs cost throughput": _along("mlp layers", _falls, RATIO),
    },
    ("E5", "figure 14, Big Basin"): {
        "tables in GPU memory train faster than those in system memory, four times as fast with M2": _on(
            GPU, _in_order("placement", PLACES)
        ),
    },
    ("E5", "figure 14, Big Basin and Zion"): {
        "tables in remote system memory are not faster than others": _not_comparable(
            "all ranks here share one machine"
        ),
    },
    ("E6", "figure 15, GPU"): {
        "the gap of NE grows with the batch, despite tuning by hand": _ne_grows,
    },
    ("E6", "section VI.C, GPU"): {
        "a Bayesian search at the large batch ends below the NE of the CPU setup: M1 by .2 %, M2 by .1 %": (
            _search_closes_the_gap
        ),
    },
    ("E7", "table III, GPU against CPU"): {
        "a GPU server is 2.25 (M1), .85 (M2) and .67 (M3) times as fast as the CPU setup": _not_comparable(
            "it sets a GPU server against CPU servers, and a study measures one device"
        ),
    },
    ("E8", "figures 6 and 7"): {
        "a feature costs the more the longer its lists are": _along(LOOKUPS, _falls, RATIO),
        "what a feature costs hardly depends on its hash size": _along(HASH, _hardly_matters, SLOWEST),
    },
}
CLAIMS: dict[str, tuple[Claim, ...]] = {
    experiment: tuple(
        Claim(source, text, check)
        for (of, source), checks in _BY_FIGURE.items()
        if of == experiment
        for text, check in checks.items()
    )
    for experiment in dict.fromkeys(name for name, _ in _BY_FIGURE)
}
"""Experiment -> claims of the paper, in our words, with place and device. No number was read off its figures.

Source:
    Acun et al. 2020, arXiv:2011.05497, sections V and VI.
"""
TABLE_III = (
    ("model", "GPU / CPU throughput", "the same per watt", "batch on GPU", "CPU trainers + parameter servers"),
    ("M1", "2.25", "4.3", "1,600", "6 + 8"),
    ("M2", "0.85", "2.8", "3,200", "20 + 16"),
    ("M3", "0.67", "0.43", "800", "8 + 8"),
)
"""The paper's table III, in part."""

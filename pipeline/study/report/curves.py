"""Curves of a study: throughput along one axis, one curve per combination of the others."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.study.measure.results import PointResult, Spread

LAYERS = re.compile(r"(\d+)\^(\d+)")
"""A point named `512^3` has three layers of 512 units."""


class Spot(NamedTuple):
    """A point on a curve."""

    x: Any
    rows_per_second: Spread


class Ratio(NamedTuple):
    """A quotient of two medians, with the bounds that their ranges allow."""

    median: float
    low: float
    high: float


class Curve(NamedTuple):
    """Throughput along one axis while the others are fixed."""

    others: Mapping[str, Any]
    spots: Sequence[Spot]

    @property
    def label(self) -> str:
        """Names the fixed axes and their values.

        Example:
            >>> Curve({"training.batch_rows": 1_600, "mlp layers": 3}, []).label
            'batch_rows 1600, mlp layers 3'
        """
        return ", ".join(f"{shorten_key(axis)} {format_value(value)}" for axis, value in self.others.items())


def shorten_key(axis: str) -> str:
    """Returns the last part of a dotted key."""
    return axis.rsplit(".", 1)[-1]


def format_value(value: Any) -> str:
    """Formats a value of an axis.

    Example:
        >>> format_value(3_500_000), format_value(16_384), format_value("row_wise"), format_value(0.5)
        ('3.5M', '16384', 'row_wise', '0.5')
    """
    if is_number(value):
        for unit, sign in ((1_000_000, "M"), (1_000, "k")):
            if abs(value) >= max(unit, 10_000) and value == float(f"{value:.3g}"):
                return f"{value / unit:g}{sign}"
    return str(value)


def is_number(value: Any) -> bool:
    """Whether an axis with this value is numeric."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def get_coordinates(result: PointResult) -> dict[str, Any]:
    """Returns axis -> value of a point. A name such as `512^3` becomes two axes, width and layers."""
    found: dict[str, Any] = {}
    for axis, value in result.point.values.items():
        layers = LAYERS.fullmatch(value) if isinstance(value, str) else None
        found |= (
            {axis: value} if layers is None else {f"{axis} width": int(layers[1]), f"{axis} layers": int(layers[2])}
        )
    return found


def list_axes(results: Sequence[PointResult]) -> dict[str, list[Any]]:
    """Returns axis -> its distinct values in all results, in order."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        for axis, value in get_coordinates(result).items():
            found.setdefault(axis, {}).setdefault(json.dumps(value), value)
    return {axis: list(values.values()) for axis, values in found.items()}


def build_curves(results: Sequence[PointResult], axis: str) -> list[Curve]:
    """Returns the throughput along an axis, in ascending order of numbers. Skips points without a measurement."""
    found: dict[str, tuple[dict[str, Any], list[Spot]]] = {}
    for result in results:
        others = get_coordinates(result)
        if result.measurement is not None and axis in others:
            spot = Spot(others.pop(axis), result.measurement.rows_per_second)
            found.setdefault(json.dumps(others), (others, []))[1].append(spot)
    for _, spots in found.values():
        if all(is_number(spot.x) for spot in spots):
            spots.sort(key=lambda spot: spot.x)
    return [Curve(others, spots) for others, spots in found.values()]


def divide_speeds(after: Spread, before: Spread) -> Ratio:
    """Divides one throughput by another.

    Example:
        >>> divide_speeds(Spread(median=4.0, low=3.0, high=5.0), Spread(median=8.0, low=6.0, high=10.0))
        Ratio(median=0.5, low=0.3, high=0.8333333333333334)
    """
    return Ratio(after.median / before.median, after.low / before.high, after.high / before.low)


def measure_slope(before: Spot, after: Spot) -> Ratio:
    """Returns the slope between two spots on logarithmic axes: 1 is proportional, 0 flat, -1 inversely proportional.

    Example:
        >>> half = Spread(median=4.0, low=4.0, high=4.0)
        >>> measure_slope(Spot(10, Spread(median=8.0, low=8.0, high=8.0)), Spot(20, half)).median
        -1.0
    """
    decades = math.log(after.x / before.x)
    return Ratio(*(math.log(one) / decades for one in divide_speeds(after.rows_per_second, before.rows_per_second)))

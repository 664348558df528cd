"""A figure with one pair of axes, as all of ours look."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def plain_figure(title: str, x: str, y: str, height: float = 4.2) -> tuple[Figure, Axes]:
    """An empty figure with its axes named.

    Args:
        height: In inches; the width is 6.4.
    Example:
        >>> plain_figure("Learning curve", "step", "NE")[1].get_xlabel()
        'step'
    """
    figure = Figure(figsize=(6.4, height), layout="constrained", dpi=110)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    return figure, axes

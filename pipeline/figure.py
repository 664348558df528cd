"""The common style of our figures."""

import io

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def plain_figure(title: str, x: str, y: str, height: float = 4.2) -> tuple[Figure, Axes]:
    """Creates an empty figure with labelled axes.

    Args:
        height: In inches. The width is 6.4.
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


def to_svg(figure: Figure) -> str:
    """Draws a figure as SVG, with text as text.

    Example:
        >>> to_svg(plain_figure("Learning curve", "step", "NE")[0]).rstrip().endswith("</svg>")
        True
    """
    with io.StringIO() as file, rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()

"""The kinds of values that a column of features can hold."""

from typing import Literal

Kind = Literal["dense", "sparse", "scores"]
"""A number per row, a list of ids, or a list of numbers such as the scores of ids."""
KINDS: tuple[Kind, ...] = ("dense", "sparse", "scores")

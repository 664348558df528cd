"""CharacterizeConfig: which configurations are measured, on what data, and how often."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from pipeline.errors import ConfigError


class Workload(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Generated batches of any shape: what a step costs does not depend on what the numbers mean.

    Source:
        Acun et al. 2021, arXiv:2011.05497, section V: a test suite of models by their numbers of features, hash size,
        lookups and layers.
    """

    dense_features: NonNegativeInt = 13
    """Numbers of a row."""
    sparse_features: PositiveInt = 26
    """Lists of ids of a row, each with a table of its own."""
    hash_size: PositiveInt = 100_000
    """Rows of each table."""
    lookups: PositiveInt = 10
    """Ids of a list: of every one, or in the mean before lists are cut."""
    lengths: Literal["fixed", "power_law"] = "fixed"
    """How the lengths of lists are spread. power_law: most are short, few are long, as in logs."""
    truncation: PositiveInt = 32
    """Longer lists are cut to this many ids."""
    popularity: NonNegativeFloat = 1.05
    """The id of rank r is drawn with a chance proportional to r ** -this; 0: all ids alike."""


Axis = tuple[Any, ...] | Mapping[str, Mapping[str, Any]]
"""Values of one key, or names of points, each with the keys that it sets."""


class CharacterizeConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The efficiency study: a grid of configurations, each trained for some steps or judged by its NE."""

    experiment: str | None = None
    """Which of the paper's experiments this is, such as `E1`; decides its figure and what it is held against."""
    axes: Mapping[str, Axis] = {}
    """What differs. Either a dotted key of the config with its values, such as `training.batch_rows: [512, 2048]`, or a
    name of your own with named points, such as `mlp: {64^2: {model.bottom_mlp: [64, 64]}}`. `workload.` stands for
    `characterize.workload.`. Every combination is a point."""
    scale: float = Field(default=1.0, gt=0.0, le=1.0)
    """Makes the study smaller: each axis of numbers keeps this share of its values, at least its ends, and hash sizes
    are multiplied by it."""
    workload: Workload | None = None
    """Batches of this shape; None: the training rows of the config's own table."""
    data: Literal["memory", "files"] = "memory"
    """memory: batches are there before the clock starts. files: rows are read by the preprocessing service, as a
    training reads them."""
    measure: Literal["speed", "quality"] = "speed"
    """speed: some steps of each point. quality: NE on the validation rows, with the config's own learning rates and
    with those that a sweep finds (section `sweep`)."""
    warm_up_steps: PositiveInt = 3
    """Steps before the clock starts."""
    steps: PositiveInt = 8
    """Steps of one repeat, timed together; fewer where three repeats would take longer than `seconds`."""
    repeats: PositiveInt = 5
    """Repeats of each point; median and spread of them are reported."""
    seconds: PositiveInt | None = 6
    """Repeats of a point end after this long, but for the first three: slow points get fewer. None: all are made."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for axis, values in self.axes.items():
            if not values:
                raise ConfigError(f"characterize.axes '{axis}'", "at least one value", "none", "Add one.")
            for key in keys_of(axis, values):
                self._check(axis, key)
        if self.measure == "quality" and self.workload is not None:
            expected = "the config's own table: labels that are drawn cannot be learned"
            raise ConfigError("characterize.workload with measure=quality", expected, "a workload", "Set it to null.")
        return self

    def _check(self, axis: str, key: str) -> None:
        where = f"characterize.axes '{axis}'" if key == axis else f"characterize.axes '{axis}', key '{key}'"
        section, _, rest = key.partition(".")
        if section == "characterize" and rest != "data":
            expected = "`workload.` and a key of it, `characterize.data`, or a key of another section"
            raise ConfigError(where, expected, f"'{key}'", "Correct the key.")
        if section == "workload" and self.workload is None:
            remedy = "Add the section, if only `workload: {}`."
            raise ConfigError(where, "characterize.workload, which it changes", "none", remedy)
        other = next(name for name, values in self.axes.items() if key in keys_of(name, values))
        if other != axis:
            raise ConfigError(where, "a key of one axis alone", f"also a key of '{other}'", "Take it out of one.")


def keys_of(axis: str, values: Axis) -> list[str]:
    """What an axis sets, each key once.

    Example:
        >>> keys_of("mlp", {"64^2": {"model.bottom_mlp": [64, 64]}, "128": {"model.bottom_mlp": [128]}})
        ['model.bottom_mlp']
    """
    named = [key for settings in values.values() for key in settings] if isinstance(values, Mapping) else [axis]
    return list(dict.fromkeys(named))

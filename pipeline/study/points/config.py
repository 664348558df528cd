"""CharacterizeConfig: which configurations to measure, on what data, and how often."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError


class Workload(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Generated batches of any shape. The cost of a step does not depend on the meaning of the numbers.

    Source:
        Acun et al. 2021, arXiv:2011.05497, section V: a test suite of models by their numbers of features, hash size,
        lookups and layers.
    """

    dense_features: NonNegativeInt = 13
    """Dense columns."""
    sparse_features: PositiveInt = 26
    """Id lists per row, each with its own table."""
    hash_size: PositiveInt = 100_000
    """Rows of each table, or their mean with `hash_spread`."""
    hash_spread: tuple[PositiveFloat, PositiveFloat] | None = None
    """Rows of the smallest and of the largest table as shares of `hash_size`, such as [0.00001, 3.5]. Those between
    follow a power law. None: all tables have the same size."""
    lookups: PositiveInt = 10
    """Ids per list: exact for `fixed`, the mean before truncation for `power_law`. Of all tables, with
    `lookups_exponent`."""
    lookups_exponent: NonNegativeFloat = 0.0
    """The table with the r-th most lookups has a share of them proportional to r ** -lookups_exponent, whatever its
    size. 0: all tables have the same."""
    lengths: Literal["fixed", "power_law"] = "fixed"
    """Distribution of list lengths. power_law: most are short, few are long, as in logs."""
    truncation: PositiveInt = 32
    """Longer lists are cut to this many ids."""
    popularity: NonNegativeFloat = 1.05
    """Exponent: the id of rank r has a probability proportional to r ** -popularity. 0: uniform."""


Axis = tuple[Any, ...] | Mapping[str, Mapping[str, Any]]
"""Values of one key, or named points with the keys each sets."""


class CharacterizeConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The efficiency study: a grid of configurations. Each is trained for a few steps, or evaluated by its NE."""

    experiment: str | None = None
    """Experiment of the paper, such as `E1`. Determines the figure and the claims to compare with."""
    axes: Mapping[str, Axis] = {}
    """What varies. Either a dotted config key with its values, such as `training.batch_rows: [512, 2048]`, or a name of
    your own with named points, such as `mlp: {64^2: {model.bottom_mlp: [64, 64]}}`. `workload.` is short for
    `characterize.workload.`. Every combination is a point."""
    scale: float = Field(default=1.0, gt=0.0, le=1.0)
    """Shrinks the study. Each numeric axis keeps this share of its values, at least both ends. Hash sizes are
    multiplied by it."""
    workload: Workload | None = None
    """Shape of generated batches. None: the training rows of the config's table."""
    data: Literal["memory", "files"] = "memory"
    """memory: batches are in memory before the clock starts. files: the preprocessing service reads the rows, as in
    training."""
    measure: Literal["speed", "quality"] = "speed"
    """speed: time a few steps of each point. quality: NE on the validation rows, with the learning rates of the config
    and with those that a sweep finds (section `sweep`)."""
    warm_up_steps: PositiveInt = 3
    """Steps before the clock starts."""
    steps: PositiveInt = 8
    """Steps of one repeat, timed together. Fewer if three repeats would take longer than `seconds`."""
    repeats: PositiveInt = 5
    """Repeats of each point. Their median and range are reported."""
    seconds: PositiveInt | None = 6
    """Time limit for the repeats of a point, which gets at least three. None: no limit."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for axis, values in self.axes.items():
            if not values:
                raise ConfigError(f"characterize.axes '{axis}'", "at least one value", "none", "Add one.")
            for key in keys_of(axis, values):
                self._check(axis, key)
        if self.measure == "quality" and self.workload is not None:
            expected = "no workload, because a model cannot learn random labels"
            raise ConfigError("characterize.workload with measure=quality", expected, "one", "Set it to null.")
        return self

    def _check(self, axis: str, key: str) -> None:
        where = f"characterize.axes '{axis}'" if key == axis else f"characterize.axes '{axis}', key '{key}'"
        section, _, rest = key.partition(".")
        if section == "characterize" and rest != "data":
            expected = "`workload.` and a key of it, `characterize.data`, or a key of another section"
            raise ConfigError(where, expected, f"'{key}'", "Correct the key.")
        if section == "workload" and self.workload is None:
            remedy = "Add it, for example as `workload: {}`."
            raise ConfigError(where, "the section characterize.workload, which it changes", "none", remedy)
        other = next(name for name, values in self.axes.items() if key in keys_of(name, values))
        if other != axis:
            raise ConfigError(where, "a key of only one axis", f"also a key of '{other}'", "Remove it from one.")


def keys_of(axis: str, values: Axis) -> list[str]:
    """Lists the keys that an axis sets, each once.

    Example:
        >>> keys_of("mlp", {"64^2": {"model.bottom_mlp": [64, 64]}, "128": {"model.bottom_mlp": [128]}})
        ['model.bottom_mlp']
    """
    named = [key for settings in values.values() for key in settings] if isinstance(values, Mapping) else [axis]
    return list(dict.fromkeys(named))

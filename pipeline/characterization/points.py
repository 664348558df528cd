"""Points of a study: the combinations of the values along its axes, scaled to the machine."""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from pipeline.characterization.config import Axis, CharacterizeConfig
from pipeline.errors import ConfigError

HASH_SIZE = "workload.hash_size"


class StudyPoint(BaseModel, frozen=True):
    """One configuration of a study."""

    values: Mapping[str, Any]
    """Axis -> the value or the name of the point along it."""
    settings: Mapping[str, Any]
    """Dotted keys of the config -> values, put over the study's config."""

    @property
    def name(self) -> str:
        """What people call it by.

        Example:
            >>> StudyPoint(values={"training.batch_rows": 512, "mlp": "64^2"}, settings={}).name
            'batch_rows 512, mlp 64^2'
        """
        return ", ".join(f"{axis.rsplit('.', 1)[-1]} {value}" for axis, value in self.values.items())

    @property
    def key(self) -> str:
        """Names its files: a hash of what it sets."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def list_points(config: CharacterizeConfig) -> list[StudyPoint]:
    """All points of the study, in order: the last axis changes fastest.

    Raises:
        ConfigError: If two of them are the same.
    Example:
        >>> axes = {"workload.dense_features": (64, 256, 1024), "mlp": {"64^2": {"model.bottom_mlp": [64, 64]}}}
        >>> [point.name for point in list_points(CharacterizeConfig(axes=axes, scale=0.5, workload={}))]
        ['dense_features 64, mlp 64^2', 'dense_features 1024, mlp 64^2']
    """
    ways = [
        [({axis: value}, settings) for value, settings in expand_axis(axis, values, config.scale)]
        for axis, values in config.axes.items()
    ]
    base = (
        {}
        if config.workload is None or HASH_SIZE in config.axes
        else scale_settings({HASH_SIZE: config.workload.hash_size}, config.scale)
    )
    found = []
    for combination in itertools.product(*ways):
        values: dict[str, Any] = {}
        settings: dict[str, Any] = dict(base)
        for value, setting in combination:
            values |= value
            settings |= setting
        found.append(StudyPoint(values=values, settings={_whole(key): value for key, value in settings.items()}))
    _refuse_twins(found)
    return found


def _refuse_twins(found: Sequence[StudyPoint]) -> None:
    seen: dict[str, str] = {}
    for point in found:
        if point.key in seen:
            raise ConfigError(
                "characterize.axes", "points that differ", f"twice: {seen[point.key]}; {point.name}",
                "Take one out, or raise characterize.scale.",
            )  # fmt: skip
        seen[point.key] = point.name


def expand_axis(axis: str, values: Axis, scale: float) -> list[tuple[Any, dict[str, Any]]]:
    """The values along an axis that are kept, each with what it sets."""
    if isinstance(values, Mapping):
        return [(name, scale_settings(settings, scale)) for name, settings in values.items()]
    settings = [scale_settings({axis: value}, scale) for value in thin_values(values, scale)]
    return [(one[axis], one) for one in settings]


def thin_values(values: Sequence[Any], scale: float) -> list[Any]:
    """This share of the values, evenly spread with both ends; values other than numbers stay.

    Example:
        >>> thin_values([64, 128, 256, 512, 1024], 0.5), thin_values(["dot", "cat", "dcn"], 0.1)
        ([64, 256, 1024], ['dot', 'cat', 'dcn'])
    """
    if not all(isinstance(value, int | float) for value in values) or len(values) < 3:
        return list(values)
    count = max(math.ceil(len(values) * scale), 2)
    last = len(values) - 1
    return [values[round(i * last / (count - 1))] for i in range(count)]


def scale_settings(settings: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """The settings with smaller hash sizes; what is no number is refused where the config is loaded."""
    smaller = {key: value for key, value in settings.items() if key == HASH_SIZE and isinstance(value, int | float)}
    return {**settings, **{key: max(round(value * scale), 1) for key, value in smaller.items()}}


def _whole(key: str) -> str:
    return f"characterize.{key}" if key.startswith("workload.") else key

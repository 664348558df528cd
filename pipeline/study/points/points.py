"""Points of a study: all combinations of the values of its axes, scaled to the machine."""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from pipeline.errors import ConfigError
from pipeline.study.points.config import Axis, CharacterizeConfig

HASH_SIZE = "workload.hash_size"


class StudyPoint(BaseModel, frozen=True):
    """One configuration of a study."""

    values: Mapping[str, Any]
    """Axis -> the value, or the name of a named point."""
    settings: Mapping[str, Any]
    """Dotted config key -> value, over the config of the study."""

    @property
    def name(self) -> str:
        """The name in tables and figures.

        Example:
            >>> StudyPoint(values={"training.batch_rows": 512, "mlp": "64^2"}, settings={}).name
            'batch_rows 512, mlp 64^2'
        """
        return ", ".join(f"{axis.rsplit('.', 1)[-1]} {value}" for axis, value in self.values.items())

    @property
    def key(self) -> str:
        """File name: a hash of the settings."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def list_points(config: CharacterizeConfig) -> list[StudyPoint]:
    """Lists all points of the study. The last axis changes fastest.

    Raises:
        ConfigError: If two points have the same settings.
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
                "characterize.axes", "points that differ", f"two equal ones: {seen[point.key]}; {point.name}",
                "Remove one, or raise characterize.scale.",
            )  # fmt: skip
        seen[point.key] = point.name


def expand_axis(axis: str, values: Axis, scale: float) -> list[tuple[Any, dict[str, Any]]]:
    """Lists the values of an axis at this scale, each with its settings."""
    if isinstance(values, Mapping):
        return [(name, scale_settings(settings, scale)) for name, settings in values.items()]
    settings = [scale_settings({axis: value}, scale) for value in thin_values(values, scale)]
    return [(one[axis], one) for one in settings]


def thin_values(values: Sequence[Any], scale: float) -> list[Any]:
    """Returns this share of the values, evenly spaced and with both ends. Other values than numbers all stay.

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
    """Scales the hash sizes. Loading the config refuses values that are not numbers."""
    smaller = {key: value for key, value in settings.items() if key == HASH_SIZE and isinstance(value, int | float)}
    return {**settings, **{key: max(round(value * scale), 1) for key, value in smaller.items()}}


def _whole(key: str) -> str:
    return f"characterize.{key}" if key.startswith("workload.") else key

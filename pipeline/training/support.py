"""What the kinds of step support: a table for each that limits other settings. Whole steps have none.

`TrainConfig` checks them, so this module imports nothing heavy and takes a config of any type.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ConfigError

LEAST_HANG_SECONDS = 180
"""Least `hang_seconds` of a training whose ranks may become fewer."""
INEXACT_REASON = {
    "data_parallel": "whose copies add the gradients of each rank first",
    "grid_shard": "which adds the vectors of a bag rank by rank",
    "row_wise": "which adds the vectors of a bag rank by rank",
    "table_row_wise": "which adds the vectors of a bag rank by rank",
}
"""Sharding types whose sums depend on the number of ranks, and why."""


@dataclass(frozen=True)
class Limit:
    """What a key of the config must be."""

    expected: str
    """In words. A key of the config in braces stands for its value."""
    fits: Callable[[Any, Any], bool]
    """(value of the key, config) -> whether it fits."""


def only(*values: Any, why: str) -> Limit:
    """Limits a key to some values.

    Example:
        >>> only(None, "fp32", why="since there is no other").expected
        'none or fp32, since there is no other'
    """
    names = " or ".join(f"{value}".lower() for value in values)
    return Limit(f"{names}, {why}", lambda value, config: value in values)


@dataclass(frozen=True)
class Support:
    """What can be set beside a setting."""

    key: str
    """Key of the setting."""
    off: Any
    """Its value without which there are no limits."""
    limits: Mapping[str, Limit]
    """Key -> what it must be."""
    inexact_sharding: bool = True
    """Whether tables may be sharded in a way whose sums depend on the number of ranks."""


SHARED = Support(
    "sync",
    "synchronous",
    {
        "launcher": only("processes", why="since ranks share memory of one machine"),
        "device": only("auto", "cpu", why="since tables are shared in host memory"),
        "sharding": only("auto", "table_wise", why="since every rank uses whole tables"),
        "embedding_kernel": only("auto", "numba", why="since FBGEMM's kernel cannot share tables"),
        "table_precision": only("fp32", why="since the numba kernel has no other"),
        "vector_communication": only("fp32", why="since no vectors are sent"),
        "gradient_communication": only("fp32", why="since no gradients are sent"),
        "on_nonfinite": only("stop", why="since ranks do not agree on a batch to leave out"),
        "checkpoint_every_seconds": only(None, why="since ranks meet by steps"),
        "average_from_step": only(None, why="since weights never belong to one step"),
        "average_from": only(None, why="since weights never belong to one step"),
    },
)
"""Steps of ranks that share tables and do not wait for one another."""
LANES = Support(
    "lanes",
    None,
    {
        "world_size": Limit("a divisor of lanes={lanes}", lambda ranks, config: config.lanes % ranks == 0),
        "batch_rows": Limit("at least lanes={lanes}, one row per lane", lambda rows, config: rows >= config.lanes),
        "sync": only("synchronous", why="since other ranks update in no fixed order"),
        "device": only("auto", "cpu", why="since sums on CUDA have no fixed order"),
        "embedding_kernel": only("auto", "numba", why="since FBGEMM's kernel adds gradients in no fixed order"),
        "table_precision": only("fp32", why="since the numba kernel has no other"),
        "vector_communication": only("fp32", why="since only vectors that are sent would be rounded"),
        "gradient_communication": only("fp32", why="since only gradients that are sent would be rounded"),
        "compile": only(False, why="since the code depends on the sizes that came first"),
    },
    inexact_sharding=False,
)
"""Steps in lanes, whose weights depend on the data alone."""
FEWER_RANKS = Support(
    "least_ranks",
    None,
    {
        "launcher": only("ray", why="which knows the room of its nodes"),
        "lanes": Limit("a number: the weights then do not depend on the ranks", lambda lanes, _: lanes is not None),
        "world_size": Limit("at least as many", lambda ranks, config: ranks >= config.least_ranks),
        "hosts": only(1, why="since hosts that remain may not have as many ranks each"),
        "hang_seconds": Limit(
            f"{LEAST_HANG_SECONDS} or more, since the search for room takes minutes",
            lambda seconds, _: seconds is None or seconds >= LEAST_HANG_SECONDS,
        ),
    },
)
"""Steps of ranks that may become fewer."""


def _chosen(config: Any) -> Iterator[Support]:
    return (one for one in (SHARED, LANES, FEWER_RANKS) if getattr(config, one.key) != one.off)


def supports(config: Any, key: str, value: Any) -> bool:
    """Whether the kind of step would support another value of a key."""
    return all(one.limits[key].fits(value, config) for one in _chosen(config) if key in one.limits)


def require_support(config: Any, sharding_types: Collection[str]) -> None:
    """Refuses the first setting that the kind of step does not support.

    Args:
        config: A `TrainConfig`.
        sharding_types: All that its `sharding` names.
    """
    for support in _chosen(config):
        beside = f"with {support.key}={getattr(config, support.key)}"
        without = f"leave out {support.key}" if support.off is None else f"set {support.key}: {support.off}"
        remedy = f"Change it, or {without}."
        for key, limit in support.limits.items():
            value = getattr(config, key)
            if not limit.fits(value, config):
                expected = limit.expected.format_map(vars(config))
                raise ConfigError(f"training.{key} {beside}", expected, f"{value}", remedy)
        for kind in () if support.inexact_sharding else sorted(INEXACT_REASON.keys() & sharding_types):
            raise ConfigError(
                f"training.sharding '{kind}' {beside}",
                "table_wise, or column_wise or table_column_wise with an element-wise table optimizer",
                f"{kind}, {INEXACT_REASON[kind]}", remedy,
            )  # fmt: skip

"""Settings that a kind of step does not support are refused, each with its reason."""

from collections.abc import Collection
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.training.config import TrainConfig
from pipeline.training.support import FEWER_RANKS, LANES, SHARED, Support, supports


@pytest.mark.parametrize("support", [SHARED, LANES, FEWER_RANKS], ids=lambda support: support.key)
def test_every_limit_has_a_refusal_below(support: Support) -> None:
    tested: dict[str, Collection[str]] = {"sync": WRONG, "lanes": REFUSED, "least_ranks": FIXED}
    assert support.limits.keys() == set(tested[support.key])


@pytest.mark.parametrize(("settings", "fits"), [({}, True), ({"lanes": 4}, False), ({"sync": "easgd"}, False)])
def test_a_kind_of_step_says_whether_it_would_run_on_cuda(settings: dict[str, Any], fits: bool) -> None:
    assert supports(TrainConfig(**settings), "device", "cuda") is fits


WRONG = {
    "launcher": ("ray", "processes, since ranks share memory of one machine"),
    "device": ("cuda", "auto or cpu, since tables are shared in host memory"),
    "sharding": ("row_wise", "auto or table_wise, since every rank uses whole tables"),
    "embedding_kernel": ("fbgemm", "auto or numba, since FBGEMM's kernel cannot share tables"),
    "table_precision": ("fp16", "fp32, since the numba kernel has no other"),
    "vector_communication": ("fp16", "fp32, since no vectors are sent"),
    "gradient_communication": ("fp16", "fp32, since no gradients are sent"),
    "on_nonfinite": ("skip", "stop, since ranks do not agree on a batch to leave out"),
    "checkpoint_every_seconds": (60, "none, since ranks meet by steps"),
    "average_from_step": (100, "none, since weights never belong to one step"),
    "average_from": (0.5, "none, since weights never belong to one step"),
}


@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize("sync", ["easgd", "hogwild"])
def test_incompatible_settings_are_refused(sync: str, key: str) -> None:
    value, expected = WRONG[key]
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{"sync": sync, key: value})
    assert str(caught.value) == (
        f"training.{key} with sync={sync}: expected {expected}, got {value}. Change it, or set sync: synchronous."
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "world_size": ({"world_size": 3}, "training.world_size with lanes=4: expected a divisor of lanes=4, got 3."),
    "batch_rows": (
        {"batch_rows": 3},
        "training.batch_rows with lanes=4: expected at least lanes=4, one row per lane, got 3.",
    ),
    "sync": (
        {"sync": "hogwild"},
        "training.sync with lanes=4: expected synchronous, since other ranks update in no fixed order, got hogwild.",
    ),
    "device": (
        {"device": "cuda"},
        "training.device with lanes=4: expected auto or cpu, since sums on CUDA have no fixed order, got cuda.",
    ),
    "embedding_kernel": (
        {"embedding_kernel": "fbgemm"},
        "training.embedding_kernel with lanes=4: expected auto or numba, since FBGEMM's kernel adds gradients in no "
        "fixed order, got fbgemm.",
    ),
    "table_precision": (
        {"table_precision": "fp16"},
        "training.table_precision with lanes=4: expected fp32, since the numba kernel has no other, got fp16.",
    ),
    "vector_communication": (
        {"vector_communication": "fp16"},
        "training.vector_communication with lanes=4: expected fp32, since only vectors that are sent would be rounded, "
        "got fp16.",
    ),
    "gradient_communication": (
        {"gradient_communication": "fp16"},
        "training.gradient_communication with lanes=4: expected fp32, since only gradients that are sent would be "
        "rounded, got fp16.",
    ),
    "compile": (
        {"compile": True},
        "training.compile with lanes=4: expected false, since the code depends on the sizes that came first, got True.",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_would_change_the_bits_are_refused(key: str) -> None:
    settings, sentence = REFUSED[key]
    with pytest.raises((ConfigError, ValidationError)) as error:
        TrainConfig(**{"lanes": 4, "world_size": 2} | settings)
    assert f"{sentence} Change it, or leave out lanes." in str(error.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("row_wise", "which adds the vectors of a bag rank by rank"),
        ("table_row_wise", "which adds the vectors of a bag rank by rank"),
        ("data_parallel", "whose copies add the gradients of each rank first"),
    ],
)
def test_sharding_types_whose_sums_depend_on_the_ranks_are_refused(kind: str, reason: str) -> None:
    with pytest.raises((ConfigError, ValidationError)) as error:
        TrainConfig(lanes=4, sharding=({"tables": ["a*"], "kind": kind},))  # type: ignore[arg-type]
    assert (
        f"training.sharding '{kind}' with lanes=4: expected table_wise, or column_wise or table_column_wise with an "
        f"element-wise table optimizer, got {kind}, {reason}. Change it, or leave out lanes." in str(error.value)
    )


FIXED: dict[str, tuple[dict[str, Any], str]] = {
    "launcher": ({"launcher": "processes"}, "ray, which knows the room of its nodes, got processes."),
    "lanes": ({"lanes": None}, "a number: the weights then do not depend on the ranks, got None."),
    "world_size": ({"world_size": 1}, "at least as many, got 1."),
    "hosts": ({"hosts": 2}, "1, since hosts that remain may not have as many ranks each, got 2."),
    "hang_seconds": ({"hang_seconds": 100}, "180 or more, since the search for room takes minutes, got 100."),
}


@pytest.mark.parametrize("key", FIXED)
def test_ranks_become_fewer_only_on_ray_and_in_lanes(key: str) -> None:
    settings, sentence = FIXED[key]
    given = {"lanes": 12, "world_size": 6, "launcher": "ray", "least_ranks": 2}
    with pytest.raises((ConfigError, ValidationError)) as error:
        TrainConfig(**given | settings)
    assert f"training.{key} with least_ranks=2: expected {sentence} Change it, or leave out" in str(error.value)
    assert TrainConfig(**given).rank_numbers == (6, 4, 3, 2)

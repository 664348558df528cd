"""Weights of a training in lanes depend on its data alone: not on ranks, sharding plan or threads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.config.run import load
from pipeline.errors import ConfigError
from pipeline.training.config import TrainConfig
from pipeline.training.launch.processes import Limits, run_ranks
from tests.pipeline.training.laned import Cases

ROOT = Path(__file__).resolve().parents[3]


def rules(**kinds: str) -> list[dict[str, Any]]:
    return [{"tables": [table], "kind": kind} for table, kind in kinds.items()]


ADAGRAD: dict[str, Any] = {"table_optimizer": "adagrad"}
SAME: dict[str, dict[str, dict[str, Any]]] = {
    "row-wise adagrad": {"table_wise": {}, "auto": {"sharding": "auto"}, "ahead": {"send_ids_ahead": True}},
    "adagrad": {
        "by_numbers": ADAGRAD,
        "column_wise": ADAGRAD | {"sharding": "column_wise"},
        "table_column_wise": ADAGRAD | {"sharding": "table_column_wise"},
        "mixed": ADAGRAD | {"sharding": rules(user="column_wise", goods="table_wise", tags="column_wise")},
    },
    "adam": {
        "adam": {"table_optimizer": "adam", "table_weight_decay": 1e-3, "dense_gradient_norm": 0.05},
        "adam_column_wise": {
            "table_optimizer": "adam", "table_weight_decay": 1e-3, "dense_gradient_norm": 0.05,
            "sharding": "column_wise",
        },
    },
    "bf16": {"bf16": {"dense_precision": "bf16"}},
    "dropout": {"dropout": {"dropout": 0.3}},
    "skip": {"skip": {"on_nonfinite": "skip", "table_gradient_limit": 1e-3, "dense_optimizer": "adagrad"}},
}  # fmt: skip
"""Trainings that differ in nothing that is learned -> cases of `laned.py`."""
PLAIN = {"plain": {"lanes": None}}
Found = dict[str, dict[str, Any]]


def by_ranks(world_size: int, threads: int, folder: Path, extra: Mapping[str, dict[str, Any]]) -> Found:
    cases = {name: settings for group in SAME.values() for name, settings in group.items()} | extra
    spec = Cases(world_size=world_size, cases=cases)
    run_ranks(
        "tests.pipeline.training.laned", spec, folder, world_size, threads, Limits(deadline_seconds=250), print, ROOT
    )
    found: Found = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What one rank, one rank with two threads, two, three and four ranks find."""
    runs = {"one": (1, 1), "two threads": (1, 2), "two": (2, 1), "three": (3, 1), "four": (4, 1)}
    return {
        name: by_ranks(*numbers, tmp_path_factory.mktemp(f"ranks-{numbers[0]}-{numbers[1]}"), PLAIN)
        for name, numbers in runs.items()
    }


@pytest.mark.parametrize("training", SAME)
def test_every_number_of_ranks_and_every_plan_ends_with_the_same_bits(found: dict[str, Found], training: str) -> None:
    """Weights, optimizer state, losses and validation, over whole and short batches."""
    ends = {(ranks, case): runs[case] for ranks, runs in found.items() for case in SAME[training]}
    first = found["one"][next(iter(SAME[training]))]
    assert {key: end for key, end in ends.items() if end != first} == {}


def test_without_lanes_the_bits_depend_on_the_ranks(found: dict[str, Found]) -> None:
    assert found["two"]["plain"]["weights"] != found["one"]["plain"]["weights"]
    assert found["one"]["plain"]["weights"] != found["one"]["table_wise"]["weights"]


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


def test_lanes_are_part_of_the_identity_and_then_ranks_are_not() -> None:
    def semantics(**training: Any) -> dict[str, Any]:
        return load(
            ROOT / "configs/smoke.yaml", {f"training.{key}": value for key, value in training.items()}
        ).semantics()

    plain = semantics()
    assert "lanes" not in plain["training"]
    assert semantics(lanes=4) != plain
    assert semantics(lanes=4) != semantics(lanes=8)
    assert semantics(lanes=4, world_size=1, sharding="table_wise") == semantics(lanes=4, world_size=4)
    assert semantics(world_size=1) != plain

"""Placements: of the kind asked for, the same on every rank, refused before ranks start."""

import pytest
import torch

from models.config import DLRMConfig
from models.dlrm import DLRM, Bag
from pipeline.errors import TrainingError
from pipeline.training.sharding import KINDS, describe, make_plan, sharders

CPU = torch.device("cpu")
BAGS = [Bag(f"f{i}", f"t{i}", 100 * (i + 1), "sum") for i in range(5)]


def model() -> DLRM:
    return DLRM(DLRMConfig(embedding_width=8), 2, BAGS, device="meta")


@pytest.mark.parametrize("sharding", ["auto", "table_wise", "row_wise"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_plan_is_of_the_kind_and_repeatable(sharding: str, world_size: int) -> None:
    rows, again = (describe(make_plan(model(), sharding, world_size, 64, CPU)) for _ in range(2))
    assert rows == again
    assert [row["table"] for row in rows] == [bag.table for bag in BAGS]
    for row in rows:
        assert row["sharding"] in KINDS[sharding]
        assert row["sharding"] != "data_parallel"  # silently wrong with an optimizer in the backward pass
        assert row["kernel"] == "fused"
        assert set(row["ranks"]) <= set(range(world_size))
        assert len(row["ranks"]) == (world_size if row["sharding"] == "row_wise" else 1)
    assert {rank for row in rows for rank in row["ranks"]} == set(range(world_size))


def test_sharder_offers_nothing_else() -> None:
    (sharder,) = sharders("row_wise")
    assert sharder.sharding_types("cpu") == ["row_wise"]
    assert sharder.compute_kernels("row_wise", "cpu") == ["fused"]


def test_a_plan_that_cannot_be_made() -> None:
    huge = DLRM(DLRMConfig(embedding_width=256), 2, [Bag("f", "t", 10**10, "sum")], device="meta")
    with pytest.raises(TrainingError) as caught:
        make_plan(huge, "table_wise", 2, 64, CPU)
    message = str(caught.value)
    assert message.startswith("training.sharding 'table_wise': expected a placement of 1 tables on 2 ranks, got ")
    assert message.endswith(". Take fewer ranks, smaller tables, or `auto`.")

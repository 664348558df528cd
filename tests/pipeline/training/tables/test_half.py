"""fp16 tables on CPU move as fp32 tables do, in the mean, and a resumed training repeats what was drawn."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType

from pipeline.training.config import TrainConfig
from pipeline.training.tables.bags import NumbaBags, set_update_number, uses_fbgemm
from pipeline.training.tables.half import HalfBags, round_half
from tests.pipeline.training.tables.drawn_bags import OPTIMIZERS, make_bags

TABLES = [(9, 4), (40, 8), (7, 20)]
"""(rows, width) of each."""
OWNERS = [0, 1, 1, 2]
"""Table of each feature."""
BAGS = 24
Steps = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


make = partial(make_bags, TABLES, OWNERS)


def batches() -> Steps:
    """(ids, offsets, weights of the ids, gradient) of some steps, with empty bags, repeated ids and weights of 0."""
    random, made = np.random.default_rng(3), []
    for _ in range(5):
        lengths = random.integers(0, 6, len(OWNERS) * BAGS)
        ids = [random.integers(0, TABLES[OWNERS[i // BAGS]][0] * 3 // 4, n) for i, n in enumerate(lengths)]
        weights = np.round(random.normal(size=lengths.sum()), 1)
        gradient = random.normal(size=(BAGS, sum(TABLES[owner][1] for owner in OWNERS)))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        floats = [torch.from_numpy(values.astype(np.float32)) for values in (weights, gradient)]
        made.append((torch.from_numpy(np.concatenate(ids)), torch.from_numpy(offsets), floats[0], floats[1]))
    return made


def train(bags: Any, weighted: bool) -> list[torch.Tensor]:
    """Returns the pooled vectors of every step."""
    pooled = []
    for step, (ids, offsets, weights, gradient) in enumerate(batches()):
        set_update_number(bags, step + 1)
        out = bags(ids, offsets, weights) if weighted else bags(ids, offsets)
        pooled.append(out.detach().clone())
        out.backward(gradient)
    return pooled


def pair(optimizer: str, mean: bool, threads: int = 1, **settings: Any) -> tuple[Any, Any]:
    """Tables in fp16 and in fp32 with the same numbers."""
    half = make(HalfBags, optimizer, mean, threads, weights_precision=SparseType.FP16, **settings)
    full = make(NumbaBags, optimizer, mean, **settings)
    for one, other in zip(full.split_embedding_weights(), half.split_embedding_weights(), strict=True):
        assert other.dtype == torch.float16
        one.copy_(other.float())
    return half, full


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mean", [False, True])
def test_fp16_tables_follow_fp32_ones_up_to_their_rounding(optimizer: str, mean: bool) -> None:
    half, full = pair(optimizer, mean, 2, weight_decay=0.1)
    first = [table.clone() for table in half.split_embedding_weights()]
    for one, other in zip(train(half, weighted=not mean), train(full, weighted=not mean), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    for old, one, other in zip(first, half.split_embedding_weights(), full.split_embedding_weights(), strict=True):
        torch.testing.assert_close(one.float(), other, atol=5e-3, rtol=0.0)
        assert one[other.eq(old.float())].equal(old[other.eq(old.float())])  # what was not read stays
    states = zip(half.get_optimizer_state(), full.get_optimizer_state(), strict=True)
    for ours, theirs in states:
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_resumed_training_repeats_every_bit(optimizer: str, threads: int) -> None:
    runs = []
    for stop in (0, 3):  # in the other one, all state moves to new tables after three steps
        bags = make(HalfBags, optimizer, False, threads if stop else 1, weights_precision=SparseType.FP16)
        for step, (ids, offsets, weights, gradient) in enumerate(batches()):
            if stop and step == stop:
                fresh = make(HalfBags, optimizer, False, 2, weights_precision=SparseType.FP16)
                for old, new in zip(bags.split_embedding_weights(), fresh.split_embedding_weights(), strict=True):
                    new.copy_(old)
                for old, new in zip(bags.get_optimizer_state(), fresh.get_optimizer_state(), strict=True):
                    for key, value in old.items():
                        new[key].copy_(value)
                bags = fresh
            set_update_number(bags, step + 1)
            bags(ids, offsets, weights).backward(gradient)
        runs.append([table.clone() for table in bags.split_embedding_weights()])
    for one, other in zip(*runs, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("start", [1.0, -0.3, 1e-5, 300.0])
def test_small_updates_move_the_mean_as_in_fp32(start: float) -> None:
    """Each is a hundredth of the distance between neighbours in fp16, so rounding to the nearest would lose all."""
    size = np.spacing(np.float16(abs(start))).astype(np.float32) / np.float32(100)
    numbers = np.full((5_000, 16), np.float16(start), np.float32)
    before, steps = numbers.mean(dtype=np.float64), 400
    for step in range(steps):
        numbers -= size
        round_half(numbers, numbers.view(np.uint32), np.arange(5_000), 7, step)
        assert (numbers.astype(np.float16).astype(np.float32) == numbers).all()
    moved = before - numbers.mean(dtype=np.float64)
    assert moved == pytest.approx(steps * float(size), rel=0.01)


def test_other_rows_tables_and_steps_draw_other_numbers() -> None:
    def drawn(rows: np.ndarray, name: int, step: int) -> np.ndarray:
        numbers = np.full((len(rows), 64), 1.0 + 2.0**-11, np.float32)  # halfway between two neighbours
        round_half(numbers, numbers.view(np.uint32), rows, name, step)
        return numbers > 1.0

    rows = np.arange(64)
    first = drawn(rows, 1, 1)
    assert (drawn(rows, 1, 1) == first).all()
    assert (drawn(rows[::-1].copy(), 1, 1) == first[::-1]).all()
    others = [drawn(rows, 2, 1), drawn(rows, 1, 2), drawn(rows + 64, 1, 1), first[:, ::-1], first[::-1]]
    for other in others:
        assert 0.4 < (other == first).mean() < 0.6
    assert 0.45 < first.mean() < 0.55


def test_numbers_that_fp16_has_stay_and_large_ones_stay_finite() -> None:
    kept = np.array([[0.0, -0.0, 1.0, -2.5, 65_504.0, 2.0**-24, -(2.0**-14), np.nan, np.inf, -np.inf]], np.float32)
    for step in range(50):
        numbers = kept.copy()
        round_half(numbers, numbers.view(np.uint32), np.array([3]), 1, step)
        np.testing.assert_array_equal(numbers, kept)
        large = np.array([[65_510.0, -1e9, 65_519.0]], np.float32)
        round_half(large, large.view(np.uint32), np.array([3]), 1, step)
        assert large.tolist() == [[65_504.0, -65_504.0, 65_504.0]]


def test_ids_outside_are_refused() -> None:
    bags = make(HalfBags, "sgd", False, weights_precision=SparseType.FP16)
    ids, offsets, *_ = batches()[0]
    ids[5] = 10**6
    with pytest.raises(IndexError, match="1 ids outside"):
        bags(ids, offsets)


@pytest.mark.parametrize("kernel", ["auto", "fbgemm"])
def test_fp16_tables_on_cpu_always_have_our_kernel(kernel: Any) -> None:
    config = TrainConfig(embedding_kernel=kernel, table_precision="fp16")
    assert not uses_fbgemm(config, "cpu")
    assert uses_fbgemm(config, "cuda")

"""The contestants train the same model on the same batches, and the command prints its result. Nothing is timed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import cuda, trainers, training
from benchmarks.trainers import CONTESTANTS, LANES, ON_CUDA, StepShape, batches
from benchmarks.wide_table import wide_table
from pipeline.study.measure.machine import Machine

SMALL = StepShape(tables=3, rows=50, width=8, batch_rows=32, ids=3)


def test_ranks_share_the_global_batches() -> None:
    [whole], *halves = (batches(SMALL, rank, ranks, count=1) for rank, ranks in ((0, 1), (0, 2), (1, 2)))
    assert torch.cat([half.labels for [half] in halves]).equal(whole.labels)
    for name in trainers.names(SMALL):
        values = [half.sparse[name].values() for [half] in halves]
        assert torch.cat(values).equal(whole.sparse[name].values())


def test_a_batch_has_as_many_ids_as_configured() -> None:
    lengths = batches(replace(SMALL, batch_rows=4_096), count=1)[0].sparse.lengths()
    assert (lengths.min(), lengths.max()) == (1, 5)
    assert lengths.float().mean().item() == pytest.approx(3, abs=0.05)
    assert set(batches(replace(SMALL, ids=1), count=1)[0].sparse.lengths().tolist()) == {1}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in CONTESTANTS if "compiled" not in name and name not in ON_CUDA])
def test_contestants_learn(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contestant's loss on its own batches falls, so it is not an empty loop."""
    torch.manual_seed(1)
    losses: list[float] = []
    loss = torch.nn.functional.binary_cross_entropy_with_logits

    def seen(*words: object, **settings: object) -> torch.Tensor:
        value = loss(*words, **settings)  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor):  # TorchRec's pipeline traces the model once with a stand-in
            losses.append(value.mean().item())
        return value

    monkeypatch.setattr(torch.nn.functional, "binary_cross_entropy_with_logits", seen)
    step = CONTESTANTS[name](SMALL, 0, 1, torch.device("cpu"))
    for _ in range(60):
        step()
    lanes = int(name.rsplit("_", 1)[1]) if name in LANES else 1
    assert len(losses) == 60 * lanes
    assert np.mean(losses[-6 * lanes :]) < 0.8 * np.mean(losses[: 6 * lanes])


def test_the_floor_agrees_with_a_calculation_by_hand() -> None:
    shape = StepShape(tables=1, rows=4, width=2, batch_rows=3, ids=1)
    rates = {"fp32_gflops": 1e-6, "bf16_gflops": 2e-6, "read_gb_per_second": 1e-6}
    weights = 13 * 512 + 512 * 256 + 256 * 2 + (1 + 2) * 512 + 512 * 256 + 256 * 1
    operations = 3 * (6 * weights + 4 * 2 * 2 * 2)
    distinct = len(set(batches(shape, count=1)[0].sparse.values().tolist()))
    memory = distinct * 2 * 4 * 3
    assert training.floor(shape, rates) == pytest.approx({"fp32": operations + memory, "bf16": operations / 2 + memory})


def test_speedup_is_over_the_better_pipeline() -> None:
    rows = [
        {"shape": "lists", "ranks": 1, "contestant": name, "median_ms": time}
        for name, time in (("torchrec_base", 30.0), ("torchrec_sparse_dist", 20.0), ("ours", 8.0))
    ]
    assert training.speedup(rows, "lists", "ours") == 2.5


@pytest.mark.nightly
def test_the_command_measures_its_contestants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    contestants = {name: CONTESTANTS[name] for name in (*training.BY_HAND, "ours")}
    monkeypatch.setattr(training, "CONTESTANTS", contestants)
    monkeypatch.setattr(training, "ON_RANKS", ["ours"])
    monkeypatch.setattr(training, "SOME", tuple(contestants))
    monkeypatch.setattr(training, "FIRST", training.TRIAL)
    monkeypatch.setattr(training, "FILE_STEPS", 3)
    ceilings = Machine(
        cpu="some", cores=1, memory_bytes=1, threads=1, fp32_gflops=10.0, bf16_gflops=10.0, read_gb_per_second=10.0,
        random_gb_per_second=10.0,
    )  # fmt: skip
    monkeypatch.setattr(training, "ceilings", lambda threads: ceilings)
    wide_table(tmp_path, 13_000)
    words = ["--rounds", "1", "--steps", "1", "--shapes", "tiny", "--rows", "13000", "--folder", str(tmp_path)]
    training.main([*words, "--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {(row["contestant"], row["ranks"]) for row in figures["passes"]} >= {(name, 1) for name in contestants}
    assert figures["slowest_speedup"] == figures["speedups"]["tiny"] > 0
    assert figures["files_ratio"] > 0
    assert "| tiny | ours | 1 |" in training.as_text(figures)


def test_floors_of_a_step_on_cuda_count_what_it_must_do() -> None:
    """One row, two tables of one id each: every product, row and byte counted by hand."""
    shape = StepShape(tables=2, rows=50, width=8, batch_rows=1, ids=1)
    rates = {"fp32_gflops": 0.2, "bf16_gflops": 0.4, "read_gb_per_second": 1e-4, "send_gb_per_second": 5e-5}
    weights = 13 * 512 + 512 * 256 + 256 * 8 + (3 + 8) * 512 + 512 * 256 + 256 * 1
    products = 6 * weights + 4 * 3 * 3 * 8  # three vectors: all pairs, forward and backward
    sent = 4 * (2 + 2 + 13 + 1 + 1)  # ids, lengths, numbers, label, weight
    assert cuda.floors(shape, rates) == {
        "fp32 products": round(1e-6 * products / 0.2, 3),
        "bf16 products": round(1e-6 * products / 0.4, 3),
        "tables": round(1e-6 * (2 + 2 * 2) * 8 * 4 / 1e-4, 3),
        "copy": round(1e-6 * sent / 5e-5, 3),
    }

"""Points measured one after the other: their results, their memory, and points that fail."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from models.config import DLRMConfig
from pipeline.jobs.training.rank.model import add_sharding_plan, build_model
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.service import Service
from pipeline.study.measure.rank import MeasuredPoint, MeasureSpec, MeasureTask, load_batches, measure_all
from pipeline.study.measure.results import Measurement
from pipeline.study.points.config import CharacterizeConfig, Workload
from pipeline.study.points.workload import make_plan
from pipeline.training.config import TrainConfig
from pipeline.training.launch.processes import Event, Limits, run_ranks
from pipeline.training.restore import Restore
from pipeline.training.state.checkpoint import full_state
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.trainer import Trainer, TrainingData
from tests.pipeline.conftest import ROOT

WORKLOAD = Workload(dense_features=5, sparse_features=4, hash_size=1_000, lookups=3)


def a_task(
    key: str = "point", shape: Workload = WORKLOAD, model: dict[str, Any] | None = None, **training: Any
) -> MeasureTask:
    settings = {"world_size": 1, "threads_per_rank": 1, "device": "cpu", "batch_rows": 128, "sharding": "table_wise"}
    return MeasureTask(
        key=key, model=DLRMConfig(**model or {}), training=TrainConfig(**settings | training), seed=3,
        preprocessing=PreprocessingConfig(workers=1, shuffle_window_rows=500), plan=make_plan(shape), data=None,
        study=CharacterizeConfig(workload=shape, warm_up_steps=1, steps=2, repeats=3, seconds=2),
    )  # fmt: skip


def measure(tasks: list[MeasureTask], device: torch.device) -> list[Event]:
    events: list[Event] = []
    measure_all(MeasureSpec(training=tasks[0].training, tasks=tuple(tasks), folder=""), 0, device, events.append)
    return [event for event in events if event["event"] != "alive"]


def check(measurement: Measurement, batch_rows: int = 128) -> None:
    step = measurement.step_ms
    assert step.low <= step.median <= step.high
    assert sum(measurement.split_ms.values()) == pytest.approx(step.median)
    assert measurement.rows_per_second.median == pytest.approx(1e3 * batch_rows / step.median)
    assert measurement.gflop_per_second == pytest.approx(1e-6 * measurement.load.flop / step.median)
    assert measurement.load.rows == batch_rows
    assert 0 <= measurement.model_bytes <= measurement.peak_bytes
    assert measurement.outside_share is not None
    assert 0.0 < measurement.outside_share <= 1.0


@pytest.mark.nightly
def test_a_point_that_fails_does_not_end_the_others(device: torch.device) -> None:
    alone = Workload(dense_features=0, sparse_features=1, hash_size=10)
    events = measure([a_task("first"), a_task("bad", alone), a_task("last", model={"interaction": "dcn"})], device)
    assert [(event["event"], event.get("key")) for event in events] == [
        ("point_begins", "first"), ("point", "first"), ("point_begins", "bad"), ("point_failed", "bad"),
        ("point_begins", "last"), ("point", "last"), ("result", None),
    ]  # fmt: skip
    assert events[3]["reason"] == "a dot interaction needs at least 2 vectors, got 1"
    for event in (events[1], events[5]):
        measurement = Measurement.model_validate(event["measurement"])
        check(measurement)
        assert min(measurement.split_ms[phase] for phase in ("embedding", "interaction", "mlp", "optimizer")) > 0.0
    assert events[1]["measurement"]["load"]["lookups"] == 128 * 4 * 3


def test_steps_are_those_of_the_trainer(device: torch.device, tmp_path: Path) -> None:
    """Its own loop over the same batches, twice, gives the same weights."""
    task = a_task()
    batches = load_batches(task, 0)
    model, _ = build_model(task, 1, device, drawn=False)
    config = task.training.model_copy(update={"max_steps": 2 * len(batches), "checkpoint_every_steps": None})
    data, restore = TrainingData(lambda position: itertools.cycle(batches)), Restore(Checkpoints(tmp_path))
    trainer = Trainer(model, config, data, restore, lambda event: None, task.seed, device)
    trainer.train_epoch()
    with MeasuredPoint(task, 0, device) as point:
        point.prepare()
        point.build()
        for _ in range(2 * len(batches)):
            point.step()
        assert point.trainer is not None
        found, expected = (full_state(one.model.state_dict()) for one in (point.trainer, trainer))
    assert found is not None
    assert expected is not None
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.nightly
def test_a_large_point_leaves_no_memory_behind(device: torch.device) -> None:
    process = psutil.Process()
    small, large = a_task("small"), a_task("large", Workload(sparse_features=4, hash_size=500_000))
    measure([small], device)
    before, threads = process.memory_info().rss, process.num_threads()
    [_, first, _, second, _] = measure([large, small], device)
    tables = 4 * 500_000 * (16 + 1) * 4
    assert first["measurement"]["model_bytes"] > tables
    assert second["measurement"]["peak_bytes"] < before + tables / 4
    assert process.memory_info().rss < before + tables / 4
    assert process.num_threads() <= threads + 1  # its heartbeat


def table_task(spec: RankSpec, **more: Any) -> MeasureTask:
    task = a_task(batch_rows=spec.training.batch_rows)
    return task.model_copy(update={"plan": spec.plan, "data": spec.train, "model": spec.model} | more)


@pytest.mark.nightly
def test_batches_of_a_table(rank_spec: Callable[..., RankSpec], device: torch.device, tmp_path: Path) -> None:
    """The first batches in memory, or batches from the service across the end of an epoch. Too large batches fail."""
    spec = rank_spec(tmp_path)
    kept = table_task(spec, key="kept")
    assert [batch.global_rows for batch in load_batches(kept, 0)] == [160] * 8
    too_large = table_task(spec, key="large")
    too_large = too_large.model_copy(update={"training": a_task(batch_rows=5_000).training})
    with Service({"train": spec.train}, kept.preprocessing, tmp_path / "service") as service:
        more = kept.study.model_copy(update={"steps": 4})
        read = kept.model_copy(update={"key": "read", "service": service.address, "study": more})
        events = measure([kept, read, too_large], device)
    outcomes = {event["key"]: event for event in events if event["event"] in ("point", "point_failed")}
    for key in ("kept", "read"):
        check(Measurement.model_validate(outcomes[key]["measurement"]), 160)
    assert outcomes["read"]["measurement"]["split_ms"]["wait"] > 0.0
    assert outcomes["large"]["reason"].startswith("training.batch_rows: expected no more rows than there are")


def test_a_slow_point_has_shorter_repeats(device: torch.device) -> None:
    more = a_task().study.model_copy(update={"steps": 50, "repeats": 5, "seconds": 3})
    task = a_task().model_copy(update={"study": more})
    with MeasuredPoint(task, 0, device) as point:
        point.prepare()
        point.build()
        made: list[int] = []
        step = point.step
        point.step = lambda: made.append(step())  # type: ignore[method-assign, arg-type]
        assert len(point.repeat(warm=0.5)) == 5
    assert len(made) == 5 * 2


@pytest.mark.nightly
def test_two_ranks(tmp_path: Path) -> None:
    """One group measures synchronous and asynchronous points. Both ranks skip a point that cannot be built."""
    ways: dict[str, dict[str, Any]] = {
        "synchronous": {}, "easgd": {"sync": "easgd", "easgd_period_steps": 4}, "hogwild": {"sync": "hogwild"},
        "rows": {"sharding": "row_wise", "send_ids_ahead": True}, "copies": {"sharding": "data_parallel"},
    }  # fmt: skip
    tasks = [a_task(key, world_size=2, **settings) for key, settings in ways.items()]
    tasks.insert(1, a_task("bad", Workload(dense_features=0, sparse_features=1), world_size=2))
    tasks = [add_sharding_plan(task, {}) if task.key == "synchronous" else task for task in tasks]
    spec = MeasureSpec(training=tasks[0].training, tasks=tuple(tasks), folder=str(tmp_path))
    events: list[Event] = []
    run_ranks("pipeline.study.measure.rank", spec, tmp_path, 2, 1, Limits(deadline_seconds=200), events.append, ROOT)
    found = {event["key"]: event["measurement"] for event in events if event["event"] == "point"}
    assert [event["key"] for event in events if event["event"] == "point_failed"] == ["bad"]
    assert found.keys() == ways.keys()
    for one in found.values():
        check(Measurement.model_validate(one))
    assert found["synchronous"]["split_ms"]["communication"] > 0.0
    assert found["easgd"]["split_ms"]["communication"] > 0.0
    assert found["copies"]["split_ms"]["optimizer"] > 0.0

"""A machine is measured once. Known points are reused, and only missing ones are measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from pipeline.errors import TrainingError
from pipeline.study.estimate import calibration
from pipeline.study.estimate.calibration import Calibration, Speed, calibrate
from pipeline.study.estimate.calibration_points import draw_points
from pipeline.study.estimate.memory import DescribedMachine
from pipeline.study.measure.cost import TableLoad, count_load
from pipeline.study.measure.machine import Machine
from pipeline.study.measure.results import Load, Measurement, PointResult, Spread
from pipeline.study.points.load import load_study
from pipeline.study.points.points import StudyPoint
from tests.homes import open_smoke

CEILINGS = {"fp32_gflops": 100.0, "bf16_gflops": 200.0, "read_gb_per_second": 20.0, "random_gb_per_second": 10.0}
MACHINE = Machine(cpu="test", cores=2, memory_bytes=1 << 34, threads=2, **CEILINGS)


def load_at(point: StudyPoint) -> Load:
    config = load_study("configs/smoke.yaml", dict(point.settings))
    shape = config.characterize.workload
    assert shape is not None
    lookups = shape.lookups * config.training.batch_rows
    uses = [TableLoad(shape.hash_size, shape.lookups, min(lookups, shape.hash_size))] * shape.sparse_features
    return count_load(config.model, shape.dense_features, uses, config.training)


def law(one: Load) -> float:
    """Milliseconds of a step on a machine that the fit can describe exactly."""
    return 1.0 + 0.2 * one.layers + one.mlp_flop / 5e7 + 2e-5 * one.rows * one.sparse_features


def result(point: StudyPoint) -> PointResult:
    found = load_at(point)
    step, speed = Spread.of([law(found)]), Spread.of([1e3 * found.rows / law(found)])
    measurement = Measurement(
        rows_per_second=speed, step_ms=step, split_ms={}, outside_share=None, peak_bytes=900, model_bytes=200,
        load=found, rows_per_second_per_core=1.0, device="cpu",
        repeats=1,
    )  # fmt: skip
    return PointResult(point=point, state="measured", measurement=measurement)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Returns the keys of the points that were measured."""
    keys: list[str] = []

    def measure(
        config: Any, study: Any, points: list[StudyPoint], folder: Path, tell: Callable[..., PointResult]
    ) -> list[PointResult]:
        new = [point for point in points if not (folder / "points" / point.key).exists()]
        for point in new:
            (folder / "points").mkdir(exist_ok=True)
            (folder / "points" / point.key).touch()
            keys.append(point.key)
        return [tell(result(point), point not in new) for point in points]

    monkeypatch.setattr(calibration, "measure_points", measure)
    monkeypatch.setattr(calibration, "BUSY_SECONDS", 0.01)
    monkeypatch.setattr(calibration, "measure_machine", lambda threads, device: MACHINE)
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return keys


def made(count: int, again: bool = False, **settings: Any) -> Calibration:
    with disable_run_logger():
        return calibrate(open_smoke(settings), count, again)


def test_a_machine_is_measured_once(requested: list[str]) -> None:
    first = made(12)
    assert len(requested) == 12
    assert made(12, **{"training.batch_rows": 64, "model.embedding_width": 32}) == first
    assert made(8) == first
    assert len(requested) == 12
    assert len(made(16).results) == 16
    assert len(requested) == 16
    assert len(made(12, again=True).results) == 12
    assert len(requested) == 28
    made(12, **{"training.dense_precision": "bf16"})
    assert len(requested) == 40, "another precision is another machine"
    assert first.process_bytes == 700


def test_a_calibration_by_other_code_logs_a_warning(
    requested: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "read_commit", lambda: "before")
    monkeypatch.setattr(calibration, "MOST_BUSY", 1.0)
    made(12)
    calibrate(open_smoke(), 12, False)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    monkeypatch.setattr(calibration, "read_commit", lambda: "after")
    calibrate(open_smoke(), 12, False)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "the code is at after now, and its steps may take another time; force=true calibrates again"
    ]


def test_points_that_cannot_be_measured(requested: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = [PointResult(point=point, state="left out", reason="too large") for point in draw_points(12, [1])]
    monkeypatch.setattr(calibration, "measure_points", lambda *arguments: left_out)
    with pytest.raises(TrainingError, match="calibration: expected at least 6 points measured, got 0: too large"):
        made(12)


def test_points_are_predicted_from_others_and_extrapolation_is_reported(requested: list[str]) -> None:
    speed = Speed(made(48))
    assert speed.fit.errors is not None
    assert speed.fit.errors.median < 0.05
    assert len(speed.table) == speed.fit.errors.points == speed.fit.fitted == 48
    known = load_at(draw_points(1, [1])[0])
    assert speed.predict_step_ms(known, 1) == pytest.approx(law(known), rel=0.1)
    assert speed.find_extrapolations(known, 1) == []
    large = known.model_copy(update={"mlp_flop": 1e13})
    ((term, times),) = speed.find_extrapolations(large, 1)
    assert term == "products"
    assert times > calibration.FAR
    twice = DescribedMachine(cpu="x", cores=2, memory_bytes=1, **{name: 2 * value for name, value in CEILINGS.items()})
    assert speed.scale_to(twice)(known, 1) == pytest.approx(speed.predict_step_ms(known, 1) / 2)

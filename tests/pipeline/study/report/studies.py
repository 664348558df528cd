"""Studies with a known outcome."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.study.measure.results import PHASES, Load, Measurement, PointResult, Spread, StudyResults
from pipeline.study.points.points import StudyPoint

MACHINE = {"cpu": "Toy 9000", "cores": 2, "memory_bytes": 24 * 2**30, "fp32_gflops": 100.0, "read_gb_per_second": 20.0, "random_gb_per_second": 5.0}  # fmt: skip


def load(rows: int = 100) -> Load:
    """The load of a small model."""
    return Load(
        rows=rows,
        mlp_flop=1e9,
        interaction_flop=1e8,
        lookups=1e4,
        distinct_rows=5e3,
        embedding_bytes=1e7,
        dense_bytes=4e7,
        communication_bytes=0.0,
        dense_parameters=1_000,
        sparse_features=4,
        embedding_width=16,
        layers=6,
        sample_bytes=1_234.0,
    )


def measured(values: Mapping[str, Any], speed: float, noise: float = 0.01, device: str = "cpu") -> PointResult:
    """A point with this many samples per second. Its repeats vary by up to `noise` to both sides."""
    spread = Spread(median=speed, low=speed * (1 - noise), high=speed * (1 + noise))
    found = Measurement(
        rows_per_second=spread,
        step_ms=Spread(median=5.0, low=4.9, high=5.1),
        split_ms={phase: float(number) for number, phase in enumerate(PHASES)},
        outside_share=None,
        peak_bytes=300_000_000,
        model_bytes=200_000_000,
        load=load(),
        rows_per_second_per_core=speed / 2,
        device=device,
        repeats=5,
    )
    return PointResult(point=StudyPoint(values=values, settings=dict(values)), state="measured", measurement=found)


def quality_point(batch_rows: int, ne: float, tuned_ne: float) -> PointResult:
    """A point of a quality study."""
    point = StudyPoint(values={"training.batch_rows": batch_rows}, settings={"training.batch_rows": batch_rows})
    return PointResult(point=point, state="measured", quality={"ne": ne, "tuned_ne": tuned_ne})


def study(experiment: str | None, results: Sequence[PointResult]) -> StudyResults:
    """A study on the toy machine."""
    return StudyResults(
        name="toy",
        experiment=experiment,
        config={},
        machine=MACHINE,
        commit="c0ffee",
        versions={"torch": "2.0"},
        results=tuple(results),
    )

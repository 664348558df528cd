"""A study of two small points."""

from typing import Any

from pipeline.study.points.load import StudyConfig, load_study

TINY = {
    "characterize.workload": {"dense_features": 4, "sparse_features": 3, "hash_size": 100, "lookups": 2},
    "characterize.steps": 2,
    "characterize.repeats": 3,
    "characterize.axes": {"training.batch_rows": [64, 128]},
    "training.world_size": 1,
    "training.threads_per_rank": 1,
}


def study(**overrides: Any) -> StudyConfig:
    return load_study("configs/smoke.yaml", TINY | overrides)

"""A study of two small points, and a sweep of one."""

from typing import Any

from pipeline.study.points.load import StudyConfig, load_study
from tests.homes import CONFIG

RATE, BATCH = "training.table_learning_rate", "training.batch_rows"
SWEEP = {"strategy": "random", "trials": 2, "space": {RATE: {"low": 0.01, "high": 0.2, "log": True}}}
"""A sweep of two trials."""
TINY = {
    "characterize.workload": {"dense_features": 4, "sparse_features": 3, "hash_size": 100, "lookups": 2},
    "characterize.steps": 2,
    "characterize.repeats": 3,
    "characterize.axes": {"training.batch_rows": [64, 128]},
    "training.world_size": 1,
    "training.threads_per_rank": 1,
}


def study(**overrides: Any) -> StudyConfig:
    return load_study(CONFIG, TINY | overrides)

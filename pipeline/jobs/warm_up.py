"""The servers that fork ranks and workers, started before they are needed. Nothing heavy is imported here."""

import os
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.forkserver import prepare
from pipeline.process import PACKAGES, limit_threads
from pipeline.training.launch.processes import rank_environment, resolve_threads


def start_fork_servers(config: RunConfig) -> None:
    """Starts the servers of a training, which import what ranks and workers need: one if they may share it."""
    training, modules = config.training, {}
    if training.launcher == "processes":
        threads = resolve_threads(training.threads_per_rank, training.world_size)
        modules["pipeline.jobs.training.rank"] = rank_environment(threads)
    if config.preprocessing.executor == "process":
        modules["pipeline.preprocessing.executors"] = os.environ | limit_threads(1)
    prepare(modules)


def kernels_are_compiled() -> bool:
    """Whether numba has compiled the kernels of the tables on this machine before, as far as its cache shows."""
    folder = os.environ.get("NUMBA_CACHE_DIR")
    places = PACKAGES / "pipeline" / "training" / "tables" / "__pycache__" if folder is None else Path(folder)
    return next(places.rglob("kernels.*.nbi"), None) is not None

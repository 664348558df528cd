"""The servers that fork ranks and workers, started before they are needed. Nothing heavy is imported here."""

import importlib
import os
from contextlib import suppress
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.processes.forkserver import prepare
from pipeline.processes.process import PACKAGES, limit_threads, loading
from pipeline.registration.config import RegistrationConfig
from pipeline.training.launch.processes import rank_environment, resolve_threads


def start_fork_servers(config: RunConfig) -> None:
    """Starts the servers of a training, which import what ranks and workers need: one if they may share it.

    Does nothing about those that run already.
    """
    training, modules = config.training, {}
    if training.launcher == "processes":
        threads = resolve_threads(training.threads_per_rank, training.world_size)
        # First: pydantic searches all loaded modules for the docstrings of fields, of which PyTorch brings thousands.
        modules["pipeline.config"] = modules["pipeline.jobs.training.rank.main"] = rank_environment(threads)
    if config.preprocessing.executor == "process":
        modules["pipeline.preprocessing.executors"] = os.environ | limit_threads(1)
    prepare(modules)


def load_stores(registration: RegistrationConfig) -> None:
    """Imports what a training opens first and its flow does not import: half a second for MLflow's SQL store.

    A command does this while it waits for Prefect's server.
    """
    if registration.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return
    with loading(), suppress(Exception):  # who needs it imports it again, and gets the error
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def kernels_are_compiled() -> bool:
    """Whether numba has compiled the kernels of the tables on this machine before, as far as its cache shows."""
    folder = os.environ.get("NUMBA_CACHE_DIR")
    places = PACKAGES / "pipeline" / "training" / "tables" / "__pycache__" if folder is None else Path(folder)
    return next(places.rglob("kernels.*.nbi"), None) is not None

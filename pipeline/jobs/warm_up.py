"""The servers that fork ranks and workers, started before they are needed. Nothing heavy is imported here."""

import importlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.forkserver import prepare
from pipeline.process import PACKAGES, limit_threads, loading
from pipeline.registration.config import RegistrationConfig
from pipeline.training.launch.processes import rank_environment, resolve_threads
from storage.artifacts import write_text

FINISHED = "finished.txt"
"""File of a home: a hash of each command that had nothing to train, newest last."""
NOTED = 100
"""Commands in that file."""


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


class FinishedNote:
    """The note that a command has nothing to train. Its servers would load for nothing.

    Nothing but time depends on the note: a training starts servers that do not run yet.

    Args:
        command: Name of the flow.
        config: Its config. A note is kept for the embedded catalog alone: others are not known without opening them.
        parameters: Its other parameters.
    """

    def __init__(self, command: str, config: RunConfig, parameters: Mapping[str, Any]) -> None:
        self.path, self.catalog = config.home_path / FINISHED, config.home_path / "warehouse" / "catalog.db"
        self.forced = bool(parameters.get("force"))
        self.embedded = not config.warehouse.catalog and not config.source.table
        others = {key: value for key, value in parameters.items() if key != "force"}
        self.about = json.dumps([command, config.model_dump(mode="json"), others], sort_keys=True, default=str)

    def holds(self) -> bool:
        """Says whether the command was finished at the catalog's present state."""
        return not self.forced and self._digest() in self._read()

    def write(self) -> None:
        """Notes that the same command would have nothing to train now."""
        digest = self._digest()
        if digest is None:
            return
        others = [line for line in self._read() if line != digest]
        with suppress(OSError):  # the next run starts its servers in advance
            write_text(self.path, "\n".join([*others[1 - NOTED :], digest]) + "\n")

    def _read(self) -> list[str]:
        with suppress(OSError):
            return self.path.read_text(encoding="utf-8", errors="replace").split()
        return []

    def _digest(self) -> str | None:
        if self.embedded:
            with suppress(OSError):  # there is none, or it cannot be read
                return sha256(f"{self.about}{self.catalog.stat().st_mtime_ns}".encode()).hexdigest()
        return None


def kernels_are_compiled() -> bool:
    """Whether numba has compiled the kernels of the tables on this machine before, as far as its cache shows."""
    folder = os.environ.get("NUMBA_CACHE_DIR")
    places = PACKAGES / "pipeline" / "training" / "tables" / "__pycache__" if folder is None else Path(folder)
    return next(places.rglob("kernels.*.nbi"), None) is not None

"""The servers that fork ranks and workers, started before they are needed. Nothing heavy is imported here."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.forkserver import prepare
from pipeline.process import PACKAGES, limit_threads
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
        modules["pipeline.config"] = modules["pipeline.jobs.training.rank"] = rank_environment(threads)
    if config.preprocessing.executor == "process":
        modules["pipeline.preprocessing.executors"] = os.environ | limit_threads(1)
    prepare(modules)


def has_finished(command: str, config: RunConfig, parameters: Mapping[str, Any]) -> bool:
    """Says whether a command has nothing to train, as far as its last run shows. Its servers would load for nothing.

    Nothing but time depends on the answer: a training starts servers that do not run yet.
    """
    digest = _digest(command, config, parameters)
    return digest is not None and not parameters.get("force") and digest in _read_noted(config)


def note_finished(command: str, config: RunConfig, parameters: Mapping[str, Any]) -> None:
    """Notes that the same command would have nothing to train now."""
    digest = _digest(command, config, parameters)
    if digest is None:
        return
    others = [line for line in _read_noted(config) if line != digest]
    with suppress(OSError):  # the next run starts its servers in advance
        write_text(config.home_path / FINISHED, "\n".join([*others[1 - NOTED :], digest]) + "\n")


def _read_noted(config: RunConfig) -> list[str]:
    with suppress(OSError):
        return (config.home_path / FINISHED).read_text(encoding="utf-8", errors="replace").split()
    return []


def _digest(command: str, config: RunConfig, parameters: Mapping[str, Any]) -> str | None:
    """Returns a hash of a command and of the state of its tables. None: the state is not known without opening them."""
    catalog = config.home_path / "warehouse" / "catalog.db"
    if config.warehouse.catalog or config.source.table is not None or not catalog.exists():
        return None
    given = {key: value for key, value in parameters.items() if key != "force"}
    state = [command, config.model_dump(mode="json"), given, catalog.stat().st_mtime_ns]
    return sha256(json.dumps(state, sort_keys=True, default=str).encode()).hexdigest()


def kernels_are_compiled() -> bool:
    """Whether numba has compiled the kernels of the tables on this machine before, as far as its cache shows."""
    folder = os.environ.get("NUMBA_CACHE_DIR")
    places = PACKAGES / "pipeline" / "training" / "tables" / "__pycache__" if folder is None else Path(folder)
    return next(places.rglob("kernels.*.nbi"), None) is not None

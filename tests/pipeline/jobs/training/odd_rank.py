"""A rank that dies or reloads checkpoints as an environment variable says. Its tests share one fork server.

BUILDS maps a rank to what it computes with in place of what the others do.
DEATHS is a list of [attempt, rank, function, text of its first argument, how]. RELOADS is a list of `Reload`.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from pipeline.jobs.training.rank import group, main
from pipeline.jobs.training.rank.group import open_event_writer
from pipeline.jobs.training.rank.model import build_model
from pipeline.jobs.training.rank.spec import RankSpec, checkpoint_identity
from pipeline.processes.build import read_build
from pipeline.training.restore import Restore
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.trainer import Trainer, TrainingData


def die(how: str, argument: Any) -> None:
    if how == "exit 137":
        os._exit(137)
    if how == "nan":
        argument.dense.fill_(float("nan"))
        return
    os.kill(os.getpid(), getattr(signal, how))


def dying(original: Callable[..., Any], when: str, how: str, after: bool) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        first, batch = (*arguments, None)[:2]
        hit = when in (f"step {first.progress.steps};" if isinstance(first, Trainer) else str(first))
        if hit and not after:
            die(how, batch)
        result = original(*arguments)
        if hit and after:
            die(how, batch)
        return result

    return call


class Reload(BaseModel, frozen=True):
    """A training, and named checkpoints to load into it."""

    spec: RankSpec
    sources: dict[str, Path]


def reload(what: Reload, world_size: int, device: torch.device) -> None:
    """Saves the initial state, and the state after loading each checkpoint."""
    spec, folder = what.spec, Path(what.spec.folder)
    model, _ = build_model(spec, world_size, device)
    restore = Restore(Checkpoints(folder), checkpoint_identity(spec.model, spec.training, spec.train.plan))
    trainer = Trainer(model, spec.training, TrainingData(lambda position: iter(())), restore, print, spec.seed, device)
    checkpoint.save(folder / "initial", trainer.learner.state(), {})
    for name, source in what.sources.items():
        restore.load(trainer.learner, source)
        checkpoint.save(folder / name, trainer.learner.state(), {})


def reload_all(spec: RankSpec, number: int, device: torch.device) -> None:
    """Takes the place of `main.train`."""
    for text in json.loads(os.environ["RELOADS"]):
        reload(Reload.model_validate_json(text), spec.training.world_size, device)
    open_event_writer()({"event": "result"})


if __name__ == "__main__":
    for attempt, number, name, when, how in json.loads(os.environ.get("DEATHS", "[]")):
        if [str(attempt), str(number)] == [os.environ["DLRM_ATTEMPT"], os.environ["RANK"]]:
            after, name = name.startswith("after "), name.removeprefix("after ")
            owner: Any = Trainer if name == "train_step" else checkpoint
            setattr(owner, name, dying(getattr(owner, name), when, how, after))
    if (other := json.loads(os.environ.get("BUILDS", "{}")).get(os.environ["RANK"])) is not None:
        odd = read_build().model_copy(update=other)
        group.read_build = lambda: odd  # type: ignore[assignment]
    if "RELOADS" in os.environ:
        main.train = reload_all  # type: ignore[assignment]
    main.main(sys.argv[1])

"""Where the training of a rank begins: with its checkpoints, or with those of a training that it continues."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.jobs.training.rank.spec import RankSpec, checkpoint_identity
from pipeline.training.launch.heartbeat import Heartbeat
from pipeline.training.learner import Learner
from pipeline.training.restore import Emit, Restore
from pipeline.training.state.checkpoint import (
    CheckpointError,
    full_state,
    read_progress,
    read_whole,
    require_identity,
    served_prefix,
    whole_shapes,
    write_whole,
)
from pipeline.training.state.checkpoints import Checkpoints, StoredCheckpoints
from pipeline.training.state.progress import TrainingProgress
from pipeline.training.state.transfer import FeatureState, transfer_state
from pipeline.transforms.plan.carry_over import Start, unchanged_features
from storage.objects import ObjectFolder

GROWN = "grown"
"""Name of the checkpoint of a model that continues one with other features."""


def make_restore(spec: RankSpec, emit: Emit, heartbeat: Heartbeat) -> Restore:
    """Returns how a training begins and where its checkpoints are."""
    folder, store = Path(spec.folder) / "checkpoints", open_store(spec, heartbeat)
    return Restore(
        Checkpoints(folder) if store is None else StoredCheckpoints(folder, store.child("checkpoints"), spec.claim),
        checkpoint_identity(spec.model, spec.training, spec.train.plan),
        keeps_lost=spec.preprocessing.on_corrupt == "quarantine",
        otherwise=None if spec.start is None else partial(load_start, spec, spec.start, emit, heartbeat),
    )


def open_store(spec: RankSpec, heartbeat: Heartbeat) -> ObjectFolder | None:
    """Returns the folder of the training in an object store. None: its hosts share a folder."""
    if spec.store is None:
        return None
    return ObjectFolder(spec.store, spec.train.warehouse.catalog, heartbeat.progress).patient()


def load_start(
    spec: RankSpec, start: Start, emit: Emit, heartbeat: Heartbeat, restore: Restore, learner: Learner
) -> TrainingProgress:
    """Loads the state of the training to continue.

    Raises:
        CheckpointError: If the models differ in more than their features, or this host cannot get the checkpoint.
    """
    folder = Path(start.checkpoint)
    if start.store is not None:  # also if there is a copy: it may be of an earlier training of that name
        store = ObjectFolder(start.store, spec.train.warehouse.catalog, heartbeat.progress).patient()
        StoredCheckpoints(folder.parent, store).fetch(folder.name)
    if not folder.exists():
        raise CheckpointError(
            f"checkpoint '{folder}'", "a folder that every host of the ranks sees", "none on this one",
            "Share the home among the hosts, or train from scratch.",
        )  # fmt: skip
    if start.plan.hash == spec.train.plan.hash:
        return restore.start_from(learner, folder)
    transfer_checkpoint(spec, start, emit, restore, learner)
    progress = restore.start_from(learner, restore.checkpoints.fetch(GROWN, known=True))
    dist.barrier()  # until all ranks have read it
    restore.checkpoints.remove(GROWN)
    return progress


def transfer_checkpoint(spec: RankSpec, start: Start, emit: Emit, restore: Restore, learner: Learner) -> None:
    """Writes the checkpoint GROWN for the model with other features. Rank 0 makes it in its own memory."""
    folder, source = restore.checkpoints.folder / GROWN, Path(start.checkpoint)
    learner.make_dense_state()
    state = learner.trained_state()
    moments = {name: torch.zeros(shape) for name, shape in whole_shapes(state).items() if name.startswith("tables/")}
    fresh = full_state({name: tensor for name, tensor in state.items() if name not in moments})
    if fresh is not None:
        fresh |= moments  # the optimizers' state before the first step
        served = served_prefix(source)
        stored = read_whole(source, served, "dense/", "tables/")
        old = {name.replace(served, "model/", 1): tensor for name, tensor in stored.items()}
        require_identity(source, checkpoint_identity(spec.model, spec.training, start.plan))
        before, now = (FeatureState(dense=plan.dense, bags=plan.sparse) for plan in (start.plan, spec.train.plan))
        made = transfer_state(spec.model, old, fresh, (before, now), unchanged_features(spec.train.plan, start.plan))
        progress = read_progress(source) | {"averaged": 0}
        write_whole(folder, made.tensors, progress, restore.identity)
        restore.checkpoints.share(GROWN)
        emit({"event": "grown", "new": list(made.new_tables), "larger": list(made.larger_tables)})
    dist.barrier()

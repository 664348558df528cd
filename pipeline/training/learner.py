"""Learner: a rank's model with its optimizers. Steps update it, and checkpoints hold its tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.training.config import TrainConfig
from pipeline.training.dense import has_dropout
from pipeline.training.optim import (
    TABLES,
    LearningRates,
    ReplicatedTables,
    dense_optimizer,
    dense_parameters,
    replicated_tables,
)
from pipeline.training.state import checkpoint
from pipeline.training.state.averaging import WeightAverage
from pipeline.training.state.checkpoint import Identity, local_parts
from pipeline.training.state.export import export_weights
from pipeline.training.state.progress import TrainingProgress
from pipeline.training.tables.cached import drop_cache


class Learner:
    """A rank's model with its optimizers, and the mean of its weights if the config wants one.

    Ranks have equal dense weights after every step, and each has its shards of the tables.
    """

    def __init__(self, model: DistributedModelParallel, config: TrainConfig, device: torch.device) -> None:
        self.model, self.config, self.device = model, config, device
        self.optimizer = dense_optimizer(model, config)
        replicated = replicated_tables(model)
        self.replicated = ReplicatedTables(replicated, config, model) if replicated else None
        self.rates = LearningRates(model, self.optimizer, config, self.replicated)
        self.dense = [parameter for _, parameter in dense_parameters(model)]
        self.draws = has_dropout(model)
        self.average = None if config.average_from_step is None else WeightAverage(model)

    def begin_step(self, progress: TrainingProgress) -> None:
        """Sets the learning rates of the next step and removes the gradients of the last one."""
        self.rates.set(progress.steps, progress.steps_before)
        for parameter in self.dense:  # like the optimizer's zero_grad, without its hooks
            parameter.grad = None
        if self.replicated is not None:
            self.replicated.zero_grad()

    def update_dense(self) -> None:
        """Clips the gradients of everything but sharded tables, and runs its optimizers."""
        if self.config.dense_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.dense, self.config.dense_gradient_norm)
        self.optimizer.step()
        if self.replicated is not None:
            self.replicated.step()

    def state(self) -> dict[str, Any]:
        """Returns all tensors of model and optimizers by name. Of sharded tensors it has this rank's shards."""
        tensors: dict[str, Any] = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for parameter, slots in self.model.fused_optimizer.state_dict()["state"].items():
            tensors |= {
                f"tables/{parameter}/{slot}": value for slot, value in slots.items() if hasattr(value, "local_shards")
            }
        for table, weight in replicated_tables(self.model).items():
            assert self.replicated is not None
            tensors |= {
                f"tables/{TABLES}{table}.weight/{slot}": value for slot, value in self.replicated.state[weight].items()
            }
        for name, dense in dense_parameters(self.model):
            for slot, value in self.optimizer.state[dense].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"dense/{name}/{slot}"] = value
        if self.average is not None:
            tensors |= {f"average/{name}": tensor for name, tensor in self.average.means.items()}
        return tensors

    def trained_state(self) -> dict[str, Any]:
        """Returns the tensors that another training can go on with: all but the mean of the weights."""
        return {name: tensor for name, tensor in self.state().items() if not name.startswith("average/")}

    def load(self, folder: Path, identity: Identity) -> None:
        """Loads all tensors of a verified checkpoint of the same training."""
        if any(name.startswith("dense/") for name in checkpoint.stored_shapes(folder)):
            self.make_dense_state()
        checkpoint.load(folder, self.state(), identity)
        self.after_load()

    def load_served(self, folder: Path, identity: Identity) -> None:
        """Loads the weights that a verified checkpoint serves, its mean if it has one, and the optimizers' state."""
        self.make_dense_state()
        served = checkpoint.served_prefix(folder)
        tensors = {name.replace("model/", served, 1): tensor for name, tensor in self.trained_state().items()}
        checkpoint.load(folder, tensors, identity, optional=("model/", "average/"))
        self.after_load()

    def copy(self, other: "Learner") -> None:
        """Copies weights and optimizer state of another learner with the same model and the same sharding plan."""
        self.make_dense_state()
        source = other.state()
        with torch.no_grad():
            for name, tensor in self.trained_state().items():
                for own, given in zip(local_parts(tensor), local_parts(source[name]), strict=True):
                    own.copy_(given)
        self.after_load()

    def after_load(self) -> None:
        """Makes the model use tensors that were just written."""
        drop_cache(self.model)

    def make_dense_state(self) -> None:
        """Makes the state of the dense optimizer by a step with zero gradients and learning rates."""
        for parameter in self.dense:
            parameter.grad = torch.zeros_like(parameter)
        rates = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        self.optimizer.step()
        for group, (rate, decay) in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"], group["weight_decay"] = rate, decay

    def meet(self) -> None:
        """Brings ranks that train at their own pace, and what they share, to one state. These ranks have one."""

    @contextmanager
    def serving(self, averaged: bool) -> Iterator[None]:
        """Gives the model inside the block the weights that would be served now: their mean if there is one.

        Args:
            averaged: Whether the mean has a sample.
        """
        if self.average is None or not averaged:
            yield
            return
        with self.average.applied():
            yield

    def serve(self, averaged: bool) -> None:
        """Gives the model the weights that are served after training; see `serving`."""
        if self.average is not None and averaged:
            self.average.apply()

    def export(self, path: Path | None, written: Callable[[], None] = lambda: None) -> str | None:
        """Writes the whole weights; see `export_weights`. All ranks call it together."""
        return export_weights(self.model.state_dict(), path, written)

"""Fused table optimizer, dense optimizer, learning-rate schedule, and initial values of the tables."""

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.distributed.types import ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import SGD, Adagrad, Adam
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.tables import TABLES
from pipeline.training.config import TrainConfig
from pipeline.training.tables.bags import set_update_number
from pipeline.training.tables.sharding import iter_lookups

FILL_VALUE = 0.01
"""Fills tables if their content does not matter."""
INIT_BLOCK_ROWS = 65_536
"""Rows of a table drawn from one random stream. A shard can be drawn without the rest of its table."""
EPS = 1e-8
BETAS = (0.9, 0.999)
TABLE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": Adagrad,
    "sgd": SGD,
    "adam": Adam,
}


def fuse_table_optimizer(model: nn.Module, config: TrainConfig, plan: TorchRecPlan) -> None:
    """Fuses an exact optimizer of the tables into the backward pass. Call it before sharding.

    `ReplicatedTables` updates tables that the plan replicates, because their gradients must be averaged first.

    Source:
        Mudigere et al. 2022, arXiv:2104.05158, section 4.1.
    """
    settings: dict[str, Any] = {"eps": EPS, "beta1": BETAS[0], "beta2": BETAS[1]}
    settings |= {"weight_decay": config.table_weight_decay, "weight_decay_mode": WeightDecayMode.L2}
    if config.table_gradient_limit is not None:
        settings |= {"gradient_clipping": True, "max_gradient": config.table_gradient_limit}
    for table, placed in plan.get_plan_for_module("embeddings").items():
        if placed.sharding_type != ShardingType.DATA_PARALLEL.value:
            weight = model.get_submodule(f"embeddings.embedding_bags.{table}").weight
            rate = {"lr": table_rate(config, table)}
            apply_optimizer_in_backward(TABLE_OPTIMIZERS[config.table_optimizer], [weight], settings | rate)


def table_rate(config: TrainConfig, table: str) -> float:
    """Returns the learning rate of a table before the schedule.

    Example:
        >>> table_rate(TrainConfig(table_learning_rates={"cat_u*": 0.2}), "cat_user")
        0.2
    """
    fitting = (rate for pattern, rate in config.table_learning_rates.items() if fnmatchcase(table, pattern))
    return next(fitting, config.table_learning_rate)


class ReplicatedTables(torch.optim.Optimizer):
    """Optimizer of replicated tables, from averaged gradients, with the same rule as the fused optimizers.

    Its state has the names and shapes of the fused optimizers' state, so checkpoints fit both. Rows that were read are
    updated, also with a gradient of 0, which a pooling weight of 0 gives.

    Args:
        tables: Table -> weights, float32 [rows, width].
        model: Looks them up. None: rows with a gradient count as read.
    """

    def __init__(self, tables: Mapping[str, nn.Parameter], config: TrainConfig, model: nn.Module | None = None) -> None:
        groups = [{"params": [weight], "table": table, "lr": 0.0} for table, weight in tables.items()]
        super().__init__(groups, {})
        self.config = config
        self.steps = 0
        """Number of the next update, counted from 1."""
        self.follows = model is not None
        self.ids: dict[str, list[torch.Tensor]] = {}
        """Table -> ids that this rank has looked up since the last update."""
        for lookup in iter_lookups(model) if model is not None else ():
            for module in lookup.modules():
                if isinstance(module, BatchedDenseEmbeddingBag):
                    module.register_forward_pre_hook(self._note_ids)
        for table, weight in tables.items():
            rowwise = config.table_optimizer == "rowwise_adagrad"
            like = torch.zeros_like(weight[:, 0] if rowwise else weight, requires_grad=False)
            if config.table_optimizer != "sgd":
                self.state[weight][f"{table}.momentum1"] = like
            if config.table_optimizer == "adam":
                self.state[weight][f"{table}.exp_avg_sq"] = like.clone()

    def _note_ids(self, module: nn.Module, inputs: tuple[KeyedJaggedTensor, ...]) -> None:
        """Notes the ids that a kernel looks up, which come table by table."""
        if not torch.is_grad_enabled() or not self.reads_all:
            return
        features = inputs[0]
        of_features = iter(features.values().split(features.length_per_key()))
        for table in module.config.embedding_tables:  # type: ignore[union-attr]
            for _ in range(table.num_features()):
                self.ids.setdefault(table.name, []).append(next(of_features))

    @property
    def reads_all(self) -> bool:
        """Whether a row that was read changes although its gradient is 0."""
        return self.follows and (self.config.table_optimizer == "adam" or self.config.table_weight_decay > 0.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients and which rows were read."""
        super().zero_grad(set_to_none)
        self.ids.clear()

    def _find_read(self, table: str, gradient: torch.Tensor) -> torch.Tensor:
        """Tells which rows a rank has read, bool [rows, 1]."""
        if not self.reads_all:
            return gradient.ne(0.0).any(dim=1, keepdim=True)
        read_N = torch.zeros(len(gradient), dtype=torch.uint8, device=gradient.device)
        for ids in self.ids.get(table, ()):
            read_N[ids.long()] = 1
        if dist.get_world_size() > 1:
            dist.all_reduce(read_N, dist.ReduceOp.MAX)
        return read_N.bool()[:, None]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the rows that were read."""
        config, kind = self.config, self.config.table_optimizer
        for group in self.param_groups:
            (weight,) = group["params"]
            read_N1 = self._find_read(group["table"], weight.grad)
            gradient = weight.grad
            if config.table_weight_decay:
                gradient = torch.where(read_N1, gradient + config.table_weight_decay * weight, gradient)
            first, second = [*self.state[weight].values(), None, None][:2]
            if kind == "sgd":
                weight.sub_(gradient, alpha=group["lr"])
            elif kind == "rowwise_adagrad":
                first += gradient.square().mean(dim=1)
                weight.sub_(group["lr"] * gradient / (first.sqrt()[:, None] + EPS))
            elif kind == "adagrad":
                first += gradient.square()
                weight.sub_(group["lr"] * gradient / (first.sqrt() + EPS))
            else:
                first.copy_(torch.where(read_N1, BETAS[0] * first + (1.0 - BETAS[0]) * gradient, first))
                second.copy_(torch.where(read_N1, BETAS[1] * second + (1.0 - BETAS[1]) * gradient.square(), second))
                mean, square = first / (1.0 - BETAS[0] ** self.steps), second / (1.0 - BETAS[1] ** self.steps)
                weight.sub_(torch.where(read_N1, group["lr"] * mean / (square.sqrt() + EPS), 0.0))


def dense_optimizer(model: DistributedModelParallel, config: TrainConfig) -> torch.optim.Optimizer:
    """Returns the optimizer of all parameters except tables."""
    parameters = [parameter for _, parameter in dense_parameters(model)]
    kinds: dict[str, Any] = {  # fused: one pass over weight, gradient and moments
        "adam": partial(torch.optim.Adam, fused=True),
        "adamw": partial(torch.optim.AdamW, fused=True),
        "adagrad": torch.optim.Adagrad,
        "sgd": partial(torch.optim.SGD, fused=True),
    }
    optimizer: torch.optim.Optimizer = kinds[config.dense_optimizer](
        parameters, lr=config.dense_learning_rate, weight_decay=config.dense_weight_decay
    )
    return optimizer


def dense_parameters(model: DistributedModelParallel) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter) of everything except the tables."""
    return [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith(TABLES)]


def replicated_tables(model: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Returns table -> weights of replicated tables."""
    return {
        name.removeprefix(TABLES).removesuffix(".weight"): parameter
        for name, parameter in model.named_parameters()
        if name.startswith(TABLES) and not hasattr(parameter, "_in_backward_optimizers")
    }


def schedule(config: TrainConfig, step: int) -> float:
    """Returns the factor on both learning rates for update number `step`, counted from 0.

    Example:
        >>> [schedule(TrainConfig(warmup_steps=2, decay_steps=4), step) for step in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    factor = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.decay_steps is not None and step > config.warmup_steps:
        left = max(0.0, (config.decay_steps - step) / (config.decay_steps - config.warmup_steps))
        factor *= config.decay_floor + (1.0 - config.decay_floor) * left
    return factor


class LearningRates:
    """Sets the learning rates of the schedule in all optimizers of a model.

    It looks up kernels once and skips unchanged rates, because in Python both take longer than a small layer.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        replicated: ReplicatedTables | None = None,
    ) -> None:
        self.dense, self.fused, self.replicated, self.config = optimizer, model.fused_optimizer, replicated, config
        modules = (module for lookup in iter_lookups(model) for module in lookup.modules())
        self.kernels = [module for module in modules if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen)]
        self.factor: float | None = None
        """Factor of the current rates."""

    def set(self, step: int, steps_before: int = 0) -> None:
        """Sets the rates of update number `step`, counted from 0.

        Args:
            steps_before: Updates in earlier trainings that the optimizer state contains.
        """
        for kernel in self.kernels:
            set_update_number(kernel, steps_before + step + 1)
        if self.replicated is not None:
            self.replicated.steps = steps_before + step + 1
        factor = schedule(self.config, step)
        if factor == self.factor:
            return
        self.factor = factor
        for group in self.dense.param_groups:
            group["lr"] = self.config.dense_learning_rate * factor
        for group in self.fused.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        self.fused.step()  # only sets the rates of the kernels, which update in the backward pass
        for group in self.replicated.param_groups if self.replicated is not None else ():
            group["lr"] = table_rate(self.config, group["table"]) * factor


def init_tables(model: DistributedModelParallel, seed: int, half_width: float | None) -> None:
    """Fills the tables with uniform values that depend on seed, table and row, not on the sharding plan.

    Args:
        half_width: Values lie in [-this, this]. None: 1 / sqrt(rows of the table).
    """
    for name, tensor in model.state_dict().items():
        if not name.startswith(TABLES):
            continue
        rows, width = tensor.size()
        bound = half_width if half_width is not None else 1.0 / float(np.sqrt(rows))
        for part, first, column in _parts(tensor):
            count, columns = part.shape
            for block in range(first // INIT_BLOCK_ROWS, -(-(first + count) // INIT_BLOCK_ROWS)):
                start = block * INIT_BLOCK_ROWS
                values = _block(seed, name, block, min(INIT_BLOCK_ROWS, rows - start), width, bound)
                low, high = max(start, first), min(start + len(values), first + count)
                drawn = values[low - start : high - start, column : column + columns]
                with torch.no_grad():
                    part[low - first : high - first].copy_(torch.from_numpy(drawn))


def fill_tables(model: DistributedModelParallel) -> None:
    """Writes every element of the tables, because memory that was never written is read at another speed."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            for part, _, _ in _parts(tensor) if name.startswith(TABLES) else ():
                part.fill_(FILL_VALUE)


def _parts(tensor: Any) -> list[tuple[torch.Tensor, int, int]]:
    """Returns (values, first row, first column) of each part of a table on this rank."""
    if not hasattr(tensor, "local_shards"):
        return [(tensor, 0, 0)]
    return [(shard.tensor, *shard.metadata.shard_offsets) for shard in tensor.local_shards()]


def _block(seed: int, name: str, block: int, rows: int, width: int, bound: float) -> np.ndarray:
    stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, block])))
    return random.uniform(-bound, bound, (rows, width)).astype(np.float32)

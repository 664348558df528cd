"""NumbaBags: the CPU kernel of sharded embedding tables, in the place of FBGEMM's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed import batched_embedding_kernel

from pipeline.errors import ConfigError
from pipeline.training.config import TrainConfig
from pipeline.training.tables import kernels

KINDS = {
    EmbOptimType.EXACT_SGD: kernels.SGD,
    EmbOptimType.EXACT_ADAGRAD: kernels.ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: kernels.ROWWISE_ADAGRAD,
    EmbOptimType.ADAM: kernels.ADAM,
}
NOTHING = np.empty(0, np.float32)
SUMS_BYTES = 16 << 20
"""Memory of a thread for the gradients of rows."""


@contextmanager
def use_table_kernel(config: TrainConfig, device: torch.device, ours: "type[NumbaBags]") -> Iterator[None]:
    """Tables that TorchRec shards inside get the kernel of the config.

    TorchRec has no place to name another than FBGEMM's, so the class is exchanged while it builds its modules.

    Args:
        ours: The class of our kernel.
    """
    stock = SplitTableBatchedEmbeddingBagsCodegen
    if not uses_fbgemm(config, device.type):
        setattr(batched_embedding_kernel, stock.__name__, ours)
    try:
        yield
    finally:
        setattr(batched_embedding_kernel, stock.__name__, stock)


def uses_fbgemm(config: TrainConfig, device: str) -> bool:
    """Whether tables have FBGEMM's kernel."""
    return config.embedding_kernel == "fbgemm" or config.table_precision != "fp32" or device != "cpu"


def require_fbgemm(config: TrainConfig, device: str) -> None:
    """Refuses what FBGEMM's kernel would ignore or fail at on CPU.

    Raises:
        ConfigError: Names the setting.
    """
    if device != "cpu":
        return
    where, remedy = "training.embedding_kernel 'fbgemm' on CPU", "Take embedding_kernel=auto with fp32 tables."
    if config.table_optimizer == "adam":
        raise ConfigError(where, "table_optimizer rowwise_adagrad, adagrad or sgd", "adam", remedy)
    if config.table_weight_decay:
        raise ConfigError(where, "no table_weight_decay", f"{config.table_weight_decay}", remedy)


def set_update_number(bags: SplitTableBatchedEmbeddingBagsCodegen, number: int) -> None:
    """Tells a kernel the number of the update that comes next, counted from 1; Adam's bias correction needs it.

    FBGEMM's own `set_optimizer_step` is no way: it sets a counter that the kernel looks at before its first pass alone,
    and waits for the device. After that the kernel counts passes, those of validations among them.
    """
    if isinstance(bags, NumbaBags):
        bags.steps = number
    else:
        for counter in (bags.iter_cpu, bags.iter):
            counter.fill_(number - 1)  # the pass adds 1 before it uses it


class NumbaBags(SplitTableBatchedEmbeddingBagsCodegen):
    """Pooled lookups in the tables of a rank, and their exact optimizer inside the backward pass, on several threads.

    Weights and optimizer state are FBGEMM's own arrays, so checkpoints do not depend on the kernel; FBGEMM has no Adam
    on CPU, so its second moment is added. Rows that a batch does not read stay as they are, under Adam too.

    Args:
        settings: As FBGEMM takes them; TorchRec calls this.
    Shapes:
        indices int64 [lookups], offsets int64 [F * B + 1] -> float32 [B, sum of widths].
    Raises:
        IndexError: If an id lies outside its table.
        NotImplementedError: For weights of samples, other pooling or numbers other than float32: no config asks for
            them, and TorchRec must not get other results in silence if one ever does.
    Source:
        Mudigere et al. 2022, arXiv:2104.05158, section 4.1 (exact, deterministic sparse optimizers).
    """

    def __init__(self, embedding_specs: list[Any], **settings: Any) -> None:
        chosen = settings.get("optimizer", EmbOptimType.EXACT_SGD)
        if settings.get("weights_precision", SparseType.FP32) != SparseType.FP32 or chosen not in KINDS:
            raise NotImplementedError(f"{settings.get('weights_precision')} tables with {chosen}")
        self.limit = settings["max_gradient"] if settings.get("gradient_clipping") else np.inf
        self.kind = KINDS[chosen]
        if self.kind == kernels.ADAM:
            settings["optimizer"] = EmbOptimType.EXACT_ADAGRAD  # for its state of one number an element
        super().__init__(embedding_specs, **settings)
        if self.pooling_mode == PoolingMode.NONE:
            raise NotImplementedError("lookups without pooling")
        self.arrays: dict[str, tuple[int | None, np.ndarray]] = {}
        """Address and array of tensors; an array keeps its memory, so no other tensor gets the address."""
        self.steps = 0
        """Updates made, this one included; see `set_update_number`."""
        self.second = torch.zeros_like(self.weights_host.detach()) if self.kind == kernels.ADAM else torch.empty(0)
        rows, widths = np.array([spec[0] for spec in embedding_specs]), np.array([spec[1] for spec in embedding_specs])
        origin = np.array(self.weights_physical_offsets)
        first_row = np.concatenate([[0], np.cumsum(rows)])
        columns = np.concatenate([[0], np.cumsum(widths[self.feature_table_map])])[:-1]
        owner = np.array(self.feature_table_map)
        members = np.argsort(owner, kind="stable")
        first_member = np.searchsorted(owner[members], np.arange(len(rows) + 1))
        self.features = np.stack([origin[owner], rows[owner], widths[owner], columns], 1).astype(np.int64)
        self.members = np.stack([members, columns[members]], 1).astype(np.int64)
        self.tables = np.zeros((len(rows) + 1, 5), np.int64)
        self.tables[:-1, :4] = np.stack([origin, first_row[:-1], rows, widths], 1)
        self.tables[:, 4] = first_member
        self.all_tables = np.array([(table, 0, 0) for table in range(len(rows))], np.int64).reshape(-1, 3)
        """A share of the update, for one thread."""
        self.place = np.full(int(first_row[-1]), kernels.NEW, np.int32)
        self.threads = torch.get_num_threads()
        room = min(int(rows.max(initial=1)), SUMS_BYTES // (4 * int(widths.max(initial=1))))
        self.sums = [np.empty(room * int(widths.max(initial=1)), np.float32) for _ in range(self.threads)]
        """Memory that the kernel writes over at every step: new pages cost more than filling them."""
        self.rows_seen = [np.empty(room, np.int64) for _ in range(self.threads)]
        self.parts = 1 << (self.threads - 1).bit_length()
        self.pool = ThreadPoolExecutor(self.threads - 1) if self.threads > 1 else None

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor, *weights: Any, **others: Any) -> torch.Tensor:  # type: ignore[override]
        """See the class."""
        if any(value is not None for value in (*weights, *others.values())):
            raise NotImplementedError("weights of samples; take training.embedding_kernel=fbgemm")
        pooled: torch.Tensor = _Lookup.apply(self.placeholder_autograd_tensor, self, indices.long(), offsets.long())  # type: ignore[no-untyped-call]
        return pooled

    def lookup(self, indices: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The pooled vectors of a batch."""
        bags = (len(offsets) - 1) // len(self.features)
        out = np.empty((bags, self.total_D), np.float32)
        weights, mean = self._numbers("weights_host"), self.pooling_mode == PoolingMode.MEAN
        bounds = [bags * n // self.threads for n in range(self.threads + 1)]
        outside = self._side_by_side(
            kernels.pool,
            [(weights, self.features, mean, indices, offsets, out, *bounds[n : n + 2]) for n in range(self.threads)],
        )
        if sum(outside):
            raise IndexError(f"{sum(outside)} ids outside the tables {self.table_names}")
        return out

    def update(self, indices: np.ndarray, offsets: np.ndarray, gradient: torch.Tensor) -> None:
        """One optimizer step with the gradient of the pooled vectors, float32 [B, sum of widths]."""
        weights, mean = self._numbers("weights_host"), self.pooling_mode == PoolingMode.MEAN
        moment = NOTHING if self.kind == kernels.SGD else self._numbers("momentum1_host")
        given = self.optimizer_args
        numbers = [self.get_learning_rate(), given.eps, given.weight_decay, self.limit, given.beta1, given.beta2]
        corrections = [1.0 - given.beta1**self.steps, 1.0 - given.beta2**self.steps]
        settings = np.array(numbers + corrections, np.float32)
        flat = gradient if gradient.stride(1) == 1 else gradient.contiguous()
        stride = flat.stride(0)
        numbers_in_memory = (len(flat) - 1) * stride + flat.shape[1] if len(flat) else 0
        common = (self.kind, weights, moment, self._numbers("second"), settings, self.tables, self.members)
        batch = (mean, indices, offsets, flat.as_strided((numbers_in_memory,), (1,)).numpy(), stride, self.place)
        shares = zip(self._tasks(offsets), self.rows_seen, self.sums, strict=True)
        self._side_by_side(kernels.update, [(*common, tasks, *batch, *scratch) for tasks, *scratch in shares])

    def get_optimizer_state(self) -> list[dict[str, torch.Tensor]]:
        """The state by table, as TorchRec puts it into checkpoints."""
        states = super().get_optimizer_state()
        if self.kind == kernels.ADAM:
            for state, (origin, _, rows, width, _) in zip(states, self.tables[:-1].tolist(), strict=True):
                state["exp_avg_sq"] = self.second[origin : origin + rows * width].view(rows, width)
        return states

    def _tasks(self, offsets: np.ndarray) -> list[np.ndarray]:
        """Who updates what: whole tables by falling number of lookups, each to the thread with the least so far.

        A table that is too large a share for one thread is cut into parts, 2, 4, ..., by the last bits of the row.
        """
        if self.threads == 1:
            return [self.all_tables]
        bags = (len(offsets) - 1) // len(self.features)
        ends = offsets[:: bags or 1]
        per_feature = np.diff(ends)[self.members[:, 0]] + bags
        work = np.add.reduceat(per_feature, self.tables[:-1, 4])
        shares: list[list[tuple[int, int, int]]] = [[] for _ in range(self.threads)]
        loads = [0.0] * self.threads
        for table in np.argsort(-work, kind="stable").tolist():
            parts = self.parts if work[table] * 2 * self.threads > work.sum() else 1
            for part in range(parts):
                thread = loads.index(min(loads))
                shares[thread].append((table, part, parts - 1))
                loads[thread] += work[table] / parts
        return [np.array(share, np.int64).reshape(-1, 3) for share in shares]

    def _numbers(self, name: str) -> np.ndarray:
        """A tensor of this module as an array, made again where the tensor has got other memory."""
        tensor: torch.Tensor = getattr(self, name)
        place, numbers = self.arrays.get(name, (None, NOTHING))
        if place != tensor.data_ptr():
            numbers = tensor.detach().numpy()
            self.arrays[name] = tensor.data_ptr(), numbers
        return numbers

    def _side_by_side(self, kernel: Any, calls: list[tuple[Any, ...]]) -> list[Any]:
        """One call on this thread, the others on the pool's."""
        waiting = [self.pool.submit(kernel, *call) for call in calls[1:]] if self.pool is not None else []
        mine = [kernel(*call) for call in calls[:1]]
        return mine + [future.result() for future in waiting]


class _Lookup(torch.autograd.Function):
    """The lookup as autograd sees it: its backward pass updates the tables and hands no gradient on."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, bags: NumbaBags, *batch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.bags, ctx.batch = bags, [tensor.numpy() for tensor in batch]
        return torch.from_numpy(bags.lookup(*ctx.batch))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.bags.update(*ctx.batch, gradient.float())
        return (None, None, None, None)

"""NumbaBags: our CPU kernel for sharded embedding tables, which replaces FBGEMM's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed import batched_embedding_kernel

from pipeline.errors import ConfigError
from pipeline.training.config import TrainConfig
from pipeline.training.tables import kernels
from pipeline.training.tables.loops import LoopThreads

KINDS = {
    EmbOptimType.EXACT_SGD: kernels.SGD,
    EmbOptimType.EXACT_ADAGRAD: kernels.ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: kernels.ROWWISE_ADAGRAD,
    EmbOptimType.ADAM: kernels.ADAM,
}
NOTHING = np.empty(0, np.float32)
NO_ROWS = np.empty(0, np.int64)
SUMS_BYTES = 16 << 20
"""Memory of a thread for the gradients of rows."""


@contextmanager
def use_table_kernel(config: TrainConfig, device: torch.device, ours: "type[NumbaBags]") -> Iterator[None]:
    """Gives tables that TorchRec shards inside the block the kernel that the config asks for.

    TorchRec has no option for a kernel other than FBGEMM's, so its class is replaced while TorchRec builds its modules.

    Args:
        ours: Class of our kernel.
    """
    stock = SplitTableBatchedEmbeddingBagsCodegen
    if not uses_fbgemm(config, device.type):
        setattr(batched_embedding_kernel, stock.__name__, ours)
    try:
        yield
    finally:
        setattr(batched_embedding_kernel, stock.__name__, stock)


def uses_fbgemm(config: TrainConfig, device: str) -> bool:
    """Whether tables use FBGEMM's kernel. On CPU it rounds fp16 to the nearest number, which loses small updates."""
    return device != "cpu" or (config.embedding_kernel == "fbgemm" and config.table_precision == "fp32")


def require_fbgemm(config: TrainConfig, device: str) -> None:
    """Refuses settings that FBGEMM's kernel ignores or does not support on CPU.

    Raises:
        ConfigError: Names the setting.
    """
    if device != "cpu":
        return
    where, remedy = "training.embedding_kernel 'fbgemm' on CPU", "Set embedding_kernel: auto, with fp32 tables."
    if config.table_optimizer == "adam":
        raise ConfigError(where, "table_optimizer rowwise_adagrad, adagrad or sgd", "adam", remedy)
    if config.table_weight_decay:
        raise ConfigError(where, "no table_weight_decay", f"{config.table_weight_decay}", remedy)


def set_update_number(bags: SplitTableBatchedEmbeddingBagsCodegen, number: int) -> None:
    """Sets the number of a kernel's next update, counted from 1. Adam's bias correction needs it.

    FBGEMM's own `set_optimizer_step` does not work here. It sets a counter that the kernel reads only before its first
    pass, and it waits for the device. Later the kernel counts all passes, including those of validations.
    """
    if isinstance(bags, NumbaBags):
        bags.steps = number
    else:
        for counter in (bags.iter_cpu, bags.iter):
            counter.fill_(number - 1)  # the pass adds 1 first


class HeldTables(NamedTuple):
    """Tables as the loops read and write them (see `kernels.update`)."""

    weights: np.ndarray
    moment: np.ndarray
    second: np.ndarray
    features: np.ndarray
    """int64 [F, 4]: offset in `weights`, rows, width, first column of its vectors."""
    tables: np.ndarray
    indices: np.ndarray
    rows: np.ndarray = NO_ROWS
    """int64 [rows], where each row of copied tables is from."""


class NumbaBags(SplitTableBatchedEmbeddingBagsCodegen):
    """Pooled lookups in the tables of a rank, and their exact optimizer in the backward pass, on several threads.

    Weights and optimizer state are FBGEMM's own arrays, so checkpoints do not depend on the kernel. FBGEMM has no Adam
    on CPU, so this class adds the second moment. Rows that a batch does not read stay unchanged, with Adam too.

    Args:
        settings: Settings of FBGEMM's class, as TorchRec passes them.
    Shapes:
        indices int64 [lookups], offsets int64 [F * B + 1], weights of ids float32 [lookups] or None -> float32
        [B, sum of widths].
    Raises:
        IndexError: If an id lies outside its table.
        NotImplementedError: For weights with means, other pooling or numbers other than float32: no config asks for
            them, and TorchRec must not get other results in silence if one ever does.
    Source:
        Mudigere et al. 2022, arXiv:2104.05158, section 4.1 (exact, deterministic sparse optimizers).
    """

    precision = SparseType.FP32
    """Of the tables."""

    def __init__(self, embedding_specs: list[Any], **settings: Any) -> None:
        chosen = settings.get("optimizer", EmbOptimType.EXACT_SGD)
        if settings.get("weights_precision", SparseType.FP32) != self.precision or chosen not in KINDS:
            raise NotImplementedError(f"{settings.get('weights_precision')} tables with {chosen}")
        self.limit = settings["max_gradient"] if settings.get("gradient_clipping") else np.inf
        self.kind = KINDS[chosen]
        if self.kind == kernels.ADAM:
            settings["optimizer"] = EmbOptimType.EXACT_ADAGRAD  # for its state of one number per element
        super().__init__(embedding_specs, **settings)
        if self.pooling_mode == PoolingMode.NONE:
            raise NotImplementedError("The numba kernel does not support lookups without pooling.")
        self.arrays: dict[str, tuple[int | None, np.ndarray]] = {}
        """Tensor name -> its address and array. The array keeps the memory alive, so the address is not reused."""
        self.divided = False
        """Whether ids outside the tables are those of other ranks; see `place`."""
        self.steps = 0
        """Number of the next update, counted from 1. See `set_update_number`."""
        numbers = len(self.weights_host) if self.kind == kernels.ADAM else 0
        self.second = torch.zeros(numbers, dtype=torch.float32)
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
        """The whole update as tasks of one thread."""
        self.slots = np.full(int(first_row[-1]), kernels.UNSEEN, np.int32)
        self.threads = threads = torch.get_num_threads()
        """Threads that work on a batch: at most as many as now. Results do not depend on their number."""
        slots = min(int(rows.max(initial=1)), SUMS_BYTES // (4 * int(widths.max(initial=1))))
        self.sums = [np.empty(slots * int(widths.max(initial=1)), np.float32) for _ in range(threads)]
        """Scratch memory that the kernel reuses at every step. New pages would cost more than filling them."""
        self.rows_seen = [np.empty(slots, np.int64) for _ in range(threads)]
        self.parts = 1 << (threads - 1).bit_length()
        self.loops = LoopThreads(threads)

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """See the class."""
        if any(value is not None for value in others.values()):
            raise NotImplementedError("The numba kernel knows no other options of a lookup.")
        weights = None if per_sample_weights is None else per_sample_weights.detach().float()
        pooled: torch.Tensor = _Lookup.apply(
            self.placeholder_autograd_tensor, self, indices.long(), offsets.long(), weights
        )
        return pooled

    def place(self, columns: Sequence[int], divided: bool) -> None:
        """Makes the tables a part of those whose vectors one array has.

        Args:
            columns: First column of each feature's vector in the arrays of vectors and of their gradients.
            divided: Whether other ranks have other rows of the tables. Ids outside are then theirs.
        """
        self.divided = divided
        self.features[:, 3] = columns
        self.members[:, 1] = self.features[self.members[:, 0], 3]

    def lookup(
        self, indices: np.ndarray, offsets: np.ndarray, id_weights: np.ndarray | None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the pooled vectors of a batch, float32 [B, sum of widths].

        Args:
            out: Where to write them, float32 [B, C]. Columns of other features stay as they are. None: new memory.
        """
        mean = self.pooling_mode == PoolingMode.MEAN
        if mean and id_weights is not None:
            raise NotImplementedError("The numba kernel knows no weights with means.")
        bags = (len(offsets) - 1) // len(self.features)
        if out is None:
            out = torch.empty(bags, self.total_D).numpy()  # NumPy's own asks for huge pages, which can take 50 ms
        held = self.hold(indices, offsets, False)
        tables, indices = (held.weights, held.features), held.indices
        bounds = [bags * n // self.threads for n in range(self.threads + 1)]
        parts = [(out, *bounds[n : n + 2]) for n in range(self.threads)]
        if id_weights is not None:
            calls = [(*tables, indices, offsets, id_weights, *part) for part in parts]
            outside = self.loops.run(kernels.pool_weighted, calls)
        else:
            outside = self.loops.run(kernels.pool, [(*tables, mean, indices, offsets, *part) for part in parts])
        if sum(outside) and not self.divided:
            raise IndexError(f"{sum(outside)} ids outside the tables {self.table_names}")
        return out

    def update(
        self, indices: np.ndarray, offsets: np.ndarray, id_weights: np.ndarray | None, gradient: torch.Tensor
    ) -> None:
        """Makes one optimizer step with the gradient of the pooled vectors, float32 [B, sum of widths]."""
        mean, held = self.pooling_mode == PoolingMode.MEAN, self.hold(indices, offsets, True)
        given = self.optimizer_args
        numbers = [self.get_learning_rate(), given.eps, given.weight_decay, self.limit, given.beta1, given.beta2]
        corrections = [1.0 - given.beta1**self.steps, 1.0 - given.beta2**self.steps]
        settings = np.array(numbers + corrections, np.float32)
        flat = gradient if gradient.stride(1) == 1 else gradient.contiguous()
        stride = flat.stride(0)
        numbers_in_memory = (len(flat) - 1) * stride + flat.shape[1] if len(flat) else 0
        common = (self.kind, held.weights, held.moment, held.second, settings, held.tables, self.members)
        numbers_of = flat.as_strided((numbers_in_memory,), (1,)).numpy()
        batch = (mean, held.indices, offsets, id_weights, numbers_of, stride, self.slots)
        shares = zip(self._share_out(offsets), self.rows_seen, self.sums, strict=False)  # of `threads` at most
        self.loops.run(kernels.update, [(*common, tasks, *batch, *scratch) for tasks, *scratch in shares])
        self.release(held)

    def hold(self, indices: np.ndarray, offsets: np.ndarray, state: bool) -> HeldTables:
        """Returns the tables for a batch.

        Args:
            state: Whether to get the optimizer's state, too, for an update.
        """
        moment = self._numbers("momentum1_host") if state and self.kind != kernels.SGD else NOTHING
        return HeldTables(
            self._numbers("weights_host"), moment, self._numbers("second"), self.features, self.tables, indices
        )

    def release(self, held: HeldTables) -> None:
        """Takes the tables back after an update."""

    def get_optimizer_state(self) -> list[dict[str, torch.Tensor]]:
        """Returns the state by table, in the form that TorchRec saves in checkpoints."""
        states = super().get_optimizer_state()
        if self.kind == kernels.ADAM:
            for state, (origin, _, rows, width, _) in zip(states, self.tables[:-1].tolist(), strict=True):
                state["exp_avg_sq"] = self.second[origin : origin + rows * width].view(rows, width)
        return states

    def _share_out(self, offsets: np.ndarray) -> list[np.ndarray]:
        """Assigns tables to threads: the table with most lookups first, each to the thread with the least work so far.

        A table that is too much work for one thread is cut into 2, 4, ... parts by the last bits of the row number.
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
        """Returns a tensor of this module as an array, and renews the array if the tensor has other memory."""
        tensor: torch.Tensor = getattr(self, name)
        address, numbers = self.arrays.get(name, (None, NOTHING))
        if address != tensor.data_ptr():
            numbers = tensor.detach().numpy()
            self.arrays[name] = tensor.data_ptr(), numbers
        return numbers


class _Lookup(torch.autograd.Function):
    """The lookup for autograd. Its backward pass updates the tables and returns no gradient."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, bags: NumbaBags, *batch: torch.Tensor | None) -> torch.Tensor:
        ctx.bags, ctx.batch = bags, [None if tensor is None else tensor.numpy() for tensor in batch]
        return torch.from_numpy(bags.lookup(*ctx.batch))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        ctx.bags.update(*ctx.batch, gradient.float())
        return (None, None, None, None, None)

"""Exchange of ids and vectors between ranks of one machine in shared memory, without copies through sockets.

Shape letters: W ranks, F features, B rows of all ranks, C columns of the vectors of all features, P parts of a sum.
"""

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.training.tables.bags import NumbaBags
from pipeline.training.tables.torchrec_private import (
    divides_by_lengths,
    kernels_of,
    lookups_of,
    reorder_vectors,
    replace_exchange,
    shardings_of,
)

ROWS, IDS, COUNTS = 0, 1, 2
"""Columns of the header: rows of a rank's batch, its ids, and from there on its ids of each feature."""
SPARE = 1.25
"""Memory that is too small is replaced by this much more than needed, since the ids of batches differ in number."""
NAME, TOKEN_BYTES = "dlrm-shared", 16
WHOLE = (TwPooledEmbeddingSharding, CwPooledEmbeddingSharding, TwCwPooledEmbeddingSharding)
"""Shardings in which one rank has all rows of a table, or of some of its columns."""
BY_ROWS = (RwPooledEmbeddingSharding, TwRwPooledEmbeddingSharding, GridPooledEmbeddingSharding)
"""Shardings in which all ranks of a host have some rows."""


Lists = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Ids int64 [V], offsets int64 [F * B + 1] and weights of ids float32 [V] of the tables of one kernel."""


class GatheredIds(KeyedJaggedTensor):
    """Lists of a rank's features for the rows of all ranks."""

    place: slice
    """The rows of this rank's batch."""


class OwnFeature(NamedTuple):
    """A feature whose table, or a part of it, is on this rank. It may be there more than once, with other columns."""

    name: str
    sent: int
    """Its place among the features that ranks send."""
    first_row: int
    """First row of its table on this rank."""
    rows: int
    """Rows of the table on all ranks."""


def share_memory(size: int, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, int] | None:
    """Returns zeroed memory that all ranks share, uint8 [size], and its descriptor. All ranks call it together.

    The memory has no name, so it is freed with the last process that maps it, however that process ends.

    Args:
        group: Sends where the memory is. None: the default group.
    Returns:
        None if some rank cannot map the memory of rank 0, for instance because it is on another host.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    mapped = _create(size, token) if dist.get_rank() == 0 else None
    source = torch.tensor([os.getpid(), -1 if mapped is None else mapped[1], *token])
    dist.broadcast(source, 0, group)
    process, number, *expected = source.tolist()
    if dist.get_rank() != 0:
        mapped = _open(f"/proc/{process}/fd/{number}", size, bytes(expected))
    everyone = torch.tensor(int(mapped is not None))
    dist.all_reduce(everyone, dist.ReduceOp.MIN, group)
    if mapped is None:
        return None
    memory, fd = mapped
    if not everyone:
        os.close(fd)
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)[:size], fd


def _create(size: int, token: bytes) -> tuple[mmap.mmap, int] | None:
    """Maps new memory that ends with the token. None: the system refuses it."""
    fd = -1
    try:
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, size + len(token))
        os.pwrite(fd, token, size)
        return mmap.mmap(fd, size + len(token)), fd
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None


def _open(path: str, size: int, token: bytes) -> tuple[mmap.mmap, int] | None:
    """Maps the memory of another process. None: there is no such memory, as on another host, or it is refused."""
    fd = -1
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # any file may be there
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(fd, len(token), size) == token:
            return mmap.mmap(fd, size + len(token)), fd
    except OSError:
        pass
    if fd >= 0:
        os.close(fd)
    return None


def share_exchange(model: DistributedModelParallel, names: Sequence[str]) -> None:
    """Lets ranks of one machine exchange ids and vectors of their tables in shared memory.

    TorchRec's way through gloo stays if some rank is on another machine. All ranks call it together, before the first
    batch.

    Args:
        model: Its tables on CPU have our kernel.
        names: Features in the order in which the model wants their vectors.
    """
    ranks = dist.get_world_size()
    divided = BY_ROWS if get_local_size(ranks) == ranks else ()  # else not all ranks have rows of each table
    for tables in model.modules():
        if not isinstance(tables, ShardedEmbeddingBagCollection):
            continue
        # Vectors of a single sharding need no other order afterwards. But TorchRec knows only its own when it divides
        # vectors of divided tables by lengths.
        shardings = shardings_of(tables)
        alone = len(shardings) == 1 and not divides_by_lengths(tables)
        for at, (sharding, lookup) in enumerate(zip(shardings, lookups_of(tables), strict=True)):
            by_rows = isinstance(sharding, divided)
            if not by_rows and type(sharding) not in WHOLE:
                continue
            widths = dict(zip(sharding.embedding_names(), sharding.embedding_dims(), strict=True))
            order = {name: widths[name] for name in names} if alone else widths
            exchange = Exchange.between_ranks(sharding, lookup, order, by_rows)
            if exchange is None:
                return
            if alone:
                reorder_vectors(tables, order)
            replace_exchange(tables, at, exchange.send, exchange.look_up, exchange.receive)


class OwnBatch(NamedTuple):
    """What a rank looks up and updates."""

    lists: list[Lists]
    """Those of each kernel."""
    rows: int
    """Rows of all ranks."""
    place: slice
    """Rows of this rank's own batch."""


class Exchange:
    """Ids and vectors of the tables of one of TorchRec's shardings, in memory that all ranks share.

    A rank writes its ids there, and each rank takes those of its tables. Each rank then pools its tables for the rows
    of all ranks, straight into the memory where the rank of a row reads its vectors. Their gradients go the same way
    back. A few bytes through gloo say that a rank has written, so a rank that dies ends the others as usual.

    If tables are divided by rows, every rank pools its rows of all tables into vectors of its own. The rank of a row
    adds them in the order of the ranks.

    Vectors stay where they are until the next lookup. A backward pass of an earlier one then fails.

    Args:
        sharding: What TorchRec knows of the tables of all ranks.
        lookup: TorchRec's module with this rank's tables.
        widths: Feature -> width of its vector, in the order of the vectors.
        divided: Whether each rank has some rows of every table.
        header: int64 [W, 2 + F], shared. See `ROWS`.
        group: Sends the signals.
    """

    def __init__(
        self, sharding: Any, lookup: Any, widths: Mapping[str, int], divided: bool, header: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self.rank, self.ranks, self.group = dist.get_rank(), dist.get_world_size(), group
        self.header, self.divided = header, divided
        ends = np.cumsum(list(widths.values())).tolist()
        starts = dict(zip(widths, [0, *ends], strict=False))
        sent = sharding.feature_names()
        self.own: list[OwnFeature] = []
        """In the order of this rank's tables."""
        modules, self.splits = kernels_of(lookup)
        self.bags: list[NumbaBags] = [module.emb_module for module in modules]
        for bags, config in zip(self.bags, lookup.grouped_configs, strict=True):
            columns = []
            for table in config.embedding_tables:
                first_row, first_column = table.local_metadata.shard_offsets
                for name in table.feature_names:
                    columns.append(starts[name] + first_column)
                    self.own.append(OwnFeature(name, sent.index(name), first_row, table.num_embeddings))
            bags.place(columns, divided)
        self.slots = torch.empty(0, dtype=torch.uint8)
        """Ids of the ranks, uint8 [W * bytes of a slot]."""
        self.pooled_PBC, self.gradient_BC = torch.empty(0, 0, ends[-1]), torch.empty(0, ends[-1])
        self.unread = False
        """Whether another rank may still read the ids of the last batch."""
        self.signal = torch.zeros(1)
        self.trigger = torch.zeros(0, requires_grad=True)

    @classmethod
    def between_ranks(cls, sharding: Any, lookup: Any, widths: Mapping[str, int], divided: bool) -> "Exchange | None":
        """Returns an exchange between all ranks. None: they are not on one machine."""
        group = _signal_group(dist.group.WORLD)
        shape = (dist.get_world_size(), COUNTS + len(sharding.feature_names()))
        shared = share_memory(8 * shape[0] * shape[1], group)
        if shared is None:
            return None
        os.close(shared[1])
        return cls(sharding, lookup, widths, divided, shared[0].view(torch.int64).view(shape), group)

    def send(self, sparse: KeyedJaggedTensor) -> Awaitable[Awaitable[GatheredIds]]:
        """Exchanges ids. Returns the lists of this rank's features for the rows of all ranks.

        Args:
            sparse: Features of all ranks for the rows of this rank.
        Raises:
            IndexError: If an id lies outside its table, where other ranks could not see it.
        """
        if self.unread:
            self._wait()
        self.unread = True
        head = [sparse.stride(), sparse.values().numel(), *sparse.length_per_key()]
        if self.divided:
            self._require_known(sparse, head)
        self.header[self.rank] = torch.tensor(head)
        if self._slot_bytes(head) <= self._room:
            self._write(sparse)
        self._wait()
        heads = self.header.numpy().copy()
        if self._grow(heads):
            self._write(sparse)
            self._wait()
        return NoWait(NoWait(self._gather(heads, sparse.weights_or_none() is not None)))

    def look_up(self, sparse: GatheredIds) -> torch.Tensor:
        """Returns the pooled vectors of this rank's rows from the tables of all ranks, float32 [B of this rank, C].

        Args:
            sparse: What `send` returned.
        """
        parts = sparse.split(self.splits) if self.bags else []
        batch = OwnBatch([_lists(part) for part in parts], sparse.stride(), sparse.place)
        vectors: torch.Tensor = _SharedLookup.apply(self.trigger, self, batch)
        return vectors

    def receive(self, vectors: torch.Tensor, context: Any) -> Awaitable[torch.Tensor]:
        """Returns the vectors, which are here already."""
        return NoWait(vectors)

    def pool(self, batch: OwnBatch) -> torch.Tensor:
        """Pools this rank's tables for all rows, and returns this rank's rows of all tables."""
        self.pooled_PBC[:, :0].zero_()  # tells autograd that vectors of an earlier batch are overwritten
        out = self.pooled_PBC[self.rank if self.divided else 0, : batch.rows].numpy()
        for bags, lists in zip(self.bags, batch.lists, strict=True):
            bags.lookup(*lists, out)
        self._wait()
        self.unread = False
        return reduce(torch.add, self.pooled_PBC[:, batch.place])

    def update(self, batch: OwnBatch, gradient_BC: torch.Tensor) -> None:
        """Updates this rank's tables with the gradients of all ranks. They are averaged, as TorchRec does."""
        divisor = self.ranks if get_gradient_division() else 1
        torch.div(gradient_BC.float(), divisor, out=self.gradient_BC[batch.place])
        self._wait()
        for bags, lists in zip(self.bags, batch.lists, strict=True):
            bags.update(*lists, self.gradient_BC[: batch.rows])

    def _wait(self) -> None:
        """Waits until all ranks are here. Each sees what the others wrote before."""
        dist.all_reduce(self.signal, group=self.group)

    @property
    def _room(self) -> int:
        return len(self.slots) // self.ranks

    def _slot_bytes(self, head: Sequence[int]) -> int:
        """Returns the most bytes that a rank's lengths, ids and their weights take."""
        return _aligned(4 * int(head[ROWS]) * (len(head) - COUNTS)) + 12 * int(head[IDS])

    def _grow(self, heads: np.ndarray) -> bool:
        """Renews memory that is too small for the batch. Returns whether the ids must be written again."""
        rows, columns = int(heads[:, ROWS].sum()), self.gradient_BC.shape[1]
        if rows > len(self.gradient_BC):
            room, parts = int(SPARE * rows), self.ranks if self.divided else 1
            pooled, gradient = (_require(4 * n * room * columns, self.group) for n in (parts, 1))
            self.pooled_PBC = pooled.view(torch.float32).view(parts, room, columns)
            self.gradient_BC = gradient.view(torch.float32).view(room, columns)
        needed = max(self._slot_bytes(head) for head in heads)
        if needed <= self._room:
            return False
        self.slots = _require(self.ranks * _aligned(int(SPARE * needed)), self.group)
        return True

    def _slot(self, rank: int, head: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a rank's lengths int32 [F, B of the rank], ids int64 and weights float32, in shared memory."""
        slot = self.slots.numpy()[rank * self._room : (rank + 1) * self._room]
        rows, ids, features = int(head[ROWS]), int(head[IDS]), len(head) - COUNTS
        start = _aligned(4 * rows * features)
        lengths = slot[: 4 * rows * features].view(np.int32).reshape(features, rows)
        weights = slot[start + 8 * ids : start + 12 * ids].view(np.float32)
        return lengths, slot[start : start + 8 * ids].view(np.int64), weights

    def _write(self, sparse: KeyedJaggedTensor) -> None:
        lengths, ids, weights = self._slot(self.rank, self.header[self.rank].tolist())
        lengths[:] = sparse.lengths().numpy().reshape(lengths.shape)
        ids[:] = sparse.values().numpy()
        given = sparse.weights_or_none()
        if given is not None:
            weights[:] = given.detach().numpy()

    def _gather(self, heads: np.ndarray, weighted: bool) -> GatheredIds:
        """Returns the lists of this rank's features, of each feature the rows of the first rank first."""
        slots = [self._slot(rank, head) for rank, head in enumerate(heads)]
        ends = heads[:, COUNTS:].cumsum(1)
        starts = (ends - heads[:, COUNTS:]).tolist()
        sent = [feature.sent for feature in self.own]
        lengths = np.concatenate([lengths[sent] for lengths, _, _ in slots], 1)
        total = int(heads[:, COUNTS:][:, sent].sum())
        ids = torch.empty(total, dtype=torch.int64)  # not NumPy's memory, as in `NumbaBags.lookup`
        weights = torch.empty(total) if weighted else None
        at = 0
        for feature in self.own:
            for rank, (_, ids_of_rank, weights_of_rank) in enumerate(slots):
                part = slice(starts[rank][feature.sent], int(ends[rank, feature.sent]))
                into = slice(at, at + part.stop - part.start)
                np.subtract(ids_of_rank[part], feature.first_row, out=ids[into].numpy())
                if weights is not None:
                    weights[into] = torch.from_numpy(weights_of_rank[part])
                at = into.stop
        bounds = [0, *heads[:, ROWS].cumsum().tolist()]
        names = [feature.name for feature in self.own]
        gathered = GatheredIds(names, ids, weights, torch.from_numpy(lengths.reshape(-1)), stride=bounds[-1])
        gathered.place = slice(*bounds[self.rank : self.rank + 2])
        return gathered

    def _require_known(self, sparse: KeyedJaggedTensor, head: Sequence[int]) -> None:
        ends = np.cumsum(head[COUNTS:])
        for feature in self.own:
            end = int(ends[feature.sent])
            ids = sparse.values().numpy()[end - head[COUNTS + feature.sent] : end]
            if len(ids) and not (ids.min() >= 0 and ids.max() < feature.rows):
                raise IndexError(
                    f"ids of feature '{feature.name}' from {ids.min()} to {ids.max()}, outside {feature.rows} rows"
                )


def _lists(sparse: KeyedJaggedTensor) -> Lists:
    weights = sparse.weights_or_none()
    return sparse.values().numpy(), sparse.offsets().long().numpy(), None if weights is None else weights.numpy()


def _aligned(size: int) -> int:
    """Returns the next multiple of 8, at which an int64 may start."""
    return -(-size // 8) * 8


@lru_cache(maxsize=1)
def _signal_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group that all exchanges of a process use. c10d would keep each new one with its sockets."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _require(size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns shared memory, which all ranks could map before."""
    shared = share_memory(size, group)
    if shared is None:
        raise OSError(f"{size} bytes of memory that the ranks of this machine share could not be mapped")
    os.close(shared[1])
    return shared[0]


class _SharedLookup(torch.autograd.Function):
    """The lookup for autograd. Its backward pass updates the tables and returns no gradient."""

    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, exchange: Exchange, batch: OwnBatch) -> torch.Tensor:
        ctx.exchange, ctx.batch = exchange, batch
        return exchange.pool(batch)

    @staticmethod
    def backward(ctx: Any, gradient_BC: torch.Tensor) -> tuple[None, None, None]:
        ctx.exchange.update(ctx.batch, gradient_BC)
        return (None, None, None)

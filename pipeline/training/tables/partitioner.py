"""Multiway number partitioning by largest differencing, as a TorchRec partitioner."""

import copy
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import (
    PartitionByType,
    Partitioner,
    PlannerError,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)


@dataclass(frozen=True)
class Item:
    """Something to assign to one rank."""

    load: float
    memory: Storage
    rank: int | None = None
    """Rank that it must be assigned to."""


@dataclass(frozen=True)
class _Heap:
    """Items of one rank, whichever rank that will be."""

    load: float
    memory: Storage
    items: tuple[int, ...]
    bound: bool


NOTHING = Storage(hbm=0, ddr=0, ssd=0)


def largest_differencing(items: Sequence[Item], memory: Sequence[Storage]) -> list[int] | None:
    """Assigns items to ranks with a small largest load. Returns None if memory does not suffice.

    At first each item is a solution of its own, with all ranks but one empty. Then the two solutions with the largest
    difference between their ranks are merged, again and again: the fullest rank of one with the emptiest of the other.
    If that needs more memory than a rank has, ranks with most memory in use are merged with those with least.

    Args:
        memory: Memory of each rank.
    Source:
        Karmarkar and Karp 1982, "The differencing method of set partitioning", UCB/CSD 82/113; for several ranks
        Michiels, Korst, Aarts and van Leeuwen 2003, whose bound holds with ample memory: the largest load is at
        most 4/3 - 1/(3 ranks) times the optimum.
    Example:
        >>> room = [Storage(hbm=0, ddr=100, ssd=0)] * 2
        >>> largest_differencing([Item(load, Storage(hbm=0, ddr=1, ssd=0)) for load in (8, 7, 6, 5, 4)], room)
        [0, 1, 0, 1, 1]
    """
    ranks = len(memory)
    most = Storage(*(max(getattr(room, kind) for room in memory) for kind in ("hbm", "ddr", "ssd")))
    bound = [_bound(rank, items, memory[rank], most) for rank in range(ranks)]
    empty = [_Heap(0.0, NOTHING, (), False)] * (ranks - 1)
    heaps = [_Heap(item.load, item.memory, (number,), False) for number, item in enumerate(items) if item.rank is None]
    free = [[heap, *empty] for heap in heaps]
    queue = [(-_spread(solution), number, solution) for number, solution in enumerate([bound, *free])]
    heapq.heapify(queue)
    numbers = itertools.count(len(queue))
    while len(queue) > 1:
        merged = _merge(heapq.heappop(queue)[2], heapq.heappop(queue)[2], most)
        if merged is None:
            return None
        heapq.heappush(queue, (-_spread(merged), next(numbers), merged))
    homes = [0] * len(items)
    for heap in queue[0][2]:
        rank = -1 - heap.items[0]  # at the end, every heap holds the mark of one rank
        for number in heap.items[1:]:
            homes[number] = rank
    return homes


def _bound(rank: int, items: Sequence[Item], room: Storage, most: Storage) -> _Heap:
    """Returns the items bound to a rank. Counts its lack of memory against the largest rank as memory in use."""
    numbers = [number for number, item in enumerate(items) if item.rank == rank]
    memory = most - room
    for number in numbers:
        memory += items[number].memory
    return _Heap(sum(items[number].load for number in numbers), memory, (-1 - rank, *numbers), True)


def _spread(solution: Sequence[_Heap]) -> float:
    loads = [heap.load for heap in solution]
    return max(loads) - min(loads)


def _merge(a: Sequence[_Heap], b: Sequence[_Heap], most: Storage) -> list[_Heap] | None:
    for key in (lambda heap: heap.load, lambda heap: (heap.memory.hbm, heap.memory.ddr, heap.load)):
        pairs = zip(sorted(a, key=key), sorted(b, key=key, reverse=True), strict=True)
        merged = [_merge_heaps(x, y) for x, y in pairs]
        if all(heap.memory.fits_in(most) for heap in merged):
            return merged
    return None


def _merge_heaps(a: _Heap, b: _Heap) -> _Heap:
    first, second = (a, b) if a.bound else (b, a)  # keeps the rank's mark first
    return _Heap(a.load + b.load, a.memory + b.memory, first.items + second.items, a.bound or b.bound)


class LargestDifferencing(Partitioner):
    """Assigns shards that need one rank (whole tables, column shards) by largest differencing.

    Shards that need all ranks, or all ranks of a machine, are placed as TorchRec does. The best of this plan and those
    of TorchRec's greedy partitioner is taken, so the largest time of a rank is never longer than with that.
    """

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Assigns a rank to each shard.

        Raises:
            PlannerError: If memory does not suffice.
        """
        plans = [self._by_greed(proposal, storage_constraint, order) for order in (SortBy.STORAGE, SortBy.PERF)]
        plans.insert(0, self._by_differencing(proposal, storage_constraint))
        rate = NoopPerfModel(storage_constraint).rate
        found = [plan for plan in plans if isinstance(plan, list)]
        if not found:
            raise next(plan for plan in plans if isinstance(plan, PlannerError))
        best = min(found, key=rate)
        for option, chosen in zip(proposal, best, strict=True):
            option.shards = chosen.shards
        return proposal

    def _by_greed(
        self, proposal: list[ShardingOption], topology: Topology, order: SortBy
    ) -> list[ShardingOption] | PlannerError:
        try:
            return GreedyPerfPartitioner(sort_by=order).partition(copy.deepcopy(proposal), topology)
        except PlannerError as error:
            return error

    def _by_differencing(
        self, proposal: list[ShardingOption], topology: Topology
    ) -> list[ShardingOption] | PlannerError | None:
        plan = copy.deepcopy(proposal)
        several = [option for option in plan if option.partition_by != PartitionByType.DEVICE.value]
        try:
            GreedyPerfPartitioner().partition(several, topology)
        except PlannerError as error:
            return error
        shards = [shard for option in plan for shard in option.shards]
        homes = largest_differencing(
            [_item(shard) for shard in shards], [device.storage for device in topology.devices]
        )
        if homes is None:
            return None
        for shard, rank in zip(shards, homes, strict=True):
            shard.rank = rank
        return plan


def _item(shard: Shard) -> Item:
    assert shard.perf is not None
    assert shard.storage is not None
    return Item(shard.perf.total, shard.storage, shard.rank)

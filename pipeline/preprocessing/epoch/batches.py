"""Deals the transformed rows of blocks out to the ranks' shares of global batches."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from pipeline.preprocessing.epoch import kernels
from pipeline.preprocessing.epoch.memory import Arrays, Writer
from pipeline.transforms.kernels.hashing import offsets_of

Ids = npt.NDArray[np.int64]


class BlockSlice(BaseModel, frozen=True):
    """The rows [start, stop) that a batch takes from a shuffle block, in the block's order."""

    number: int
    """Position in the epoch. Seed, epoch and this number decide the order of the rows."""
    splits: tuple[int, ...]
    """Indices of its splits among the inputs of the work, in order."""
    start: int
    stop: int


class BatchWork(BaseModel, frozen=True):
    """A request for global batches of rows that are transformed already."""

    seed: int
    epoch: int
    shuffled: bool
    world_size: int
    ranks: tuple[int, ...]
    """Ranks to make shares for."""
    batches: tuple[tuple[BlockSlice, ...], ...]
    """Slices of each global batch, in order."""


class FeatureIndices(NamedTuple):
    """Positions of features in the plan's list of sparse features, each int64 [F]."""

    own: Ids
    """Features with a list for each row."""
    shared: Ids
    """Features with one list for several neighbouring rows."""


CHUNK_ARRAYS = ("dense", "labels", "weights", "starts", "ids", "sessions", "runs", "shared_starts", "shared_ids")
"""Names of the arrays of a chunk; see `Worker.transform_split`."""
Order = Callable[[BlockSlice], Ids]
"""Slice of a block -> order of its rows."""


@dataclass(frozen=True, eq=False)
class _ChunkPart:
    """Rows of a chunk and their places in the shares of some batches.

    Shapes:
        rows: int64 [n], row in the chunk. places: int64 [n], row among those of all shares. slots: int64 [n], position
        of its first feature in the lengths of all shares. strides: int64 [n], distance of two features there.
    """

    rows: Ids
    places: Ids
    slots: Ids
    strides: Ids
    chunk: Arrays
    """Arrays dense, labels, starts and ids, and weights if there are any; see `Worker.transform_split`."""


class _IdLists(NamedTuple):
    """Lists of a chunk and their places in the shares; see `_ChunkPart`."""

    rows: Ids
    slots: Ids
    strides: Ids
    starts: npt.NDArray[Any]
    ids: npt.NDArray[Any]


def write_batches(
    work: BatchWork, splits: Sequence[Arrays], order: Order, indices: FeatureIndices, numbers: int, writer: Writer
) -> None:
    """Writes each rank's share of some global batches; see `Worker.make_batches`.

    Args:
        indices: The sparse features.
        numbers: Dense values of a row.
    """
    shares, features = _layout_shares(work), len(indices.own) + len(indices.shared)
    rows = int(shares[-1, -1, :2].sum())
    out = dict(
        writer.add(
            {
                "shares": ("int64", shares.shape),
                "dense": ("float32", (rows, numbers)),
                "labels": ("float32", (rows,)),
                "weights": ("float32", (rows,)),
                "lengths": ("int32", (rows * features,)),
            }
        )
    )
    for name in ("dense", "labels", "weights", "lengths"):
        out[name][...] = 0  # places that get no row are padding
    if any("0.weights" in split for split in splits):
        writer.add({"totals": ("float64", (len(work.batches),))})["totals"][...] = _sum_weights(work, splits, order)
    parts = list(_collect_parts(work, splits, order, shares, features))
    for part in parts:
        chunk = part.chunk
        out["weights"][part.places] = chunk["weights"][part.rows] if "weights" in chunk else 1.0
        kernels.scatter_rows(part.rows, part.places, chunk["dense"], chunk["labels"], out["dense"], out["labels"])
    lists = [(indices.own, [_own_lists(part) for part in parts])]
    if len(indices.shared):
        inverse = writer.add({"inverse": ("int64", (rows,))})["inverse"]
        lists.append((indices.shared, _shared_lists(parts, shares, inverse)))
    for these, taken in lists:
        for one in taken:
            kernels.scatter_lengths(one.rows, one.slots, one.strides, one.starts, these, out["lengths"])
    starts = offsets_of(out["lengths"])
    shares[:, :, 2] = starts[features * shares[:, :, 0]]
    shares[:, :, 3] = starts[features * (shares[:, :, 0] + shares[:, :, 1])] - shares[:, :, 2]
    out["shares"][...] = shares
    values = writer.add({"values": ("int64", (int(starts[-1]),))})["values"]
    for these, taken in lists:
        for i, feature in enumerate(these):  # the values of one feature stay in the cache while all chunks add to them
            for one in taken:
                base = i * ((len(one.starts) - 1) // len(these))
                kernels.scatter_ids(
                    one.rows, one.slots, one.strides, one.starts, one.ids, base, feature, starts, values
                )


def _own_lists(part: _ChunkPart) -> _IdLists:
    return _IdLists(part.rows, part.slots, part.strides, part.chunk["starts"], part.chunk["ids"])


def _shared_lists(parts: Sequence[_ChunkPart], shares: Ids, inverse: Ids) -> list[_IdLists]:
    """Collects the list of the first row of each bag and fills in `inverse`. Empty bags follow at the share's end."""
    source = np.full(len(inverse), -1)  # a padding row gets an empty bag of its own
    before = 0
    for part in parts:
        source[part.places] = part.chunk["runs"][part.rows] + before
        before += len(part.chunk["runs"])
    bounds = np.ascontiguousarray(shares[:, :, :2].reshape(-1, 2))
    inverse[...], begins = kernels.number_bags(source, bounds)
    back = np.arange(len(inverse)) - np.repeat(bounds[:, 0], bounds[:, 1]) - inverse
    lists = []
    for part in parts:
        first = begins[part.places]
        rows, slots = part.chunk["runs"][part.rows[first]], part.slots[first] - back[part.places[first]]
        lists.append(_IdLists(rows, slots, part.strides[first], part.chunk["shared_starts"], part.chunk["shared_ids"]))
    return lists


def _sum_weights(work: BatchWork, splits: Sequence[Arrays], order: Order) -> npt.NDArray[np.float64]:
    """Sums the weights of each global batch, [batches]. The order is fixed, so all ranks get the same bits."""
    totals = np.zeros(len(work.batches))
    weights: dict[int, npt.NDArray[np.float64]] = {}
    for b, batch in enumerate(work.batches):
        for block in batch:
            if block.number not in weights:
                parts = [chunk["weights"] for i in block.splits for chunk in iterate_chunks(splits[i])]
                weights[block.number] = np.concatenate(parts, dtype=np.float64)
            totals[b] += weights[block.number][order(block)[block.start : block.stop]].sum()
    return totals


def _layout_shares(work: BatchWork) -> Ids:
    """Returns [batches, ranks, 4]: first row and rows of each share with padding. First id and ids are still 0."""
    shares = np.zeros((len(work.batches), len(work.ranks), 4), np.int64)
    for b, batch in enumerate(work.batches):
        shares[b, :, 1] = -(-sum(block.stop - block.start for block in batch) // work.world_size)
    shares[:, :, 0] = offsets_of(shares[:, :, 1].reshape(-1))[:-1].reshape(shares.shape[:2])
    return shares


def _collect_parts(
    work: BatchWork, splits: Sequence[Arrays], order: Order, shares: Ids, features: int
) -> Iterator[_ChunkPart]:
    """Yields the rows that each chunk contributes to the shares, in stored order."""
    for block, dealt in _deal_blocks(work, order, shares, features):
        first = 0
        for chunk in (chunk for i in block.splits for chunk in iterate_chunks(splits[i])):
            size = len(chunk["labels"])
            low, high = np.searchsorted(dealt[0], (first, first + size))
            if low < high:
                rows, places, slots, strides = (np.ascontiguousarray(line) for line in dealt[:, low:high])
                yield _ChunkPart(rows - first, places, slots, strides, chunk)
            first += size


def _deal_blocks(work: BatchWork, order: Order, shares: Ids, features: int) -> Iterator[tuple[BlockSlice, Ids]]:
    """Yields for each block row, place, slot and stride of its rows (see `_ChunkPart`), [4, n] by ascending row."""
    found: dict[int, tuple[BlockSlice, list[Ids]]] = {}
    for b, batch in enumerate(work.batches):
        total = sum(block.stop - block.start for block in batch)
        at = 0  # rows of the batch from earlier blocks
        for block in batch:
            chosen = order(block)[block.start : block.stop]
            _, lines = found.setdefault(block.number, (block, []))
            for r, rank in enumerate(work.ranks):
                begin, end = rank * total // work.world_size, (rank + 1) * total // work.world_size
                low, high = max(begin - at, 0), min(end - at, len(chosen))
                if low < high:
                    place = np.arange(at + low - begin, at + high - begin)
                    start, rows = int(shares[b, r, 0]), int(shares[b, r, 1])
                    stride = np.full(high - low, rows)
                    lines.append(np.stack([chosen[low:high], start + place, features * start + place, stride]))
            at += len(chosen)
    for block, lines in found.values():
        if lines:
            dealt = np.concatenate(lines, axis=1)
            yield block, dealt[:, np.argsort(dealt[0])]


def iterate_chunks(split: Arrays) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yields the chunks of a split as arrays by name; see `Worker.transform_split`."""
    for number in itertools.count():
        if f"{number}.labels" not in split:
            return
        yield {name: split[f"{number}.{name}"] for name in CHUNK_ARRAYS if f"{number}.{name}" in split}


def cut_share(arrays: Arrays, batch: int, place: int) -> dict[str, npt.NDArray[Any]]:
    """Returns a rank's share of a batch, as views.

    Args:
        arrays: A group of batches; see `Worker.make_batches`.
        place: The rank's place among the ranks that shares were made for.
    """
    row, rows, first, ids = arrays["shares"][batch, place].tolist()
    features = len(arrays["lengths"]) // max(len(arrays["labels"]), 1)
    by_row = [name for name in ("dense", "labels", "weights", "inverse") if name in arrays]
    share = {name: arrays[name][row : row + rows] for name in by_row}
    share |= {"totals": arrays["totals"][batch : batch + 1]} if "totals" in arrays else {}
    share["lengths"] = arrays["lengths"][features * row : features * (row + rows)]
    return share | {"values": arrays["values"][first : first + ids]}


def join_share(share: Arrays, place: int, ranks: int) -> Arrays:
    """Returns a rank's share of a batch as a group of one batch, which lacks the shares of other ranks."""
    shares = np.zeros((1, ranks, 4), np.int64)
    shares[0, place] = 0, len(share["labels"]), 0, len(share["values"])
    return {**share, "shares": shares}

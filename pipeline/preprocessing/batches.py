"""Transformed rows of windows, dealt out to the ranks' shares of global batches."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from pipeline.preprocessing import kernels
from pipeline.preprocessing.memory import Arrays, Writer
from pipeline.transforms.kernels.hashing import offsets_of

Ids = npt.NDArray[np.int64]


class Window(BaseModel, frozen=True):
    """A shuffled stretch of the epoch, and which of its rows a batch takes: [start, stop) of its order."""

    number: int
    """Position in the epoch; with seed and epoch it decides the order of the rows."""
    splits: tuple[int, ...]
    """Its splits among the inputs of the work, in order."""
    start: int
    stop: int


class BatchWork(BaseModel, frozen=True):
    """Global batches to make of rows that are transformed already."""

    seed: int
    epoch: int
    shuffled: bool
    world_size: int
    ranks: tuple[int, ...]
    """Ranks whose shares are made."""
    batches: tuple[tuple[Window, ...], ...]
    """For each global batch the windows that give it its rows, in order."""


class FeatureIndices(NamedTuple):
    """Numbers of the features among all: int64 [F]."""

    own: Ids
    """Those of which each row has a list."""
    shared: Ids
    """Those of which neighbouring rows may have one in common."""


NAMES = ("dense", "labels", "weights", "starts", "ids", "sessions", "runs", "shared_starts", "shared_ids")
"""Arrays of a chunk; see `Worker.transform_split`."""
Order = Callable[[Window], Ids]
"""Window -> the order of its rows."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows that a chunk gives to the shares of some batches.

    Shapes:
        rows, places, lanes, strides: int64 [n]: the row in the chunk, its place among the rows of all shares, where its
        share's lengths have it, and how far apart they are for two features.
    """

    rows: Ids
    places: Ids
    lanes: Ids
    strides: Ids
    chunk: Arrays
    """dense, labels, starts and ids, maybe weights; see `Worker.transform_split`."""


class _Lists(NamedTuple):
    """Lists of a chunk that some shares take, and where they go; see `_Part`."""

    rows: Ids
    lanes: Ids
    strides: Ids
    starts: npt.NDArray[Any]
    ids: npt.NDArray[Any]


def deal_out(
    work: BatchWork, splits: Sequence[Arrays], order: Order, numbered: FeatureIndices, numbers: int, writer: Writer
) -> None:
    """Writes each rank's share of some global batches; see `Worker.make_batches`.

    Args:
        numbered: Lists of a row.
        numbers: Dense values of a row.
    """
    shares, features = _shares(work), len(numbered.own) + len(numbered.shared)
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
        out[name][...] = 0  # what no row is dealt to is padding
    if any("0.weights" in split for split in splits):
        writer.add({"totals": ("float64", (len(work.batches),))})["totals"][...] = _totals(work, splits, order)
    parts = list(_parts(work, splits, order, shares, features))
    for part in parts:
        chunk = part.chunk
        out["weights"][part.places] = chunk["weights"][part.rows] if "weights" in chunk else 1.0
        kernels.scatter_rows(part.rows, part.places, chunk["dense"], chunk["labels"], out["dense"], out["labels"])
    lists = [(numbered.own, [_own_lists(part) for part in parts])]
    if len(numbered.shared):
        inverse = writer.add({"inverse": ("int64", (rows,))})["inverse"]
        lists.append((numbered.shared, _shared_lists(parts, shares, inverse)))
    for these, taken in lists:
        for one in taken:
            kernels.scatter_lengths(one.rows, one.lanes, one.strides, one.starts, these, out["lengths"])
    starts = offsets_of(out["lengths"])
    shares[:, :, 2] = starts[features * shares[:, :, 0]]
    shares[:, :, 3] = starts[features * (shares[:, :, 0] + shares[:, :, 1])] - shares[:, :, 2]
    out["shares"][...] = shares
    values = writer.add({"values": ("int64", (int(starts[-1]),))})["values"]
    for these, taken in lists:
        for i, feature in enumerate(these):  # a feature's values stay in the cache while all chunks add to them
            for one in taken:
                base = i * ((len(one.starts) - 1) // len(these))
                kernels.scatter_ids(
                    one.rows, one.lanes, one.strides, one.starts, one.ids, base, feature, starts, values
                )


def _own_lists(part: _Part) -> _Lists:
    return _Lists(part.rows, part.lanes, part.strides, part.chunk["starts"], part.chunk["ids"])


def _shared_lists(parts: Sequence[_Part], shares: Ids, inverse: Ids) -> list[_Lists]:
    """The lists of the first row of each bag, which goes in front of the share's empty bags; fills in `inverse`."""
    source = np.full(len(inverse), -1)  # a row of padding has an empty bag of its own
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
        rows, lanes = part.chunk["runs"][part.rows[first]], part.lanes[first] - back[part.places[first]]
        lists.append(_Lists(rows, lanes, part.strides[first], part.chunk["shared_starts"], part.chunk["shared_ids"]))
    return lists


def _totals(work: BatchWork, splits: Sequence[Arrays], order: Order) -> npt.NDArray[np.float64]:
    """[batches]: the sum of the weights of each global batch; in one order, so the same bits for all ranks."""
    totals = np.zeros(len(work.batches))
    weights: dict[int, npt.NDArray[np.float64]] = {}
    for b, batch in enumerate(work.batches):
        for window in batch:
            if window.number not in weights:
                parts = [chunk["weights"] for i in window.splits for chunk in chunks_of(splits[i])]
                weights[window.number] = np.concatenate(parts, dtype=np.float64)
            totals[b] += weights[window.number][order(window)[window.start : window.stop]].sum()
    return totals


def _shares(work: BatchWork) -> Ids:
    """[batches, ranks, 4]: first row and rows of each share, padding included; its first id and ids are 0 as yet."""
    shares = np.zeros((len(work.batches), len(work.ranks), 4), np.int64)
    for b, batch in enumerate(work.batches):
        shares[b, :, 1] = -(-sum(window.stop - window.start for window in batch) // work.world_size)
    shares[:, :, 0] = offsets_of(shares[:, :, 1].reshape(-1))[:-1].reshape(shares.shape[:2])
    return shares


def _parts(work: BatchWork, splits: Sequence[Arrays], order: Order, shares: Ids, features: int) -> Iterator[_Part]:
    """What each chunk of rows gives to the shares, its rows in the order in which they are stored."""
    for window, dealt in _dealt(work, order, shares, features):
        first = 0
        for chunk in (chunk for i in window.splits for chunk in chunks_of(splits[i])):
            size = len(chunk["labels"])
            low, high = np.searchsorted(dealt[0], (first, first + size))
            if low < high:
                rows, places, lanes, strides = (np.ascontiguousarray(line) for line in dealt[:, low:high])
                yield _Part(rows - first, places, lanes, strides, chunk)
            first += size


def _dealt(work: BatchWork, order: Order, shares: Ids, features: int) -> Iterator[tuple[Window, Ids]]:
    """For each window: row in it, place, lane and stride (see `_Part`) of the rows it gives, [4, n] by rising row."""
    found: dict[int, tuple[Window, list[Ids]]] = {}
    for b, batch in enumerate(work.batches):
        total = sum(window.stop - window.start for window in batch)
        at = 0  # rows of the batch in the windows before
        for window in batch:
            chosen = order(window)[window.start : window.stop]
            _, lines = found.setdefault(window.number, (window, []))
            for r, rank in enumerate(work.ranks):
                begin, end = rank * total // work.world_size, (rank + 1) * total // work.world_size
                low, high = max(begin - at, 0), min(end - at, len(chosen))
                if low < high:
                    place = np.arange(at + low - begin, at + high - begin)
                    start, rows = int(shares[b, r, 0]), int(shares[b, r, 1])
                    stride = np.full(high - low, rows)
                    lines.append(np.stack([chosen[low:high], start + place, features * start + place, stride]))
            at += len(chosen)
    for window, lines in found.values():
        if lines:
            dealt = np.concatenate(lines, axis=1)
            yield window, dealt[:, np.argsort(dealt[0])]


def chunks_of(split: Arrays) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The chunks of a split, see `Worker.transform_split`, each as arrays by their names."""
    for number in itertools.count():
        if f"{number}.labels" not in split:
            return
        yield {name: split[f"{number}.{name}"] for name in NAMES if f"{number}.{name}" in split}

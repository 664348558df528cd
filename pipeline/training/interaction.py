"""The dot interaction on CPU: one pass over the rows forward and one backward, on the threads of a rank.

Libraries multiply a batch of many small matrices at a fraction of the rate of a large one. They also compute each pair
twice, and their products are gathered, joined and padded in passes of their own. Here one row's vectors stay in the
processor's cache from the first copy to the finished outputs.

Shape letters: B rows, F feature vectors of a row, E width, P = F * (F - 1) / 2 pairs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from models.layers import DotInteraction, join_vectors
from pipeline.training.tables.loops import LoopThreads
from pipeline.training.tables.simd import (
    TILE_ROWS,
    VECTOR,
    WIDE_TILES,
    load,
    multiply_narrow_tile,
    multiply_tile,
    store,
    turn_square,
)
from storage.compiled import compiled

WORK_OF_A_THREAD = 1 << 22
"""Products below which another thread would cost more than it saves."""


@compiled
def _multiply(
    one: np.ndarray, at: int, row_step: int, column_step: int, other: np.ndarray, depth: int, out: np.ndarray,
    first: int, columns: int, stride: int,
) -> None:  # fmt: skip
    """Computes columns [first, columns) of the product of six rows of `one` and the first `depth` rows of `other`.

    Args:
        first: A multiple of 16. Columns up to the next such multiple after the last one are written as well.
        stride: Distance between rows of `other` and of `out`.
    """
    column = first
    while WIDE_TILES and column + VECTOR < columns:
        multiply_tile(one, at, row_step, column_step, other, column, stride, depth, out, column, stride)
        column += 2 * VECTOR
    while column < columns:
        multiply_narrow_tile(one, at, row_step, column_step, other, column, stride, depth, out, column, stride)
        column += VECTOR


@compiled
def _copy(source: np.ndarray, at: int, out: np.ndarray, to: int, count: int) -> None:
    """Sets out[to : to + count] to source[at : at + count]."""
    whole = count // VECTOR * VECTOR
    for k in range(0, whole, VECTOR):
        store(out, to + k, load(source, at + k))
    for k in range(whole, count):
        out[to + k] = source[at + k]


@compiled
def _gather(
    first: np.ndarray, rest: np.ndarray, b: int, ahead: int, vectors: int, width: int, own: np.ndarray, stride: int
) -> None:
    """Copies the vectors of row b to own[f * stride : f * stride + width]."""
    for f in range(ahead):
        _copy(first, (b * ahead + f) * width, own, f * stride, width)
    for f in range(ahead, vectors):
        _copy(rest, (b * (vectors - ahead) + f - ahead) * width, own, f * stride, width)


@compiled
def pair_dots(
    first: np.ndarray, rest: np.ndarray, out: np.ndarray, ahead: int, vectors: int, width: int, start: int, stop: int
) -> None:
    """Computes the first vector and the dot products of all pairs for the rows [start, stop).

    Args:
        first: The first `ahead` vectors of each row, float32 [B, ahead, E], flat. rest: the others, likewise.
        out: float32 [B, E + P], flat. Rows [start, stop) are written.
    """
    outputs = width + vectors * (vectors - 1) // 2
    stride, turned_stride = (width + VECTOR - 1) // VECTOR * VECTOR, (vectors + VECTOR - 1) // VECTOR * VECTOR
    own = np.zeros(turned_stride * stride, np.float32)
    turned = np.zeros(stride * turned_stride + TILE_ROWS, np.float32)  # by number, then by vector
    products = np.empty(TILE_ROWS * turned_stride + VECTOR, np.float32)
    line = np.empty(outputs + VECTOR, np.float32)
    for b in range(start, stop):
        _gather(first, rest, b, ahead, vectors, width, own, stride)
        for f in range(0, turned_stride, VECTOR):
            for e in range(0, stride, VECTOR):
                turn_square(own, f * stride + e, stride, turned, e * turned_stride + f, turned_stride)
        _copy(own, 0, line, 0, width)
        at = width
        for i in range(0, vectors - 1, TILE_ROWS):
            above = (i + 1) // VECTOR * VECTOR
            _multiply(turned, i, 1, turned_stride, turned, width, products, above, vectors, turned_stride)
            for r in range(min(TILE_ROWS, vectors - i)):
                later = vectors - i - r - 1
                for j in range(0, later, VECTOR):  # what is copied beyond the end is written again by the next vector
                    store(line, at + j, load(products, r * turned_stride + i + r + 1 + j))
                at += later
        _copy(line, 0, out, b * outputs, outputs)


@compiled
def pair_gradients(
    first: np.ndarray, rest: np.ndarray, gradient: np.ndarray, of_first: np.ndarray, of_rest: np.ndarray,
    ahead: int, vectors: int, width: int, start: int, stop: int,
) -> None:  # fmt: skip
    """Computes the gradients of both arguments of `pair_dots` from that of its result, for the rows [start, stop).

    Args:
        gradient: float32 [B, E + P], flat. of_first, of_rest: as `first` and `rest`. Rows [start, stop) are written.
    """
    outputs, stride = width + vectors * (vectors - 1) // 2, (width + VECTOR - 1) // VECTOR * VECTOR
    blocks = (vectors + TILE_ROWS - 1) // TILE_ROWS
    of_pair = np.zeros(blocks * TILE_ROWS * vectors, np.float32)  # symmetric, with zeros on the diagonal
    own = np.zeros(vectors * stride, np.float32)
    sums = np.empty(TILE_ROWS * stride, np.float32)
    for b in range(start, stop):
        at = b * outputs + width
        for i in range(vectors):
            for j in range(i + 1, vectors):
                of_pair[i * vectors + j] = gradient[at]
                of_pair[j * vectors + i] = gradient[at]
                at += 1
        _gather(first, rest, b, ahead, vectors, width, own, stride)
        for i in range(0, vectors, TILE_ROWS):
            _multiply(of_pair, i * vectors, vectors, 1, own, vectors, sums, 0, width, stride)
            if i == 0:
                for e in range(width):
                    sums[e] += gradient[b * outputs + e]
            for r in range(min(TILE_ROWS, vectors - i)):
                f = i + r
                if f < ahead:
                    _copy(sums, r * stride, of_first, (b * ahead + f) * width, width)
                else:
                    _copy(sums, r * stride, of_rest, (b * (vectors - ahead) + f - ahead) * width, width)


class NumbaDots(DotInteraction):
    """The dot interaction by the loops above, for training on CPU.

    Its bits do not depend on the number of threads, because each row's sums have one order.

    Args:
        plain: What it replaces.
    Shapes:
        See `DotInteraction`. Vectors may have several types; the result is float32.
    """

    def __init__(self, plain: DotInteraction) -> None:
        nn.Module.__init__(self)
        self.width_out = plain.width_out
        self.most = torch.get_num_threads()
        self.loops = LoopThreads(self.most)

    def forward(self, *pieces_BFE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        whole = [piece.float() for piece in pieces_BFE]
        if len(whole) != 2:
            joined = join_vectors(whole)
            whole = [joined[:, :1], joined[:, 1:]]
        out: torch.Tensor = _Dots.apply(*whole, self)
        return out

    def run(self, loop: Callable[..., None], first: torch.Tensor, rest: torch.Tensor, *others: torch.Tensor) -> None:
        """Runs a loop over all rows, divided among PyTorch's number of threads."""
        rows, ahead, width = first.shape
        vectors = ahead + rest.shape[1]
        arrays = [tensor.reshape(-1).numpy() for tensor in (first, rest, *others)]
        wanted = max(1, rows * vectors * vectors * width // WORK_OF_A_THREAD)
        threads = min(self.most, torch.get_num_threads(), wanted)
        bounds = [rows * n // threads for n in range(threads + 1)]
        self.loops.run(loop, [(*arrays, ahead, vectors, width, *bounds[n : n + 2]) for n in range(threads)])


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, rest: torch.Tensor, dots: NumbaDots) -> torch.Tensor:
        ctx.dots, ctx.vectors = dots, (first.detach().contiguous(), rest.detach().contiguous())
        rows, ahead, width = first.shape
        vectors = ahead + rest.shape[1]
        out = torch.empty(rows, width + vectors * (vectors - 1) // 2)
        dots.run(pair_dots, *ctx.vectors, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        of_first, of_rest = (torch.empty(vectors.shape) for vectors in ctx.vectors)
        ctx.dots.run(pair_gradients, *ctx.vectors, gradient.contiguous(), of_first, of_rest)
        return of_first, of_rest, None

"""SIMD vectors of sixteen float32 numbers, as values that numba loops can hold in registers.

Without them, LLVM keeps a running sum of vectors in memory, because it cannot prove that the array of the sum and the
array that is read do not overlap. That takes three times as long as the additions.
"""

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import models, register_model

from storage.compiled import instruction

VECTOR = 16
"""float32 numbers in a `Simd`, which is one cache line. Processors with shorter registers use several."""
_TYPE = ir.VectorType(ir.FloatType(), VECTOR)
_ZERO = ir.Constant(_TYPE, [0.0] * VECTOR)
_INDEX = ir.IntType(64)


class Simd(types.Type):
    """Numba type of these vectors."""

    def __init__(self) -> None:
        super().__init__(name="Simd")


@register_model(Simd)
class _SimdModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Simd) -> None:
        super().__init__(manager, kind, _TYPE)


_SIMD = Simd()


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _TYPE.as_pointer())


def _load(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.load(_address(context, builder, kind, array, index), align=4)


def _store(context: Any, builder: Any, kind: Any, array: Any, index: Any, vector: Any) -> None:
    builder.store(vector, _address(context, builder, kind, array, index), align=4)


def _place(builder: Any, first: Any, step: Any, count: Any, vector: int = 0) -> Any:
    """Returns the index first + step * count + 16 * vector."""
    return builder.add(builder.add(first, builder.mul(step, count)), _INDEX(VECTOR * vector))


def _broadcast(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_TYPE, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [0] * VECTOR))


@instruction
def zero(_: Any) -> Any:
    """Returns a vector of zeros."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _ZERO

    return _SIMD(), code


@instruction
def load(_: Any, array: Any, index: Any) -> Any:
    """Returns array[index : index + 16] of a flat float32 array. There is no bounds check."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(context, builder, signature.args[0], *arguments)

    return _SIMD(array, types.intp), code


@instruction
def store(_: Any, array: Any, index: Any, vector: Any) -> Any:
    """Sets array[index : index + 16] to a vector. There is no bounds check."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(context, builder, signature.args[0], *arguments)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), code


@instruction
def add(_: Any, one: Any, other: Any) -> Any:
    """Returns the element-wise sum of two vectors."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments)

    return _SIMD(one, other), code


@instruction
def multiply(_: Any, one: Any, other: Any) -> Any:
    """Returns the element-wise product of two vectors."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fmul(*arguments)

    return _SIMD(one, other), code


@instruction
def broadcast(_: Any, number: Any) -> Any:
    """Returns a vector with a float32 number in every place."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _broadcast(builder, arguments[0])

    return _SIMD(types.float32), code


@instruction
def reduce_sum(_: Any, vector: Any) -> Any:
    """Returns the sum of a vector's numbers, by adding its halves again and again."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, whole = arguments[0], ir.IntType(32)
        for half in (8, 4, 2, 1):
            order = [*range(half, 2 * half), *range(half, 2 * half)] * (VECTOR // (2 * half))
            value = builder.fadd(
                value, builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(whole, VECTOR), order))
            )
        return builder.extract_element(value, whole(0))

    return types.float32(vector), code


@instruction
def turn_square(_: Any, array: Any, at: Any, step: Any, out: Any, out_at: Any, out_step: Any) -> Any:
    """Sets `out[c, r] = array[r, c]` for 16 rows and columns of flat float32 arrays, given as for `multiply_tile`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at, step, out, out_at, out_step = arguments
        rows = [
            _load(context, builder, signature.args[0], array, _place(builder, at, step, _INDEX(r)))
            for r in range(VECTOR)
        ]
        half = VECTOR // 2
        orders = [[start + n // 2 + n % 2 * VECTOR for n in range(VECTOR)] for start in (0, half)]
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), order) for order in orders]
        # Each pass interleaves row r with row r + 8, as one shuffles cards. Four passes turn 16 rows.
        for _ in range(4):
            pairs = list(zip(rows[:half], rows[half:], strict=True))
            rows = [builder.shuffle_vector(*pair, mask) for pair in pairs for mask in masks]
        for r, row in enumerate(rows):
            _store(context, builder, signature.args[3], out, _place(builder, out_at, out_step, _INDEX(r)), row)
        return context.get_dummy_value()

    index = types.intp
    return types.void(array, index, index, out, index, index), code


TILE_ROWS = 6
"""Rows of a tile. Its sums keep both units busy that multiply and add."""
WIDE_TILES = bool(get_host_cpu_features().get("avx512f"))
"""Whether the processor has registers for the sums of two vectors a row. AVX2 has them for one."""


def _tile_op(vectors: int) -> Any:
    """Returns an operation: `out[r, c] = sum over k < depth of one[r, k] * other[k, c]`, 6 rows, 16 * vectors columns.

    All sums stay in registers, and each adds its products in the order of k. A matrix is a flat float32 array, the
    index of its first number, and the distances between its rows and (for `one`) its columns. Columns of `other` and
    `out` are neighbours. There is no bounds check, and depth is at least 1.
    """

    @instruction
    def multiply_tile(
        _: Any, one: Any, at: Any, row_step: Any, column_step: Any, other: Any, other_at: Any, other_step: Any,
        depth: Any, out: Any, out_at: Any, out_step: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            one, at, row_step, column_step, other, other_at, other_step, depth, out, out_at, out_step = arguments
            factors = context.make_array(signature.args[0])(context, builder, one).data
            kind = ir.FunctionType(_TYPE, [_TYPE] * 3)
            multiply_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{VECTOR}f32")
            tile = [(r, v) for r in range(TILE_ROWS) for v in range(vectors)]

            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)
            builder.position_at_end(loop)
            k, sums = builder.phi(_INDEX), [builder.phi(_TYPE) for _ in tile]
            columns = [
                _load(context, builder, signature.args[4], other, _place(builder, other_at, other_step, k, v))
                for v in range(vectors)
            ]
            first = _place(builder, at, column_step, k)
            rows = [
                _broadcast(builder, builder.load(builder.gep(factors, [_place(builder, first, row_step, _INDEX(r))])))
                for r in range(TILE_ROWS)
            ]
            totals = [
                builder.call(multiply_add, [rows[r], columns[v], total])
                for (r, v), total in zip(tile, sums, strict=True)
            ]
            following = builder.add(k, _INDEX(1))
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
            k.add_incoming(_INDEX(0), before)
            k.add_incoming(following, loop)
            for total, later in zip(sums, totals, strict=True):
                total.add_incoming(_ZERO, before)
                total.add_incoming(later, loop)
            builder.position_at_end(after)
            for (r, v), total in zip(tile, totals, strict=True):
                index = _place(builder, out_at, out_step, _INDEX(r), v)
                _store(context, builder, signature.args[8], out, index, total)
            return context.get_dummy_value()

        index = types.intp
        return types.void(one, index, index, index, other, index, index, index, out, index, index), code

    return multiply_tile


multiply_tile, multiply_narrow_tile = _tile_op(2), _tile_op(1)

"""SIMD vectors of sixteen float32 numbers, as values that numba loops can hold in registers.

Without them, LLVM keeps a running sum of vectors in memory, because it cannot prove that the array of the sum and the
array that is read do not overlap. That takes three times as long as the additions.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16
"""float32 numbers in a `Simd`, which is one cache line. Processors with shorter registers use several."""
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def simd_op(function: Callable[..., Any]) -> Any:
    """Typed as Any, because an intrinsic takes other arguments than the function that defines it."""
    return intrinsic(function)


class Simd(types.Type):  # type: ignore[misc]
    """Numba type of these vectors."""

    def __init__(self) -> None:
        super().__init__(name="Simd")


@register_model(Simd)
class _SimdModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Simd) -> None:
        super().__init__(manager, kind, _VECTOR)


_SIMD = Simd()


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer())


@simd_op
def zero(_: Any) -> Any:
    """Returns a vector of zeros."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(_VECTOR, [0.0] * LANES)

    return _SIMD(), code


@simd_op
def load(_: Any, array: Any, index: Any) -> Any:
    """Returns array[index : index + 16] of a flat float32 array. There is no bounds check."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], *arguments), align=4)

    return _SIMD(array, types.intp), code


@simd_op
def store(_: Any, array: Any, index: Any, vector: Any) -> Any:
    """Sets array[index : index + 16] to a vector. There is no bounds check."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _address(context, builder, signature.args[0], *arguments[:2]), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), code


@simd_op
def add(_: Any, one: Any, other: Any) -> Any:
    """Returns the element-wise sum of two vectors."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments)

    return _SIMD(one, other), code


@simd_op
def multiply(_: Any, one: Any, other: Any) -> Any:
    """Returns the element-wise product of two vectors."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fmul(*arguments)

    return _SIMD(one, other), code


@simd_op
def broadcast(_: Any, number: Any) -> Any:
    """Returns a vector with a float32 number in every lane."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), arguments[0], ir.IntType(32)(0))
        return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))

    return _SIMD(types.float32), code


@simd_op
def reduce_sum(_: Any, vector: Any) -> Any:
    """Returns the sum of a vector's numbers, by adding its halves again and again."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, whole = arguments[0], ir.IntType(32)
        for half in (8, 4, 2, 1):
            order = [*range(half, 2 * half), *range(half, 2 * half)] * (LANES // (2 * half))
            value = builder.fadd(
                value, builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(whole, LANES), order))
            )
        return builder.extract_element(value, whole(0))

    return types.float32(vector), code


@simd_op
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """Asks the processor to load array[index] into its cache. Any index is safe."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(function, [address, number(0), number(3), number(1)])  # read, all cache levels, data cache
        return context.get_dummy_value()

    return types.void(array, types.intp), code

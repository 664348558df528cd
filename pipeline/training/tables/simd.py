"""Sixteen float32 numbers in a register, as values that numba loops can hold.

Left to itself, LLVM keeps a running sum of vectors in memory, since it cannot know that the sum's array and the one
that is read are two. That costs three times the additions.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16
"""float32 numbers in a `Lane`, a cache line; processors with shorter registers use several."""
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def inside(function: Callable[..., Any]) -> Any:
    """numba's `intrinsic`, whose products take other arguments than what they are made of."""
    return intrinsic(function)


class Lane(types.Type):  # type: ignore[misc]
    """The type of these values in numba."""

    def __init__(self) -> None:
        super().__init__(name="Lane")


@register_model(Lane)
class _LaneModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Lane) -> None:
        super().__init__(manager, kind, _VECTOR)


_LANE = Lane()


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer())


@inside
def zero(_: Any) -> Any:
    """A lane of zeros."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(_VECTOR, [0.0] * LANES)

    return _LANE(), code


@inside
def load(_: Any, array: Any, index: Any) -> Any:
    """array[index : index + 16] of a flat float32 array; the caller sees to it that they are there."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], *arguments), align=4)

    return _LANE(array, types.intp), code


@inside
def store(_: Any, array: Any, index: Any, lane: Any) -> Any:
    """array[index : index + 16] = lane."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _address(context, builder, signature.args[0], *arguments[:2]), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, lane), code


@inside
def plus(_: Any, one: Any, other: Any) -> Any:
    """The sum of two lanes, number by number."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments)

    return _LANE(one, other), code


@inside
def times(_: Any, one: Any, other: Any) -> Any:
    """The product of two lanes, number by number."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fmul(*arguments)

    return _LANE(one, other), code


@inside
def spread(_: Any, number: Any) -> Any:
    """A lane of one float32 number."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), arguments[0], ir.IntType(32)(0))
        return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))

    return _LANE(types.float32), code


@inside
def across(_: Any, lane: Any) -> Any:
    """The sum of a lane's numbers, halves upon halves."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, whole = arguments[0], ir.IntType(32)
        for half in (8, 4, 2, 1):
            order = [*range(half, 2 * half), *range(half, 2 * half)] * (LANES // (2 * half))
            value = builder.fadd(
                value, builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(whole, LANES), order))
            )
        return builder.extract_element(value, whole(0))

    return types.float32(lane), code


@inside
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """Asks the processor to bring array[index] into its cache; any index is safe."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(function, [address, number(0), number(3), number(1)])  # to read, into every level, data
        return context.get_dummy_value()

    return types.void(array, types.intp), code

"""How the project's loops become machine code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from storage.artifacts import hash_contents
from storage.numba_private import add_stamp

F = TypeVar("F", bound=Callable[..., Any])


def hash_loops(packages: Path) -> str:
    """Returns a hash of all source files with loops. A loop has the code of the functions that it calls in others.

    Args:
        packages: Their folder, or the archive that Python imports them from.
    """
    if packages.is_file():
        return hash_contents([(Path(packages.name), packages.read_bytes())])
    paths = (path for room in ("pipeline", "storage") for path in (packages / room).rglob("*.py"))
    files = ((path.relative_to(packages), path.read_bytes()) for path in paths)
    return hash_contents((name, content) for name, content in files if b"storage.compiled" in content)


SOURCES = hash_loops(Path(__file__).resolve().parents[1])
"""Version of all loops. Numba itself looks only at the file of a loop when it takes its code from the disk."""


def compiled(function: F) -> F:
    """Compiles a loop with numba. It releases the interpreter lock, and its code is cached on disk.

    Sums keep their order, also in a loop that `compiled_fast` calls: without a word numba would inherit its freedom.
    """
    return _compiled(function, fastmath=False)


def compiled_fast(function: F) -> F:
    """Compiles a loop as `compiled` does. The compiler may also reorder sums to take them in vectors."""
    fast = {"reassoc", "contract", "nsz"}
    return _compiled(function, fastmath=fast)


def _compiled(function: F, **options: Any) -> F:
    loop = numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    add_stamp(loop, SOURCES)
    return cast(F, loop)


def inlined(function: F) -> F:
    """Makes a function a part of each compiled loop that calls it, which also decides whether sums may be reordered.

    For loops of the same file.
    """
    return cast(F, numba.njit(inline="always", nogil=True, error_model="numpy")(function))


def instruction(function: Callable[..., Any]) -> Any:
    """Makes an instruction for compiled loops of a function that generates its LLVM code (numba's `intrinsic`).

    Typed as Any, because an instruction takes other arguments than the function that defines it.
    """
    return intrinsic(function)


@instruction
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


@compiled
def _return_it(number: int) -> int:
    return number


def load_compiler() -> None:
    """Loads what numba needs before the first compiled loop runs: one to two seconds."""
    _return_it(0)

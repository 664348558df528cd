"""Arrays in memory that processes share. The memory has no name, so nothing is left behind when a process dies."""

import fcntl
import math
import mmap
import os
import resource
import stat
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, NonNegativeInt, model_validator

Arrays = Mapping[str, npt.NDArray[Any]]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, shape) of each array, in memory order."""

ALIGNMENT = 64
SLAB_BYTES = 1 << 20
"""Initial size of the first slab. Others begin with the size of the largest, because growth maps them anew."""
FREE_SLABS = 8
"""Number of unread slabs to keep."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Arrays in one anonymous shared memory file. It is in use while any process has a copy of the descriptor open."""

    fd: int
    shapes: Shapes
    size: int

    def arrays(self) -> Arrays:
        """Maps the arrays. Writing to them changes a private copy.

        They keep the segment in use, because Python's mapping holds a copy of the descriptor.
        """
        return _map_arrays(mmap.mmap(self.fd, max(self.size, 1), flags=mmap.MAP_PRIVATE), self.shapes)

    def close(self) -> None:
        """Closes the descriptor. Mapped arrays stay valid."""
        os.close(self.fd)


class SegmentNote(BaseModel, frozen=True):
    """What a message says about the segment that comes with it."""

    shapes: dict[str, tuple[Literal["float32", "float64", "int32", "int64"], tuple[NonNegativeInt, ...]]]
    size: NonNegativeInt

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if sum(_aligned_bytes(dtype, shape) for dtype, shape in self.shapes.values()) != self.size:
            raise ValueError("arrays of another size")
        return self

    def open(self, descriptors: Sequence[int]) -> Segment:
        """Returns the segment in the descriptors of the message.

        Raises:
            ValueError: If there is not one descriptor, or its memory is smaller.
        """
        (descriptor,) = descriptors
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size < self.size:
            raise ValueError("less memory")
        return Segment(descriptor, self.shapes, self.size)


class Writer(Protocol):
    """Takes arrays one after another."""

    def add(self, shapes: Shapes) -> Arrays:
        """Returns room for more arrays. The caller fills it before the next call."""

    def finish(self) -> Any:
        """Returns the object that holds all arrays."""


class Slabs:
    """The shared memory of a process that writes segments. Reuses memory that nobody reads any more.

    Getting new pages costs more than filling them, so slabs are kept. The kernel knows when nobody reads: a segment's
    descriptor holds a lock until its last copy is closed, in any process and however that process ends.
    """

    def __init__(self) -> None:
        self.slabs: list[_Slab] = []
        self._read: dict[int, mmap.mmap] = {}

    def writer(self) -> "SharedWriter":
        """Returns a writer over memory that nobody reads."""
        free = [slab for slab in self.slabs if slab.try_claim()]
        for slab in free[FREE_SLABS:]:
            self.slabs.remove(slab)
            slab.close()
        if not free:
            free.append(_Slab(max((len(slab.mapped) for slab in self.slabs), default=SLAB_BYTES)))
            self.slabs.append(free[0])
        return SharedWriter(free[0])

    def read(self, segments: Sequence[Segment]) -> list[Arrays]:
        """Returns the arrays of segments, not to be written to, for as long as their descriptors are open.

        Slabs of other processes stay mapped until other segments are read. Mostly they are read again, and a new
        mapping would have to look up each page again.
        """
        if not segments:  # work without inputs lies between two that read the same
            return []
        own, read = {slab.number: slab.mapped for slab in self.slabs}, self._read
        self._read = {}
        found = []
        for segment in segments:
            number = os.fstat(segment.fd).st_ino
            mapped = own.get(number)
            if mapped is None:
                mapped = read.get(number)
                if mapped is None or len(mapped) < segment.size:
                    mapped = _map_slab(segment.fd)
                self._read[number] = mapped
            found.append(_map_arrays(mapped, segment.shapes))
        return found

    def clear(self) -> None:
        """Drops all slabs. Readers keep their memory."""
        self.slabs.clear()
        self._read.clear()


class _Slab:
    """A shared memory file that can grow."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("dlrm-rows", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.number = os.fstat(self.fd).st_ino
        self.grow(size)

    def grow(self, size: int) -> None:
        """Enlarges the slab and keeps its contents."""
        os.ftruncate(self.fd, size)
        self.mapped = mmap.mmap(self.fd, size)

    def try_claim(self) -> bool:
        """Takes the lock for writing. Returns False while a descriptor of a segment is open."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lend(self) -> int:
        """Returns a descriptor for readers."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd


class SharedWriter:
    """Writes arrays into a segment that grows with them; see `Slabs`.

    Example:
        >>> writer = Slabs().writer()
        >>> writer.add({"ids": ("int32", (3,))})["ids"][:] = [7, 8, 9]
        >>> segment = writer.finish()
        >>> segment.arrays()["ids"].tolist()
        [7, 8, 9]
        >>> segment.close()
    """

    def __init__(self, slab: _Slab) -> None:
        self.slab = slab
        self.shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.used = 0

    def add(self, shapes: Shapes) -> Arrays:
        """See `Writer`."""
        end = self.used + sum(_aligned_bytes(dtype, shape) for dtype, shape in shapes.values())
        if end > len(self.slab.mapped):
            self.slab.grow(max(end, 2 * len(self.slab.mapped)))
        arrays = _map_arrays(self.slab.mapped, shapes, self.used)
        self.shapes |= shapes
        self.used = end
        return arrays

    def finish(self) -> Segment:
        """See `Writer`."""
        return Segment(self.slab.lend(), self.shapes, self.used)


class PrivateWriter:
    """Writes arrays into the memory of this process."""

    def __init__(self) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {}

    def add(self, shapes: Shapes) -> Arrays:
        """See `Writer`."""
        added = {name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items()}
        self.arrays |= added
        return added

    def finish(self) -> Arrays:
        """See `Writer`."""
        return self.arrays


def copy_to_segment(arrays: Arrays, slabs: Slabs) -> Segment:
    """Copies arrays into a new segment."""
    writer = slabs.writer()
    for name, view in writer.add({name: (array.dtype.name, array.shape) for name, array in arrays.items()}).items():
        view[...] = arrays[name]
    return writer.finish()


def count_bytes(arrays: Arrays) -> int:
    """Returns the total bytes of the arrays."""
    return sum(array.nbytes for array in arrays.values())


def allow_many_segments() -> None:
    """Raises the soft limit on open files to the hard one, because each segment is an open file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _map_slab(fd: int) -> mmap.mmap:
    """Maps a slab of another process. Python's mapping keeps a descriptor, which must not hold the reader's lock."""
    unlocked = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(unlocked, os.fstat(unlocked).st_size)
    finally:
        os.close(unlocked)


def _map_arrays(memory: mmap.mmap, shapes: Shapes, start: int = 0) -> Arrays:
    found = {}
    for name, (dtype, shape) in shapes.items():
        found[name] = np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
        start += _aligned_bytes(dtype, shape)
    return found


def _aligned_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT

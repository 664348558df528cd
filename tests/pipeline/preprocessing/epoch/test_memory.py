"""Shared arrays: readers see what was written, copies are private, and nothing stays behind."""

import gc
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from pipeline.preprocessing.epoch.memory import (
    ALIGNMENT,
    FREE_SLABS,
    SLAB_BYTES,
    Arrays,
    PrivateWriter,
    Segment,
    Shapes,
    Slabs,
    allow_many_segments,
    copy_to_segment,
    count_bytes,
)

SHAPES: Shapes = {
    "dense": ("float32", (5, 3)),
    "none": ("int64", (0,)),
    "ids": ("int32", (7,)),
    "wide": ("int64", (1, 2)),
    "empty": ("float32", (0, 4)),
}


def filled(arrays: Arrays) -> Arrays:
    for number, array in enumerate(arrays.values()):
        array[...] = np.arange(array.size).reshape(array.shape) + 100 * number
    return arrays


def shared(shapes: Shapes) -> tuple[Segment, Arrays]:
    """Returns a segment of a new slab, and the arrays as its writer sees them."""
    writer = Slabs().writer()
    arrays = writer.add(shapes)
    return writer.finish(), arrays


def segments() -> int:
    """Counts the segments that this process has mapped or has a descriptor of."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = sum("memfd:dlrm-rows" in line for line in maps)
    return mapped + sum("memfd:dlrm-rows" in target for target in targets())


def targets() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def test_what_is_written_is_read() -> None:
    segment, arrays = shared(SHAPES)
    filled(arrays)
    seen = segment.arrays()
    assert {name: (a.dtype.name, a.shape) for name, a in seen.items()} == SHAPES
    assert all(seen[name].tolist() == arrays[name].tolist() for name in SHAPES)
    assert all(a.ctypes.data % ALIGNMENT == 0 for a in seen.values() if a.size)
    segment.close()


def test_a_reader_writes_to_a_copy_of_its_own() -> None:
    segment, arrays = shared(SHAPES)
    first, second = segment.arrays(), segment.arrays()
    filled(arrays)
    first["ids"][...] = -1
    assert second["ids"].tolist() == arrays["ids"].tolist() != first["ids"].tolist()
    segment.close()


@pytest.mark.slow
def test_arrays_outlive_the_descriptor_and_leave_nothing() -> None:
    gc.collect()
    before = segments()
    slabs = Slabs()
    writer = slabs.writer()
    expected = filled(writer.add(SHAPES))["dense"].tolist()
    segment = writer.finish()
    seen = segment.arrays()
    segment.close()
    assert seen["dense"].tolist() == expected
    assert segments() > before
    slabs.slabs[0].close()
    del seen, writer, slabs
    gc.collect()
    assert segments() == before


@pytest.mark.nightly
def test_what_is_read_is_not_written_again() -> None:
    """A slab is reused only after the last view of its last array is gone, even a tensor's."""
    slabs = Slabs()
    first = slabs.writer()
    first.add({"ids": ("int64", (4,)), "more": ("int64", (4,))})["ids"][:] = 7
    segment = first.finish()
    arrays = segment.arrays()
    segment.close()
    tensor = torch.from_numpy(arrays["ids"])[1:3]
    del arrays
    gc.collect()
    second = slabs.writer()
    assert second.slab is not first.slab
    second.add({"ids": ("int64", (4,))})["ids"][:] = 8
    assert tensor.tolist() == [7, 7]
    del tensor
    gc.collect()
    assert slabs.writer().slab is first.slab


def test_another_process_that_reads_keeps_a_slab_from_being_written() -> None:
    slabs = Slabs()
    writer = slabs.writer()
    writer.add({"ids": ("int64", (4,))})
    segment = writer.finish()
    code = "import sys; print(flush=True); sys.stdin.read()"
    reader = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[segment.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert reader.stdout is not None
    reader.stdout.readline()
    segment.close()
    assert slabs.writer().slab is not writer.slab
    reader.kill()
    reader.communicate()
    assert slabs.slabs[0].try_claim()


def test_a_slab_grows_and_keeps_what_was_written() -> None:
    writer = Slabs().writer()
    for i in range(4):
        writer.add({f"{i}.ids": ("int64", (SLAB_BYTES // 16,))})[f"{i}.ids"][:] = i
    segment = writer.finish()
    arrays = segment.arrays()
    segment.close()
    assert [set(array.tolist()) for array in arrays.values()] == [{0}, {1}, {2}, {3}]


def test_only_so_many_unread_slabs_are_kept() -> None:
    gc.collect()
    before = segments()
    slabs = Slabs()
    lent = []
    for _ in range(FREE_SLABS + 5):
        lent.append(slabs.writer().finish())
    assert len(slabs.slabs) == FREE_SLABS + 5
    for segment in lent:
        segment.close()
    slabs.writer()
    assert len(slabs.slabs) == FREE_SLABS
    assert segments() - before == 3 * FREE_SLABS  # two descriptors, Python's mapping has one of them, and the mapping


def test_a_new_slab_has_the_size_of_the_largest_and_takes_no_memory_for_it() -> None:
    slabs = Slabs()
    shapes: Shapes = {"ids": ("int64", (SLAB_BYTES,))}
    first = slabs.writer()
    first.add(shapes)["ids"][:] = 1
    lent = first.finish()
    second = slabs.writer()
    assert len(second.slab.mapped) == len(first.slab.mapped) >= 8 * SLAB_BYTES
    second.add({"ids": ("int64", (8,))})["ids"][:] = 2
    assert os.fstat(second.slab.fd).st_blocks * 512 < 8 * SLAB_BYTES  # a page, which may be a huge one
    lent.close()


def test_copy_to_segment() -> None:
    writer = PrivateWriter()
    filled(writer.add(SHAPES))
    private = writer.finish()
    segment = copy_to_segment(private, Slabs())
    assert all(segment.arrays()[name].tolist() == private[name].tolist() for name in SHAPES)
    assert count_bytes(private) == 5 * 3 * 4 + 7 * 4 + 2 * 8 <= segment.size
    segment.close()


@pytest.mark.parametrize("shapes", [{}, {"none": ("int64", (0,))}], ids=["no arrays", "an empty one"])
def test_nothing_can_be_shared_too(shapes: Shapes) -> None:
    segment, _ = shared(shapes)
    assert segment.size == 0
    assert [array.size for array in segment.arrays().values()] == [0] * len(shapes)
    segment.close()


def test_another_process_reads_it_and_a_started_program_does_not_inherit_it() -> None:
    segment, arrays = shared({"ids": ("int32", (3,))})
    arrays["ids"][:] = [7, 8, 9]
    code = (
        "import numpy, sys; print(numpy.frombuffer(open(f'/proc/self/fd/{sys.argv[1]}', 'rb').read(12), 'i4').tolist())"
    )
    command = [sys.executable, "-c", code, str(segment.fd)]
    given = subprocess.run(command, pass_fds=[segment.fd], capture_output=True, text=True, check=True)
    assert given.stdout == "[7, 8, 9]\n"
    assert subprocess.run(command, close_fds=False, capture_output=True, check=False).returncode != 0
    segment.close()


def test_many_segments_are_allowed() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
        allow_many_segments()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_segments_compare_by_identity() -> None:
    """Two segments of equal content must both be freed."""
    assert Segment(3, {}, 0) != Segment(3, {}, 0)


def test_a_process_reads_its_own_memory_without_another_mapping() -> None:
    """Also after the slab has grown. What another process or Slabs wrote, or what a removed slab held, is mapped."""
    slabs = Slabs()
    writer = slabs.writer()
    expected = filled(writer.add(SHAPES))
    writer.add({"more": ("int64", (SLAB_BYTES,))})["more"][:] = 7
    segment = writer.finish()
    before = segments()
    (own,) = slabs.read([segment])
    assert segments() == before
    (other,) = Slabs().read([segment])
    assert segments() > before
    for seen in (own, other):
        assert list(seen) == [*SHAPES, "more"]
        assert all(seen[name].tolist() == expected[name].tolist() for name in SHAPES)
        assert set(seen["more"].tolist()) == {7}
    slabs.clear()
    assert slabs.read([segment])[0]["ids"].tolist() == expected["ids"].tolist()
    segment.close()


def test_memory_that_is_read_without_a_mapping_is_not_written_again() -> None:
    """While the descriptor is open, as a worker has it until its work is done."""
    slabs = Slabs()
    writer = slabs.writer()
    writer.add({"ids": ("int64", (4,))})["ids"][:] = 7
    segment = writer.finish()
    (seen,) = slabs.read([segment])
    slabs.writer().add({"ids": ("int64", (4,))})["ids"][:] = 8
    assert seen["ids"].tolist() == [7] * 4
    segment.close()
    assert slabs.writer().slab is writer.slab


def test_memory_of_another_process_stays_mapped_but_may_be_written_again() -> None:
    """Its owner reuses it once the descriptor is closed, and the reader then sees the new content, also more of it."""
    slabs, reader = Slabs(), Slabs()
    for count in (4, 5, SLAB_BYTES):
        writer = slabs.writer()
        assert writer.slab is slabs.slabs[0]
        writer.add({"ids": ("int64", (count,))})["ids"][:] = count
        segment = writer.finish()
        (first,), (second,) = reader.read([segment]), reader.read([segment])
        assert set(first["ids"].tolist()) == {count}
        assert first["ids"].shape == (count,)
        assert first["ids"].ctypes.data == second["ids"].ctypes.data
        segment.close()
        assert len(slabs.slabs) == 1


def test_memory_that_is_not_read_again_is_given_back() -> None:
    slabs, reader = Slabs(), Slabs()
    made = []
    for count in (4, 5, 6):
        writer = slabs.writer()
        writer.add({"ids": ("int64", (count,))})["ids"][:] = count
        made.append(writer.finish())
    before = segments()
    for some in (made[:2], [], made[1:]):
        assert [set(arrays["ids"].tolist()) for arrays in reader.read(some)] == [{made.index(one) + 4} for one in some]
        assert segments() == before + 4  # two mappings and their descriptors
    for segment in made:
        segment.close()
